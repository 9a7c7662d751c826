"""The mean of tensors over the workers of one host, through memory that they share.

Each worker has memory that the others can read. It is a file without a name: when the last process that has it is gone,
however that came, it is gone, too. Sums are taken in the order of ranks, so all workers get the same bits.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plait.cluster.exchange import Mesh
from plait.errors import ClusterError

__all__ = ["SharedMemory"]

_ALIGNED = 64
"""Bytes: where a line of a processor's cache begins."""
_CHUNK = 1 << 16
"""Numbers that are summed at a time: few enough to stay in a core's own cache."""

Values = Sequence[Tensor | None]


class _Field(NamedTuple):
    """Where a tensor lies in a worker's memory, in bytes."""

    start: int
    like: Tensor

    def view(self, memory: Tensor) -> Tensor:
        size = self.like.numel() * self.like.element_size()
        flat = memory[self.start : self.start + size].view(self.like.dtype)
        return flat.as_strided(self.like.shape, _strides(self.like))


def _strides(like: Tensor) -> tuple[int, ...]:
    """The tensor's own, where it fills its memory; gradients mostly come in the layout of their variables."""
    dense = torch.empty_like(like, device="meta")  # keeps the order of dimensions, without holes
    return dense.stride()


def _layout(likes: Sequence[Tensor]) -> tuple[list[_Field], dict[torch.dtype, tuple[int, int]], int]:
    """A field for each tensor, those of one dtype beside each other; each dtype's bytes from and to; and how many."""
    fields: dict[int, _Field] = {}
    runs: dict[torch.dtype, tuple[int, int]] = {}
    end = 0
    for dtype in dict.fromkeys(like.dtype for like in likes):
        begin = end
        for place, like in enumerate(likes):
            if like.dtype == dtype:
                fields[place] = _Field(end, like)
                end += -(-like.numel() * like.element_size() // _ALIGNED) * _ALIGNED
        runs[dtype] = (begin, end)
    return [fields[place] for place in range(len(likes))], runs, max(end, _ALIGNED)


class _Arena:
    """As many bytes of every worker, seen by all."""

    def __init__(self, mesh: Mesh, size: int) -> None:
        self.size = size
        fd = os.memfd_create("plait", os.MFD_CLOEXEC)
        fds = {mesh.rank: fd}
        try:
            os.posix_fallocate(fd, 0, size)  # refused now rather than killed later
            mesh.exchange("shared memory", struct.pack("<Q", size), fd=fd)
            fds |= mesh.taken_fds()
            self.memories = [_map(fds.get(rank), size, rank) for rank in range(mesh.size)]
        except OSError as error:
            reason = f"worker {mesh.rank} cannot share {size} bytes of memory: {error}"
            mesh.close(reason)
            raise ClusterError(reason) from error
        finally:
            for one in fds.values():
                os.close(one)


def _map(fd: int | None, size: int, rank: int) -> Tensor:
    if fd is None or os.fstat(fd).st_size < size:
        raise ClusterError(f"worker {rank} has not shared as much")
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


class SharedMemory:
    """Makes means of lists of tensors; memory is taken once for the largest list."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._arena: _Arena | None = None
        self._turn = 0

    def plan(self, likes: Sequence[Tensor]) -> _Pair | _Many:
        """What makes the mean of tensors that are like these; all workers ask for the same, at the same time."""
        fields, runs, size = _layout(likes)
        if self._arena is None or self._arena.size < 2 * size:
            self._arena = _Arena(self._mesh, 2 * size)
        kind = _Pair if self._mesh.size == 2 else _Many
        return kind(self, self._mesh, self._arena.memories, fields, runs)

    def next_half(self) -> int:
        """Halves of the memory take turns, whatever the plan.

        Who writes into a half has met all others since they read it: each reads before it comes to the next meeting.
        """
        self._turn ^= 1
        return self._turn


class _Pair:
    """Two workers: each reads the other's and adds its own. Half of each is what goes into the sum, which is exact."""

    def __init__(
        self,
        shared: SharedMemory,
        mesh: Mesh,
        memories: Sequence[Tensor],
        fields: Sequence[_Field],
        runs: dict[torch.dtype, tuple[int, int]],
    ) -> None:
        del runs
        self._shared, self._mesh = shared, mesh
        own, other = memories[mesh.rank].chunk(2), memories[1 - mesh.rank].chunk(2)
        self._own = [[field.view(half) for field in fields] for half in own]
        self._other = [[field.view(half) for field in fields] for half in other]

    @torch.no_grad()
    def __call__(self, values: Values) -> dict[int, Tensor]:
        """Overwrite each value by the mean; returns new tensors for those that only the other has."""
        half = self._shared.next_half()
        for value, own in zip(values, self._own[half], strict=True):
            if value is not None:
                torch.mul(value, 0.5, out=own)
        gone = _missing(values)
        gone_there = _read_missing(self._mesh.exchange("mean", gone)[1 - self._mesh.rank])
        made: dict[int, Tensor] = {}
        for place, (value, other) in enumerate(zip(values, self._other[half], strict=True)):
            if value is None:
                if place not in gone_there:
                    made[place] = other.clone()
            elif place in gone_there:
                value.mul_(0.5)
            else:
                torch.add(other, value, alpha=0.5, out=value)
        return made


class _Many:
    """More workers: each sums its share of the numbers, and all read the sums."""

    def __init__(
        self,
        shared: SharedMemory,
        mesh: Mesh,
        memories: Sequence[Tensor],
        fields: Sequence[_Field],
        runs: dict[torch.dtype, tuple[int, int]],
    ) -> None:
        del shared
        self._mesh = mesh
        halves = [memory.chunk(2) for memory in memories]
        result = halves[0][1]  # the chief's second half; the others' is never touched
        self._own = [field.view(halves[mesh.rank][0]) for field in fields]
        self._result = [field.view(result) for field in fields]
        self._sums: list[tuple[list[Tensor], Tensor, Tensor]] = []
        for dtype, (begin, end) in runs.items():
            scratch = torch.empty(_CHUNK, dtype=dtype)
            parts = [half[begin:end].view(dtype).chunk(mesh.size) for half, _ in halves]
            means = result[begin:end].view(dtype).chunk(mesh.size)
            if mesh.rank < len(means):  # there may be fewer numbers than workers
                pieces = zip(*[torch.split(part[mesh.rank], _CHUNK) for part in parts], strict=True)
                for terms, mean in zip(pieces, torch.split(means[mesh.rank], _CHUNK), strict=True):
                    self._sums.append((list(terms), scratch[: mean.numel()], mean))

    @torch.no_grad()
    def __call__(self, values: Values) -> dict[int, Tensor]:
        """Overwrite each value by the mean; returns new tensors for those that only others have."""
        for value, own in zip(values, self._own, strict=True):
            own.zero_() if value is None else own.copy_(value)
        gone = [_read_missing(one) for one in self._mesh.exchange("mean", _missing(values))]
        for terms, scratch, mean in self._sums:
            torch.add(terms[0], terms[1], out=scratch)
            for term in terms[2:]:
                scratch.add_(term)
            torch.div(scratch, self._mesh.size, out=mean)
        self._mesh.exchange("mean, second part")
        made: dict[int, Tensor] = {}
        nowhere = gone[0].intersection(*gone[1:])
        for place, (value, mean) in enumerate(zip(values, self._result, strict=True)):
            if value is not None:
                value.copy_(mean)
            elif place not in nowhere:
                made[place] = mean.clone()
        return made


def _missing(values: Values) -> bytes:
    """The places of those that are not here."""
    gone = [place for place, value in enumerate(values) if value is None]
    return struct.pack(f"<{len(gone)}I", *gone)


def _read_missing(data: bytes) -> set[int]:
    return set(struct.unpack(f"<{len(data) // 4}I", data))
