"""The bundled handwriting: 1797 images of digits, and a source of what a party knows of each."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch

from plait import efl
from plait.data import TensorSource

__all__ = ["load", "source"]

TRAINING_IMAGES = 1437  # four fifths of 1797
BATCH_SIZE = 32


@functools.cache
def load() -> tuple[torch.Tensor, torch.Tensor]:
    """The images, from 0 to 1, and the digits that they show. `DIGITS.md` says whose they are."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        images, digits = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    # A fixed order, mixed once: the held-out images come from everywhere in the file, not from its end.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order].unsqueeze(1).float() / 16, digits[order].long()


def source(mode: efl.MODE, *fields: str) -> TensorSource:
    """Each image's id, and of "left", "right" (a half, 8 by 4 pixels) and "digit" (the label) those that are named.

    Shuffled batches to train on; to evaluate on, the held-out images, all at once. Whatever the fields, the order is
    the same: parties whose rows are sorted alike shuffle them alike.
    """
    images, digits = load()
    known = {"left": images[..., :4], "right": images[..., 4:], "digit": digits}
    training = mode is efl.MODE.TRAIN
    rows = slice(TRAINING_IMAGES) if training else slice(TRAINING_IMAGES, None)
    tensors = {"id": torch.arange(len(images))} | {field: known[field] for field in fields}
    batch_size = BATCH_SIZE if training else len(images) - TRAINING_IMAGES
    return TensorSource({name: tensor[rows] for name, tensor in tensors.items()}, batch_size, shuffle=training)
