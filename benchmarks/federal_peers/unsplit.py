"""Both halves and the head in one process and one thread, in plain PyTorch."""

from __future__ import annotations

import itertools
import sys

import split
import torch
from torch.nn import functional as F


def main(shape: split.Shape) -> None:
    split.prepare()
    left, right, head = split.half(shape, "leader"), split.half(shape, "follower"), split.head(shape)
    optimizer = split.sgd(left, right, head)
    rows = [split.features(shape, "leader"), split.features(shape, "follower"), split.labels(shape)]
    batches = itertools.cycle(zip(*rows, strict=True))

    def step() -> float:
        a, b, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(head(torch.cat([left(a), right(b)], 1)), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    split.obey(step)


if __name__ == "__main__":
    main(split.SHAPES[sys.argv[1]])
