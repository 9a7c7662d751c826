"""`Dataset`: rows by number, read in parallel as columns, in an order that is a pure function of (seed, epoch)."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.data.columns import Column, Evaluation, Origin, SkippedSample, described, root, row_of
from plait.data.forking import Forked
from plait.data.reading import read_groups
from plait.data.recycling import Recycled
from plait.data.rows import ForkedRows, Rows, SharedBatches, forms_of, stacked, worked
from plait.data.sources import as_tensor
from plait.errors import ConfigError, DataError, FunctionError, PlaitError
from plait.rng import derive_seed

__all__ = ["SKIPPED", "ColumnSource", "Dataset", "Order", "SkippedSample", "column_source", "shuffled", "stacked"]

log = logging.getLogger("plait")

SKIPPED: Any = object()
"""In the place of a sample that was left out."""
_AT_ONCE = 32
"""Samples that a process is asked for at a time."""
_HELD = 5
"""Batches of processes that somebody may hold beside those on their way; where more are held, the next are sent."""


class Order(Protocol):
    """The order of a pass."""

    def __call__(self, epoch: int) -> NDArray[np.int64]:
        """The rows' numbers in the order of pass `epoch`; for the same pass, the same."""


def shuffled(rows: int, seed: int) -> Order:
    """All rows, in an order of its own for each pass."""

    def order(epoch: int) -> NDArray[np.int64]:
        generator = np.random.Generator(np.random.PCG64(derive_seed(seed, "epoch", epoch)))
        return generator.permutation(rows)

    return order


