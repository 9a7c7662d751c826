"""A model leaves for serving at the end of its training: the `model_fn` is asked once more, in EXPORT mode.

    python examples/mox/export.py DIRECTORY
    plait serve DIRECTORY/export                       # or a page to try it with, at http://127.0.0.1:8000/

Another format, later, from the checkpoint and without training:

    plait export DIRECTORY examples/mox/export.py DIRECTORY --format torch --version 7
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import demo, mox
from plait.export import load, versions


def input_fn(mode, **kwargs):
    """Handwritten digits of 8x8 pixels; the last 360 of them are held out."""
    images, digits = demo.load()
    part = slice(None, -360) if mode == mox.ModeKeys.TRAIN else slice(-360, None)
    return torch.utils.data.TensorDataset(images[part], digits[part])


def model_fn(inputs, mode, **kwargs):
    images, digits = inputs
    hidden = plait.layer("fc1", nn.Linear, 64, 32)(images.flatten(1)).relu()
    logits = plait.layer("fc2", nn.Linear, 32, 10)(hidden)
    loss = functional.cross_entropy(logits, digits)
    accuracy = (logits.argmax(1) == digits).float().mean()
    export_spec = mox.ExportSpec(
        inputs_dict={"images": images},
        outputs_dict={"probability": logits.softmax(1)},
        labels=[f"digit {digit}" for digit in range(10)],
        preprocess={"layout": "NCHW", "scale": 1 / 255},
    )
    return mox.ModelSpec(loss=loss, log_info={"loss": loss, "accuracy": accuracy}, export_spec=export_spec)


def main():
    directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("adam", learning_rate=0.01),
        run_mode=mox.ModeKeys.TRAIN,
        batch_size=50,
        max_number_of_steps=300,
        log_every_n_steps=100,
        log_dir=directory,
        export_model=mox.ExportKeys.ONNX,
    )

    newest = Path(directory, "export", versions(Path(directory, "export"))[-1])
    model = load(newest)  # needs nothing of this script; neither does ONNX need plait
    images, digits = input_fn(mox.ModeKeys.EVAL).tensors
    found = model.run({"images": images.numpy()})["probability"].argmax(1)
    print(f"version {newest.name}, of step {model.about['step']}: {', '.join(model.about['formats'])}")
    print(f"accuracy {(found == digits.numpy()).mean():.4f}; the first picture is {model.labels[found[0]]}")


if __name__ == "__main__":
    main()
