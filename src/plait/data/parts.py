"""A worker's part of the data: every so many batches of a source, so that all parts together are the source."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from plait.data.sources import Source, as_source
from plait.errors import DataError

__all__ = ["Divisible", "OwnPart", "PartSource", "Strided", "is_part", "part_of"]


@runtime_checkable
class Strided(Protocol):
    """A source that can leave batches out without making them."""

    def count(self, epoch: int) -> int:
        """How many batches pass `epoch` has."""

    def every(self, epoch: int, start: int, step: int) -> Iterator[Any]:
        """The batches with the numbers start, start + step, start + 2 * step, ..."""


@runtime_checkable
class Divisible(Protocol):
    """A source that divides its rows among workers, not its batches."""

    def divided(self, index: int, count: int) -> Source:
        """The part of worker `index` of `count`."""


class PartSource:
    """Batches number `index`, `index + count`, ... of a source: the part of worker `index` of `count`.

    What the workers read in their n-th step are `count` batches that follow each other in the source. With
    `together`, batches at the end of a pass that are too few for everybody are left out, so that passes end together.
    """

    def __init__(self, source: Source, index: int, count: int, *, together: bool) -> None:
        self.source = source
        self.index = index
        self.count = count
        self.together = together
        self.num_epochs = source.num_epochs
        self.batch_size = source.batch_size
        self.seekable = source.seekable

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        if isinstance(self.source, Strided):
            return self._strided(self.source, epoch, start)
        return self._read(epoch, start)

    def _strided(self, source: Strided, epoch: int, start: int) -> Iterator[Any]:
        found = source.every(epoch, start * self.count + self.index, self.count)
        left = max(0, source.count(epoch) // self.count - start) if self.together else None
        with _closed(found):
            yield from itertools.islice(found, left)

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        batches = self.source.batches(epoch, start * self.count)
        with _closed(batches):
            try:
                group = list(itertools.islice(batches, self.count))
            except DataError:
                if self._is_over(epoch, start):
                    return
                raise
            while group:
                if len(group) < self.count and self.together:
                    return
                if self.index < len(group):
                    yield group[self.index]
                group = list(itertools.islice(batches, self.count))

    def _is_over(self, epoch: int, start: int) -> bool:
        """Whether the source ends soon after this worker's last batch: it could not be read up to `start * count`."""
        if start == 0:
            return False
        others = self.count - self.index - 1
        batches = self.source.batches(epoch, start * self.count - others)
        with _closed(batches):
            return sum(1 for _ in itertools.islice(batches, others)) < others

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "part", "index": self.index, "count": self.count, "of": self.source.fingerprint()}


def _closed(batches: Iterator[Any]) -> AbstractContextManager[Any]:
    """Ends a pass's readers with the pass, or with whoever stops reading it."""
    return contextlib.closing(batches) if isinstance(batches, Generator) else contextlib.nullcontext()


class OwnPart:
    """Data that is this worker's part already, such as files chosen with `split_files`: it is not divided again.

    >>> OwnPart([{"x": 1}, {"x": 2}]).num_epochs is None
    True
    """

    is_part = True

    def __init__(self, data: Any) -> None:
        self.source = as_source(data)
        self.num_epochs = self.source.num_epochs
        self.batch_size = self.source.batch_size
        self.seekable = self.source.seekable

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        return self.source.batches(epoch, start)

    def fingerprint(self) -> dict[str, Any]:
        return self.source.fingerprint()


def is_part(source: Source) -> bool:
    """Whether the source gives each worker its own part by itself."""
    return bool(getattr(source, "is_part", False))


def part_of(source: Source, index: int, count: int, *, together: bool) -> Source:
    """The part of worker `index` of `count`; a source that gives each its own is left alone."""
    if count == 1 or is_part(source):
        return source
    if isinstance(source, Divisible):
        return source.divided(index, count)
    return PartSource(source, index, count, together=together)
