"""Memory for batches, used again once nobody holds them.

A fresh block of some megabytes costs a page fault for every four kilobytes, and its memory is in no cache.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Block", "Recycled", "unheld"]

Block = NDArray[np.uint8]


def _holders(blocks: Sequence[Block]) -> list[int]:
    """How many hold each block, this list and this function counted: tensors made from a block hold it."""
    return [sys.getrefcount(block) for block in blocks]


_UNHELD = _holders([np.empty(1, np.uint8)])[0]


def unheld(blocks: Sequence[Block]) -> list[int]:
    """The places of those blocks that nothing but this list holds."""
    return [place for place, holders in enumerate(_holders(blocks)) if holders == _UNHELD]


class Recycled:
    """Empty tensors, of which up to `most` blocks are kept for the next ones."""

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._blocks: list[Block] = []
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            block = self._unheld(size)
            if block is None:
                block = np.empty(size, np.uint8)
                self._blocks = [*self._blocks, block][-self._most :]
            tensor = torch.from_numpy(block).view(dtype)
        return tensor.view(tuple(shape))

    def _unheld(self, size: int) -> Block | None:
        for place in unheld(self._blocks):
            if self._blocks[place].nbytes == size:
                return self._blocks[place]
        return None
