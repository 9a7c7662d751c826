"""Columns fetched without a model: a place in each data set, that moves on by one sample a run."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from plait.data.columns import Column
from plait.data.datasets import SKIPPED, ColumnSource, Dataset
from plait.engine.op import Op
from plait.errors import DataError, OutOfRangeError

__all__ = ["Cursor", "column_ops"]

_END: Any = object()


class Cursor:
    """A place in a data set, and the readers that are ahead of it for the columns that were asked for last."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.epoch = 0
        self.position = 0
        self._columns: tuple[Column, ...] = ()
        self._iterator: Iterator[Any] | None = None

    def read(self, columns: tuple[Column, ...]) -> Any:
        """The values of these columns in the next sample, whichever pass it is in."""
        if columns != self._columns:
            self.close()
            self._columns = columns
        whole = self.position == 0  # whether this pass is seen from its start on
        while True:
            value = self._next()
            if value is _END:
                if whole:
                    raise DataError(
                        f"{self.dataset.name}: pass {self.epoch} gave no sample; look at the warnings, or check that it"
                        " is not smaller than a batch where remainders are dropped"
                    )
                whole = True
                self.epoch, self.position = self.epoch + 1, 0
                continue
            self.position += 1
            if value is not SKIPPED:
                return value

    def _next(self) -> Any:
        """The next sample of this pass, or what says that it is over."""
        iterator = self._iterator or self._open()
        try:
            value = next(iterator, _END)
        except BaseException:
            self._iterator = None  # a generator that raised would seem to be at its end
            raise
        if value is _END:
            self._iterator = None
        return value

    def _open(self) -> Iterator[Any]:
        passes = self.dataset.num_epochs
        if passes is not None and self.epoch >= passes:
            raise OutOfRangeError(f"{self.dataset.name}: no pass is left of {passes}")
        self._iterator = ColumnSource(self.dataset, self._columns).samples(self.epoch, self.position)
        return self._iterator

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, Generator):
            iterator.close()


def column_ops(fetches: Any, cursors: dict[int, Cursor]) -> dict[Column, Op]:
    """An Op for each column among `fetches`; those of one data set are of one sample."""
    groups: dict[int, list[Column]] = {}
    for column in dict.fromkeys(_columns_in(fetches)):
        groups.setdefault(id(column.origin.owner), []).append(column)
    ops: dict[Column, Op] = {}
    for columns in groups.values():
        dataset: Dataset = columns[0].origin.owner
        cursor = cursors.setdefault(id(dataset), Cursor(dataset))
        read = Op(_reader(cursor, tuple(columns)), name=f"read {dataset.name}")
        ops |= {column: Op(_taker(place), [read], name=column.name) for place, column in enumerate(columns)}
    return ops


def _reader(cursor: Cursor, columns: tuple[Column, ...]) -> Any:
    return lambda: cursor.read(columns)


def _taker(place: int) -> Any:
    return lambda values: values[place]


def _columns_in(node: Any) -> Iterable[Column]:
    if isinstance(node, Column):
        yield node
    elif isinstance(node, Mapping):
        yield from _columns_in(list(node.values()))
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from _columns_in(child)
