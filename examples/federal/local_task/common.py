"""What both parties say alike: the images that both know, and how long they train."""

from __future__ import annotations

import functools

import torch

import plait
from plait import demo, efl

COMMON_IMAGES = 200  # the first of the training images; the follower knows no others
TRAINING_IMAGES = 1437  # four fifths of 1797
PASSES = 100
ADAM = functools.partial(torch.optim.Adam, lr=1e-3)


def joint_source(side, mode):
    """Halves of the images that both parties know, with a number by which they know them; labels with the left."""
    training = mode is efl.MODE.TRAIN
    rows = slice(COMMON_IMAGES) if training else slice(TRAINING_IMAGES, None)
    images, digits = demo.load()
    half = images[..., :4] if side == "left" else images[..., 4:]
    tensors = {"id": torch.arange(len(images))[rows], "half": half[rows].flatten(1)}
    if side == "left":
        tensors["digit"] = digits[rows]
    return plait.data.TensorSource(tensors, batch_size=32 if training else 360, shuffle=training)
