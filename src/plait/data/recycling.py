"""Memory for batches, used again once nobody holds them.

A fresh block of some megabytes costs a page fault for every four kilobytes, and its memory is in no cache.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plait.errors import DataError

__all__ = ["Recycled", "SharedBlocks"]

Block = NDArray[np.uint8]
_LINE, _LARGE = 64, 2 << 20


def _holders(blocks: Sequence[Block]) -> list[int]:
    """How many hold each block, this list and this function counted: tensors made from a block hold it."""
    return [sys.getrefcount(block) for block in blocks]


_UNHELD = _holders([np.empty(1, np.uint8)])[0]


def _unheld(blocks: Sequence[Block]) -> list[int]:
    """The places of those blocks that nothing but this list holds."""
    return [place for place, holders in enumerate(_holders(blocks)) if holders == _UNHELD]


def _fresh(size: int) -> Block:
    """Memory that begins where a line of the processor's caches does, as torch's: rows are not spread over two.

    A large block asks for large pages, whose addresses the processor finds sooner.
    """
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        room, unit = np.empty(size + _LINE, np.uint8), _LINE
    else:
        pages = mmap.mmap(-1, size + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system that has none
            pages.madvise(mmap.MADV_HUGEPAGE)
        room, unit = np.frombuffer(pages, np.uint8), _LARGE
    start = -room.ctypes.data % unit
    return room[start : start + size]


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
                block = _fresh(size)
                self._blocks = [*self._blocks, block][-self._most :]
            tensor = torch.from_numpy(block).view(dtype)
        return tensor.view(tuple(shape))

    def _unheld(self, size: int) -> Block | None:
        for place in _unheld(self._blocks):
            if self._blocks[place].nbytes == size:
                return self._blocks[place]
        return None


class SharedBlocks:
    """Blocks of memory that processes forked later share. One is given out again once nobody holds it."""

    def __init__(self, count: int, size: int) -> None:
        try:
            self._blocks: list[Block] = [np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8) for _ in range(count)]
        except OSError as error:
            raise DataError(
                f"there is no memory for {count} batches of {size} bytes that processes share: {error.strerror}; give a"
                " smaller batch_size, or leave reader_class=ForkedReader out"
            ) from error
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, torch.Tensor] | None:
        """The number of a block and a tensor in it, which holds it; None if all are held."""
        with self._lock:
            for number in _unheld(self._blocks):
                tensor = torch.from_numpy(self._blocks[number])
                break
            else:
                return None
        return number, tensor[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def array(self, number: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The same memory, in a child."""
        return np.frombuffer(self._blocks[number].data, dtype, math.prod(shape)).reshape(tuple(shape))