class Dataset:
    """Rows by number and the columns that they have.

    With a `batch_size`, columns are of batches: the rows' fields are joined first, by stacking or by `join`.
    """

    seekable = True

    def __init__(
        self,
        name: str,
        rows: int,
        fields: Mapping[str, Callable[[Any], Any]] | Callable[[Origin], Mapping[str, Column]],
        *,
        facts: Mapping[str, Any] | None = None,
        order: Order | None = None,
        seed: int = 0,
        num_epochs: int | None = None,
        batch_size: int | None = None,
        drop_remainder: bool = False,
        join: Callable[[list[list[Any]]], Sequence[Any]] | None = None,
        readers: int = 8,
        forks: bool = False,
        capacity: int = 256,
    ) -> None:
        """`readers` threads read; or (`forks`) as many processes, where rows are stacked into batches."""
        for label, number in (("num_epochs", num_epochs), ("batch_size", batch_size)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ConfigError(f"{label}={number!r}: write a whole number from 1 on, or None")
        for label, number in (("num_readers", readers), ("capacity", capacity)):
            if not isinstance(number, int) or number < 1:
                raise ConfigError(f"{label}={number!r}: write a whole number from 1 on")
        if rows < 1:
            raise DataError(f"{name}: there are no samples")
        self.name, self.rows, self.seed = name, rows, int(seed)
        self.num_epochs, self.batch_size, self.drop_remainder = num_epochs, batch_size, drop_remainder
        self.readers, self.forks, self.capacity = readers, forks, capacity
        self.skipped = 0
        """Samples left out so far."""
        self._facts = dict(facts or {})
        self._order = order or (lambda epoch: np.arange(rows))  # noqa: ARG005 - the same at every pass
        self._join = join or stacked
        self.stacks = join is None
        """Whether batches are stacked rows, and nothing else."""
        self._lock = threading.Lock()
        self.origin = Origin(name)
        self.origin.owner = self
        made = fields(self.origin) if callable(fields) else _roots(self.origin, fields)
        self.row_columns: dict[str, Column] = dict(made)
        """Of single rows."""
        self.columns = self.row_columns
        """What `get` gives: those of rows, or those of batches."""
        if batch_size is not None:
            batches = Origin(name)
            batches.owner = self
            self.columns = {name: root(batches, name, _field(place)) for place, name in enumerate(self.row_columns)}

    def get(self, items: Sequence[str]) -> list[Column]:
        """The columns of these names.

        >>> import torch
        >>> from plait.data.datasets import Dataset
        >>> numbers = Dataset("numbers", 3, {"x": torch.tensor})
        >>> (x,) = numbers.get(["x"])
        >>> [int(value) for value, in column_source(x + 10).batches(0, 0)]
        [10, 11, 12]
        """
        if isinstance(items, str):
            raise DataError(f"get({items!r}): give a list of names, get([{items!r}])")
        unknown = [name for name in items if name not in self.columns]
        if unknown:
            raise DataError(f"{self.name}: no field {unknown[0]!r}; there are {', '.join(self.columns)}")
        return [self.columns[name] for name in items]

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """As a source: every field, by name."""
        return self.everything().batches(epoch, start)

    def everything(self) -> ColumnSource:
        return ColumnSource(self, dict(self.columns))

    def batched(self, batch_size: int) -> ColumnSource:
        return self.everything().batched(batch_size)

    def fingerprint(self) -> dict[str, Any]:
        return self.everything().fingerprint()

    def facts(self) -> dict[str, Any]:
        """What must not change between two runs; where the data lies, and the name that says so, may."""
        return {"rows": self.rows, "seed": self.seed, **self._facts}

    def order(self, epoch: int) -> NDArray[np.int64]:
        return self._order(epoch)

    def joined(self, key: tuple[int, ...], rows: list[list[Any]]) -> Sequence[Any]:
        """The fields of a batch, made of its rows'."""
        try:
            with row_of(key):
                return self._join(rows)
        except PlaitError:
            raise
        except Exception as error:
            raise FunctionError(
                f"{self.name}: {described(key)} could not be made: {type(error).__name__}: {error}"
            ) from error

    def left_out(self, why: str) -> None:
        with self._lock:
            self.skipped += 1
            count = self.skipped
        log.warning("%s: left out, %d so far: %s", self.name, count, why)


def _roots(origin: Origin, fields: Mapping[str, Callable[[Any], Any]]) -> dict[str, Column]:
    return {name: root(origin, name, function) for name, function in fields.items()}


def _field(place: int) -> Callable[[Any], Any]:
    def field(batch: Any) -> Any:
        return batch[place]

    return field


class ColumnSource:
    """Columns of one data set as a source: of samples, or of batches of them."""

    seekable = True

    def __init__(self, dataset: Dataset, columns: Any, batch_size: int | None = None) -> None:
        self.dataset = dataset
        self.columns = columns
        """A dict, a tuple or a list of columns, or one: a batch has the same form."""
        self.num_epochs = dataset.num_epochs
        self._group = dataset.batch_size or batch_size or 1
        self._wanted = list(columns.values()) if isinstance(columns, Mapping) else list(columns)
        self.batch_size: int | None = dataset.batch_size or batch_size
        self.drop_remainder = dataset.drop_remainder
        self.recycled = Recycled()
        own = dataset.batch_size is not None
        self.of_rows = Evaluation(list(dataset.row_columns.values()) if own else self._wanted)
        self.of_batches = Evaluation(self._wanted) if own else None
        self.in_place = self.batch_size is not None and (not own or dataset.stacks)
        """Whether rows are put into a batch as they come; samples, and rows for a function of the user's, are not."""
        self._shared: SharedBatches | None = None
        self._lock = threading.Lock()

    def batched(self, batch_size: int) -> ColumnSource:
        """The same in batches; those of a data set that makes its own stay."""
        return ColumnSource(self.dataset, self.columns, batch_size)

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        found = self.samples(epoch, start)
        return found if self.batch_size is not None else _none_skipped(found, self.dataset.name)

    def count(self, epoch: int) -> int:
        rows, size = len(self.dataset.order(epoch)), self._group
        return rows // size if self.dataset.drop_remainder else -(-rows // size)

    def every(self, epoch: int, start: int, step: int) -> Iterator[Any]:
        """The batches start, start + step, ...; the others are not made."""
        found = self.samples(epoch, start, step)
        return found if self.batch_size is not None else _none_skipped(found, self.dataset.name)

    def samples(self, epoch: int, start: int, step: int = 1) -> Generator[Any, None, None]:
        """The same, with `SKIPPED` in the place of a single sample that was left out."""
        dataset = self.dataset
        order = dataset.order(epoch)
        size = self._group
        end = len(order) - len(order) % size if dataset.drop_remainder else len(order)
        groups = (order[begin : begin + size].tolist() for begin in range(start * size, end, size * step))
        if dataset.forks and self.in_place:
            return self._forked(groups, epoch)
        maker = functools.partial(Rows, self, epoch)
        return read_groups(groups, maker, threads=dataset.readers, ahead=self._ahead)

    def row(self, epoch: int, number: int) -> list[Any]:
        """The values of a row in a pass; what they draw depends on nothing else."""
        return self.of_rows(number, (self.dataset.seed, epoch, number))

    @property
    def _ahead(self) -> int:
        """Two batches at least: one is not enough for readers to go on while somebody copies the last to a device."""
        return max(self.dataset.capacity, 2 * self._group)

    def _forked(self, groups: Iterator[Sequence[int]], epoch: int) -> Generator[Any, None, None]:
        """The same by processes."""
        first = next(groups, None)
        if first is None:
            return
        shared = self._shared_batches(epoch, first)
        seed = derive_seed(self.dataset.seed, "pass", epoch, first[0])
        threads = self.dataset.readers
        processes = Forked(functools.partial(worked, self, shared), threads, seed)
        try:
            yield from read_groups(
                itertools.chain([first], groups),
                functools.partial(ForkedRows, self, epoch, processes, shared),
                threads=threads,
                ahead=self._ahead,
                at_once=_AT_ONCE,
                on_end=processes.end_soon,
            )
        finally:
            processes.close()

    def _shared_batches(self, epoch: int, numbers: Sequence[int]) -> SharedBatches:
        """Memory that processes share; a row, made for this alone, shows what batches need."""
        if self._shared is not None:
            return self._shared
        count = -(-self._ahead // self._group) + _HELD
        for number in numbers:
            try:
                forms = forms_of(self.row(epoch, number))
            except SkippedSample:
                continue
            except PlaitError:  # it will come again, from a process, at its place
                break
            with self._lock:
                self._shared = self._shared or SharedBatches(forms, self._group, count)
            return self._shared
        return SharedBatches({}, self._group, count)

    def fingerprint(self) -> dict[str, Any]:
        facts = self.dataset.facts()
        names = [column.name for column in self._wanted]
        return {
            "kind": "columns",
            **facts,
            "columns": names,
            "batch_size": self.batch_size,
            "drop_remainder": self.drop_remainder,
        }

    def result(self, epoch: int, numbers: Sequence[int], rows: Rows) -> Any:
        """What a group has become: a sample, a batch of samples, or a batch with columns of its own."""
        kept = rows.kept
        if not kept and self.batch_size is not None:
            raise DataError(
                f"{self.dataset.name}: all {len(numbers)} samples of a batch had to be left out; look at the files that"
                " the warnings name"
            )
        if not kept:
            return SKIPPED
        if self.batch_size is None:
            return self._formed([as_tensor(value) for value in rows.single()])
        if self.of_batches is None:
            return self._formed(rows.stacked())
        key = (self.dataset.seed, epoch, -1, int(numbers[0]))
        fields = rows.stacked() if self.dataset.stacks else self.dataset.joined(key, rows.listed())
        values = self.of_batches(fields, key)
        return self._formed([as_tensor(value) for value in values])

    def _formed(self, values: Sequence[Any]) -> Any:
        return dict(zip(self.columns, values, strict=True)) if isinstance(self.columns, Mapping) else tuple(values)


def _none_skipped(samples: Generator[Any, None, None], name: str) -> Iterator[Any]:
    with contextlib.closing(samples):  # the error's traceback must not keep the readers
        for sample in samples:
            if sample is SKIPPED:
                raise DataError(f"{name}: a sample had to be left out, which only batches can: give a batch_size")
            yield sample


def column_source(data: Any) -> ColumnSource | None:
    """The source of a column, or of a list, tuple or dict of them; None for anything else."""
    if isinstance(data, Column):
        data = (data,)
    values = list(data.values()) if isinstance(data, Mapping) else data
    if not isinstance(values, (list, tuple)) or not any(isinstance(value, Column) for value in values):
        return None
    strange = [type(value).__name__ for value in values if not isinstance(value, Column)]
    if strange:
        raise DataError(f"columns and a {strange[0]} do not go together: return columns of one data set only")
    owners = {id(column.origin.owner): column.origin for column in values}
    if len(owners) > 1:
        names = ", ".join(origin.name for origin in owners.values())
        raise DataError(f"columns of different data sets ({names}) do not go together: their samples do not match")
    return ColumnSource(values[0].origin.owner, data)
