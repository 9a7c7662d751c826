"""From ids to rows: a hash index over whole arrays, and the memory that grows without being moved."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.errors import ClusterError

__all__ = ["Index", "mix", "physical_memory", "reserve"]

Ids: TypeAlias = npt.NDArray[np.int64]
Hashes: TypeAlias = npt.NDArray[np.uint64]

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # Python names it since 3.13
_MOST_ADDRESSES = 2**40
_LEAST_ADDRESSES = 2**26
_EMPTY = np.int32(-1)
_FIRST_BITS = 10
_MAX_SLOTS = 2**31 - 1
_MAX_LOAD = 0.6
"""Above it, ids collide often; just after growing, half of it is used, which is 8 + 4 / 0.3 = 21 bytes an id."""
_BLOCK = 1 << 14
"""Ids that are placed at a time when the index grows, so that growing takes little memory of its own."""


def mix(values: npt.NDArray[Any]) -> Hashes:
    """Splitmix64's finish: 64 bits in, 64 bits out, each of which depends on all; the same on every machine."""
    mixed: Hashes = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def reserve(rows: int | None, width: int, dtype: torch.dtype) -> Tensor:
    """Zeros of [rows, width] that cost no memory until they are written to; None: as many as the machine could hold.

    So a table grows in place: the addresses are there from the start, the memory comes page by page.
    """
    row = width * dtype.itemsize
    if rows == 0:
        return torch.zeros(0, width, dtype=dtype)
    size = rows * row if rows is not None else min(physical_memory(), _MOST_ADDRESSES) // row * row
    memory = _map(size)
    while memory is None and rows is None and size >= _LEAST_ADDRESSES:  # many tables, or a limit set for the process
        size = size // 2 // row * row
        memory = _map(size)
    if memory is None:
        raise ClusterError(
            f"this machine does not give {size} bytes of address space: use more servers, or raise ulimit -v"
        )
    return torch.frombuffer(memory, dtype=dtype).view(-1, width)


def _map(size: int) -> mmap.mmap | None:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, ValueError, OverflowError):
        return None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # rows are looked up all over the table: fewer, larger pages
    return memory


def physical_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Index:
    """Int64 ids and their slots: 0, 1, 2, ... in the order in which the ids came.

    Open addressing: `_table` has slots at places that follow from the ids' hashes, `_ids` has the ids in the order of
    slots. All work is on whole arrays: each round of a loop settles most of the ids that are left.
    """

    def __init__(self, most: int = _MAX_SLOTS) -> None:
        self._ids: Ids = reserve(None, 1, torch.int64).numpy().reshape(-1)
        self._most = min(most, len(self._ids), _MAX_SLOTS)
        self._count = 0
        self._bits = _FIRST_BITS
        self._table = np.full(1 << self._bits, _EMPTY, np.int32)

    def __len__(self) -> int:
        return self._count

    def ids(self, start: int = 0) -> Ids:
        """The ids from slot `start` on, in the order of slots; a view, to be read."""
        return self._ids[start : self._count]

    def slots(self, ids: Ids, *, create: bool) -> Ids:
        """The slot of each id, which may be there more than once; -1 for what is unknown, unless it is to be made."""
        found = self._find(ids)
        if create:
            unknown = np.flatnonzero(found < 0)
            if len(unknown):
                found[unknown] = self._append(ids[unknown])
        return found

    def _find(self, ids: Ids) -> Ids:
        places, steps = self._places(ids)
        found = self._table[places].astype(np.int64)
        # slot -1, of an empty place, reads the last of the reserved ids, which decides nothing
        left = np.flatnonzero((found >= 0) & (self._ids[found] != ids))
        places, steps, wanted = places[left], steps[left], ids[left]
        while len(left):
            places = (places + steps) & (len(self._table) - 1)
            slots = self._table[places]
            found[left] = slots
            wrong = np.flatnonzero((slots >= 0) & (self._ids[slots] != wanted))
            left, places, steps, wanted = left[wrong], places[wrong], steps[wrong], wanted[wrong]
        return found

    def _places(self, ids: Ids) -> tuple[Ids, Ids]:
        """Where each id's search begins, and how far it goes on from there: odd, so that it comes to every place."""
        hashes = mix(ids)
        # the upper bits: the lower ones say which server an id lives on, and may be the same for all ids here
        places = (hashes >> np.uint64(64 - self._bits)).view(np.int64)
        steps = (hashes & np.uint64(len(self._table) - 1) | np.uint64(1)).view(np.int64)
        return places, steps

    def _append(self, ids: Ids) -> Ids:
        """Slots for ids that have none yet."""
        distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        order = np.argsort(first)
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        start, stop = self._count, self._count + len(order)
        if stop > self._most:
            raise ClusterError(f"{stop} rows are more than this server could hold, {self._most}: use more servers")
        self._ids[start:stop] = distinct[order]
        self._count = stop
        if stop > _MAX_LOAD * len(self._table):
            self._grow()
        else:
            self._insert(start, stop)
        slots: Ids = start + ranks[inverse]
        return slots

    def _grow(self) -> None:
        while self._count > _MAX_LOAD * (1 << self._bits):
            self._bits += 1
        self._table = np.empty(0, np.int32)  # the old one goes first: all that it says follows from the ids
        self._table = np.full(1 << self._bits, _EMPTY, np.int32)
        for start in range(0, self._count, _BLOCK):
            self._insert(start, min(start + _BLOCK, self._count))

    def _insert(self, start: int, stop: int) -> None:
        """Put slots whose ids are not in the table into it."""
        slots = np.arange(start, stop, dtype=np.int32)
        places, steps = self._places(self._ids[start:stop])
        while len(slots):
            empty = np.flatnonzero(self._table[places] < 0)
            self._table[places[empty]] = slots[empty]
            # where several wrote to one place, one of them is there; the others go on
            left = np.flatnonzero(self._table[places] != slots)
            slots, steps = slots[left], steps[left]
            places = (places[left] + steps) & (len(self._table) - 1)
