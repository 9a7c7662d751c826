"""What both parties say alike: their half of each image, the procedure, and where exports go."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

import plait
from plait import demo, efl

TRAINING_IMAGES = 1437  # four fifths of 1797
PROCEDURE = efl.procedure_fn.train_and_eval(max_iter=4)
ADAM = functools.partial(torch.optim.Adam, lr=3e-3)
EXPORTS = Path(sys.argv[1] if len(sys.argv) > 1 else "exports")
FORMATS = ["torch", "onnx"]


def halves(side):
    """One half of each image, 8 by 4 pixels."""
    images, _ = demo.load()
    return (images[..., :4] if side == "left" else images[..., 4:]).flatten(1)


def source(side, mode):
    """The halves, and a number by which both parties know each image; labels with the left half."""
    training = mode is efl.MODE.TRAIN
    rows = slice(TRAINING_IMAGES) if training else slice(TRAINING_IMAGES, None)
    half, digits = halves(side), demo.load()[1]
    tensors = {"id": torch.arange(len(half))[rows], "half": half[rows]}
    if side == "left":
        tensors["digit"] = digits[rows]
    return plait.data.TensorSource(tensors, batch_size=32, shuffle=training)
