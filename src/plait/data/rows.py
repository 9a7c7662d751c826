"""Rows on their way into a batch: worked out by threads, or by forked processes that share the batch's memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from plait.data.columns import SkippedSample
from plait.data.forking import Forked
from plait.data.recycling import SharedBlocks
from plait.data.sources import as_tensor
from plait.errors import DataError

if TYPE_CHECKING:
    from plait.data.datasets import ColumnSource

__all__ = ["ForkedRows", "Form", "Request", "Rows", "SharedBatches", "forms_of", "stacked", "worked"]

_LARGE = 16 << 10
"""Bytes from which on a value is put into the batch at once."""
_PLACED: Any = ...
"""In the place of a value that is in the batch already; processes hand it to each other."""


class Form(NamedTuple):
    """What the values of a column are like, all of them."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: torch.dtype

    @classmethod
    def of(cls, array: NDArray[Any]) -> Form | None:
        """None: torch knows no tensors of it."""
        if array.dtype.kind not in "biufc" or not array.dtype.isnative:
            return None
        return cls(array.shape, array.dtype, torch.from_numpy(np.empty(0, array.dtype)).dtype)

    def bytes_of(self, rows: int) -> int:
        return rows * math.prod(self.shape) * self.dtype.itemsize


class Request(NamedTuple):
    """What a process is asked for: a part of a batch."""

    epoch: int
    numbers: Sequence[int]
    """Of the part's samples."""
    start: int
    """The place of the first of them in the batch."""
    rows: int
    """Of the whole batch."""
    blocks: Mapping[int, int]
    """Where the batch is, for each large column."""


class SharedBatches:
    """Memory for batches that processes forked later share: of all large columns, whose values are all alike."""

    def __init__(self, forms: Mapping[int, Form], rows: int, count: int) -> None:
        self._forms = dict(forms)
        self._blocks = {column: SharedBlocks(count, form.bytes_of(rows)) for column, form in forms.items()}

    def take(self, rows: int) -> dict[int, tuple[int, torch.Tensor]]:
        """For each of the columns that has one left, a block's number and the batch's tensor in it."""
        found = {}
        for column, form in self._forms.items():
            block = self._blocks[column].take((rows, *form.shape), form.kind)
            if block is not None:
                found[column] = block
        return found

    def arrays(self, numbers: Mapping[int, int], rows: int) -> dict[int, NDArray[Any]]:
        """In a process: the same memory."""
        found = {}
        for column, number in numbers.items():
            form = self._forms[column]
            found[column] = self._blocks[column].array(number, (rows, *form.shape), form.dtype)
        return found


class Rows:
    """The rows of a group on their way: large values are put into the batch at once, the rest is kept until the end."""

    def __init__(self, source: ColumnSource, epoch: int, numbers: Sequence[int]) -> None:
        self._source, self._epoch, self._numbers = source, epoch, numbers
        self._rows: list[list[Any] | None] = [None] * len(numbers)
        self._batches: dict[int, torch.Tensor] = {}
        self._large: dict[int, NDArray[Any]] = {}
        """The same memory as arrays: torch's ways are long for so small a thing as a copy."""
        self._lock = threading.Lock()

    @property
    def kept(self) -> list[int]:
        """The places of those that were not left out."""
        return [place for place, row in enumerate(self._rows) if row is not None]

    def work(self, places: range) -> None:
        for place in places:
            self._work(place)

    def _work(self, place: int) -> None:
        try:
            row = self._source.row(self._epoch, self._numbers[place])
        except SkippedSample as skipped:
            self._source.dataset.left_out(str(skipped))
            return
        if self._source.in_place:
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
        batch = self._large.get(column)
        if batch is None:
            array = _array(value)
            if array is None:
                return value
            batch = self._begun(column, array)
        return _put(batch, place, value)

    def _begun(self, column: int, array: NDArray[Any]) -> NDArray[Any]:
        with self._lock:
            if column not in self._large:
                form = Form.of(array)
                if form is None:
                    return np.empty(0)  # which no value is like
                shape = (len(self._numbers), *form.shape)
                self._batches[column] = batch = self._source.recycled.empty(shape, form.kind)
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


class ForkedRows(Rows):
    """The same, worked out by processes. Where all shared memory is held, they send what they have made."""

    def __init__(
        self, source: ColumnSource, epoch: int, processes: Forked, shared: SharedBatches, numbers: Sequence[int]
    ) -> None:
        super().__init__(source, epoch, numbers)
        self._processes = processes
        self._blocks: dict[int, int] = {}
        for column, (number, batch) in shared.take(len(numbers)).items():
            self._blocks[column], self._batches[column], self._large[column] = number, batch, batch.numpy()

    def work(self, places: range) -> None:
        numbers = [self._numbers[place] for place in places]
        request = Request(self._epoch, numbers, places.start, len(self._numbers), self._blocks)
        for place, row in zip(places, self._processes.ask(tuple(request)), strict=True):
            if isinstance(row, str):
                self._source.dataset.left_out(row)
            else:
                self._rows[place] = row


def worked(source: ColumnSource, shared: SharedBatches, given: tuple[Any, ...]) -> list[list[Any] | str]:
    """In a process: the rows of a part of a batch, or why one is left out; what is large is put into the batch."""
    request = Request(*given)
    batches = shared.arrays(request.blocks, request.rows)
    return [_row(source, request, place, batches) for place in range(len(request.numbers))]


def _row(source: ColumnSource, request: Request, place: int, batches: Mapping[int, NDArray[Any]]) -> list[Any] | str:
    try:
        row = source.row(request.epoch, request.numbers[place])
    except SkippedSample as skipped:
        return str(skipped)
    for column, value in enumerate(row):
        batch = batches.get(column)
        row[column] = value if batch is None else _put(batch, request.start + place, value)
    return row


def forms_of(row: Sequence[Any]) -> dict[int, Form]:
    """Of a row's large values: what those of other rows are expected to be like."""
    found = {}
    for column, value in enumerate(row):
        array = _array(value) if isinstance(value, (np.ndarray, torch.Tensor)) else None
        form = None if array is None or array.nbytes < _LARGE else Form.of(array)
        if form is not None:
            found[column] = form
    return found


def _array(value: NDArray[Any] | torch.Tensor) -> NDArray[Any] | None:
    try:
        return value if isinstance(value, np.ndarray) else value.numpy()
    except (RuntimeError, TypeError):  # of a type that NumPy does not know, on a device, with gradients
        return None


def _put(batch: NDArray[Any], place: int, value: Any) -> Any:
    """Copy the value to its place in the batch, if it has the form of the others."""
    array = _array(value) if isinstance(value, (np.ndarray, torch.Tensor)) else None
    if array is None or batch.shape[1:] != array.shape or batch.dtype != array.dtype:
        return value
    batch[place] = array
    return _PLACED


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
