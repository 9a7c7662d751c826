"""What both parties say alike: their half of each image, and the procedure."""

from __future__ import annotations

import functools

import torch

import plait
from plait import demo, efl

TRAINING_IMAGES = 1437  # four fifths of 1797
PROCEDURE = efl.procedure_fn.train_and_eval(max_iter=15)
ADAM = functools.partial(torch.optim.Adam, lr=1e-3)


def source(side, mode):
    """One half of each image, 8 by 4 pixels, and a number by which both parties know it; labels with the left half."""
    training = mode is efl.MODE.TRAIN
    rows = slice(TRAINING_IMAGES) if training else slice(TRAINING_IMAGES, None)
    images, digits = demo.load()
    half = images[..., :4] if side == "left" else images[..., 4:]
    tensors = {"id": torch.arange(len(images))[rows], "half": half[rows].flatten(1)}
    if side == "left":
        tensors["digit"] = digits[rows]
    return plait.data.TensorSource(tensors, batch_size=32, shuffle=training)
