"""`Dataset`: rows by number, read in parallel as columns, in an order that is a pure function of (seed, epoch)."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from plait.data.columns import Column, Evaluation, Origin, SkippedSample, described, root, row_of
from plait.data.reading import read_groups
from plait.data.recycling import Recycled
from plait.data.sources import as_tensor
from plait.errors import ConfigError, DataError, FunctionError, PlaitError
from plait.rng import derive_seed

__all__ = ["SKIPPED", "ColumnSource", "Dataset", "Order", "SkippedSample", "column_source", "shuffled", "stacked"]

log = logging.getLogger("plait")

SKIPPED: Any = object()
"""In the place of a sample that was left out."""
_PLACED: Any = object()
"""In the place of a value that is in the batch already."""
_LARGE = 16 << 10


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
        capacity: int = 256,
    ) -> None:
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
        self.readers, self.capacity = readers, capacity
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
        maker = functools.partial(_Rows, self, epoch)
        # two batches at least: one is not enough for readers to go on while somebody copies the last one to a device
        return read_groups(groups, maker, threads=dataset.readers, ahead=max(dataset.capacity, 2 * size))

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

    def result(self, epoch: int, numbers: Sequence[int], rows: _Rows) -> Any:
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


class _Rows:
    """The rows of a group on their way: large values are put into the batch at once, the rest is kept until the end."""

    def __init__(self, source: ColumnSource, epoch: int, numbers: Sequence[int]) -> None:
        self._source, self._epoch, self._numbers = source, epoch, numbers
        self._rows: list[list[Any] | None] = [None] * len(numbers)
        # a sample by itself, and rows for a function of the user's, stay as they are
        self._in_place = source.batch_size is not None and (source.of_batches is None or source.dataset.stacks)
        self._batches: dict[int, torch.Tensor] = {}
        self._large: dict[int, NDArray[Any]] = {}
        """The same memory as arrays: torch's ways are long for so small a thing as a copy."""
        self._lock = threading.Lock()

    @property
    def kept(self) -> list[int]:
        """The places of those that were not left out."""
        return [place for place, row in enumerate(self._rows) if row is not None]

    def work(self, place: int) -> None:
        dataset, number = self._source.dataset, self._numbers[place]
        try:
            row = self._source.of_rows(number, (dataset.seed, self._epoch, number))
        except SkippedSample as skipped:
            dataset.left_out(str(skipped))
            return
        if self._in_place:
            for column, value in enumerate(row):
                if isinstance(value, (np.ndarray, torch.Tensor)) and value.nbytes >= _LARGE:
                    row[column] = self._put(place, column, value)
        self._rows[place] = row

    def result(self) -> Any:
        return self._source.result(self._epoch, self._numbers, self)

    def single(self) -> list[Any]:
        return self.listed()[0]

    def listed(self) -> list[list[Any]]:
        return [row for row in self._rows if row is not None]

    def stacked(self) -> list[Any]:
        found = []
        for column, values in enumerate(zip(*self.listed(), strict=True)):
            placed = [value is _PLACED for value in values]
            if any(placed) and not all(placed):
                return stacked(self._taken_back())
            found.append(self._batch(column) if placed[0] else _stack(list(values)))
        return found

    def _put(self, place: int, column: int, value: NDArray[Any] | torch.Tensor) -> Any:
        """Copy the value to its place in the batch, if it has the form of the others."""
        try:
            array = value if isinstance(value, np.ndarray) else value.numpy()
        except (RuntimeError, TypeError):  # of a type that NumPy does not know, on a device, with gradients
            return value
        batch = self._large.get(column)
        if batch is None:
            batch = self._begun(column, array)
        if batch.shape[1:] != array.shape or batch.dtype != array.dtype:
            return value
        batch[place] = array
        return _PLACED

    def _begun(self, column: int, array: NDArray[Any]) -> NDArray[Any]:
        with self._lock:
            if column not in self._large:
                if array.dtype.kind not in "biufc" or not array.dtype.isnative:
                    return np.empty(0)  # which no value is like
                kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
                shape = (len(self._numbers), *array.shape)
                self._batches[column] = batch = self._source.recycled.empty(shape, kind)
                self._large[column] = batch.numpy()
            return self._large[column]

    def _batch(self, column: int) -> torch.Tensor:
        batch, kept = self._batches[column], self.kept
        return batch if len(kept) == len(batch) else batch[kept]

    def _taken_back(self) -> list[list[Any]]:
        """Rows that do not fit together, as they were."""
        return [
            [self._batches[column][place] if value is _PLACED else as_tensor(value) for column, value in enumerate(row)]
            for place, row in enumerate(self._rows)
            if row is not None
        ]


def _none_skipped(samples: Generator[Any, None, None], name: str) -> Iterator[Any]:
    with contextlib.closing(samples):  # the error's traceback must not keep the readers
        for sample in samples:
            if sample is SKIPPED:
                raise DataError(f"{name}: a sample had to be left out, which only batches can: give a batch_size")
            yield sample


def stacked(samples: list[list[Any]]) -> list[Any]:
    """Columns of stacked values; what is neither number nor tensor stays a list."""
    return [_stack(list(values)) for values in zip(*samples, strict=True)]


def _stack(values: list[Any]) -> Any:
    if isinstance(values[0], (str, bytes, bytearray, memoryview, list)):
        return values
    try:
        if isinstance(values[0], (np.ndarray, np.generic)) and values[0].dtype.kind in "biufc":
            return as_tensor(np.stack(values) if isinstance(values[0], np.ndarray) else np.array(values))
        values = [as_tensor(value) for value in values]
        return torch.stack(values) if isinstance(values[0], torch.Tensor) else default_collate(values)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        shapes = {str(list(value.shape)) for value in values if isinstance(value, (np.ndarray, torch.Tensor))}
        if len(shapes) > 1:
            raise DataError(
                f"samples of the shapes {', '.join(sorted(shapes)[:4])} do not make a batch: give image_size=, or an"
                " augmentation function with output_height= and output_width="
            ) from error
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise DataError(f"values of the type {kinds} do not make a batch: map them to tensors or numbers") from error


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
