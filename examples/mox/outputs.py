"""Predictions into a file, through `mox.file`: on a local path, or on `s3://` if one is given.

python examples/mox/outputs.py outputs.csv
python examples/mox/outputs.py s3://bucket/outputs.csv
"""

from __future__ import annotations

import csv
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import mox

STEPS = 10


def input_fn(mode, **kwargs):
    """Points; while training, with the quadrant that each lies in."""
    generator = torch.Generator().manual_seed(1 if mode == mox.ModeKeys.TRAIN else 2)
    points = torch.randn(32 * STEPS, 2, generator=generator)
    quadrants = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
    if mode == mox.ModeKeys.TRAIN:
        return torch.utils.data.TensorDataset(points, quadrants)
    return torch.utils.data.TensorDataset(points)


def model_fn(inputs, run_mode, **kwargs):
    points = inputs[0]
    hidden = plait.layer("hidden", nn.Linear, 2, 16)(points).relu()
    logits = plait.layer("logits", nn.Linear, 16, 4)(hidden)
    if run_mode == mox.ModeKeys.TRAIN:
        loss = functional.cross_entropy(logits, inputs[1])
        return mox.ModelSpec(loss=loss, log_info={"loss": loss})
    prediction = logits.argmax(1)
    return mox.ModelSpec(output_info={"points": points, "prediction": prediction})


def write_to(url):
    def output_fn(outputs):
        with mox.file.File(url, "w") as f:
            rows = csv.writer(f, lineterminator="\n")
            rows.writerow(["x", "y", "prediction"])
            for step in outputs:
                rows.writerows([*point, label] for point, label in zip(step["points"], step["prediction"], strict=True))

    return output_fn


def main():
    url = sys.argv[1] if len(sys.argv) > 1 else f"{tempfile.mkdtemp()}/outputs.csv"
    log_dir = tempfile.mkdtemp()
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("adam", learning_rate=0.01),
        batch_size=32,
        run_mode=mox.ModeKeys.TRAIN,
        max_number_of_steps=300,
        log_every_n_steps=100,
        log_dir=log_dir,
    )
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        output_fn=write_to(url),
        output_every_n_steps=STEPS,  # as many as there are: output_fn is called once
        batch_size=32,
        run_mode=mox.ModeKeys.PREDICT,
        max_number_of_steps=STEPS,
        checkpoint_path=log_dir,
    )
    print(f"{mox.file.stat(url).length} bytes in {url}")


if __name__ == "__main__":
    main()
