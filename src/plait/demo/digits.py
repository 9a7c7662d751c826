"""The bundled handwriting: 1797 images of digits, and a source of what a party knows of each."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

import numpy as np
import torch

from plait import efl
from plait.data import TensorSource

__all__ = ["load", "source"]

BATCH_SIZE = 32


@functools.cache
def load() -> tuple[torch.Tensor, torch.Tensor]:
    """The images, from 0 to 1, and the digits that they show. `DIGITS.md` says whose they are."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        images, digits = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    # A fixed order, mixed once: the held-out images come from everywhere in the file, not from its end.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order].unsqueeze(1).float() / 16, digits[order].long()


def source(mode: efl.MODE, *fields: str, aligned: Path | None = None) -> TensorSource:
    """Each image's id, and of "left", "right" (a half, 8 by 4 pixels) and "digit" (the label) those that are named.

    Shuffled batches to train on; to evaluate on, the held-out images, all at once. Whatever the fields, the order is
    the same: parties whose rows are sorted alike shuffle them alike. `aligned`: only the images whose ids `plait psi`
    has found at both parties; they are sorted, so that the demo ends the same whenever it is run.
    """
    images, digits = load()
    known = {"left": images[..., :4], "right": images[..., 4:], "digit": digits}
    ids = torch.arange(len(images)) if aligned is None else _ids(aligned)
    training, held_out = mode is efl.MODE.TRAIN, len(ids) - len(ids) * 4 // 5
    rows = ids[:-held_out] if training else ids[-held_out:]
    tensors = {"id": torch.arange(len(images))} | {field: known[field] for field in fields}
    batch_size = BATCH_SIZE if training else held_out
    return TensorSource({name: tensor[rows] for name, tensor in tensors.items()}, batch_size, shuffle=training)


def _ids(aligned: Path) -> torch.Tensor:
    """The ids in a directory of `plait psi`."""
    found = []
    for path in sorted(aligned.glob("part-*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            found += [int(row["id"]) for row in csv.DictReader(file)]
    return torch.tensor(sorted(found))
