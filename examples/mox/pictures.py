"""A folder of pictures, a ready network, a command: LeNet learns handwritten digits.

The digits are written into a folder for each class first, as most pictures come, and split into two data sets.
`python examples/mox/pictures.py [DIRECTORY]`
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np
from torch.nn import functional

from plait import demo, mox

NAME = mox.NetworkKeys.LENET
META = mox.get_model_meta(NAME)


def write_pictures(directory):
    """1797 PNG files of 24x24, in folders `digit_0` to `digit_9`."""
    images, digits = demo.load()
    for number, (image, digit) in enumerate(zip(images, digits, strict=True)):
        pixels = (image[0].numpy() * 255).astype(np.uint8)
        path = directory / f"digit_{int(digit)}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), cv2.resize(pixels, (24, 24), interpolation=cv2.INTER_CUBIC))


def main():
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    if not (directory / "all").exists():
        write_pictures(directory / "all")
        mox.split_image_classification_dataset({"train": 0.8, "eval": 0.2}, directory / "all", directory / "split")
    classes = mox.ImageClassificationRawMetadata(directory / "split" / "train").num_classes

    def input_fn(mode, **kwargs):
        training = mode == mox.ModeKeys.TRAIN
        metadata = mox.ImageClassificationRawMetadata(directory / "split" / ("train" if training else "eval"))
        dataset = mox.ImageClassificationRawDataset(
            metadata, num_readers=2, shuffle=training, num_epochs=None if training else 1, channels=1
        )
        image, label = dataset.get(["image", "label"])
        image = mox.get_data_augmentation_fn(NAME, mode, META.default_image_size, META.default_image_size)(image)
        label -= META.default_labels_offset
        return image, label

    def model_fn(inputs, mode, **kwargs):
        images, labels = inputs
        logits, _ = mox.get_model_fn(NAME, mode, num_classes=classes, weight_decay=0.0004)(images)
        loss = functional.cross_entropy(logits, labels)
        loss = loss + sum(mox.get_collection(mox.GraphKeys.REGULARIZATION_LOSSES))
        right = (logits.argmax(1) == labels).float()
        return mox.ModelSpec(loss=loss, log_info={"loss": loss, "accuracy": right.mean()}, output_info={"right": right})

    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("momentum", learning_rate=0.01, momentum=0.9),
        run_mode=mox.ModeKeys.TRAIN,
        batch_size=32,
        max_number_of_steps=200,
        log_dir=str(directory / "log"),
    )

    found = []
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        output_fn=found.extend,
        run_mode=mox.ModeKeys.PREDICT,
        batch_size=60,
        checkpoint_path=str(directory / "log"),
    )
    right = np.concatenate([output["right"] for output in found])
    print(f"accuracy {right.mean():.4f} on {len(right)} pictures held out")


if __name__ == "__main__":
    main()
