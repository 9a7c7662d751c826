"""What an Estimator's `input_fn` may return, as a source of batches; and batches as (features, labels)."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from plait.data import Sample
from plait.data.sources import as_tensor
from plait.engine.settings import check_count
from plait.errors import ConfigError, DataError, FunctionError
from plait.rng import derive_seed

__all__ = ["ArraySource", "FixedSource", "call_named", "features_and_labels", "numpy_input_fn", "sample_of"]

_ARRAYS = (torch.Tensor, np.ndarray)


class FixedSource:
    """The same (features, labels) at every step, for ever: what tensors mean that an `input_fn` returns."""

    seekable = True
    is_part = True
    num_epochs: int | None = None
    batch_size: int | None = None

    def __init__(self, batch: tuple[Any, Any]) -> None:
        self.batch = batch

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        del epoch, start
        return itertools.repeat(self.batch)

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "fixed batch"}


class ArraySource:
    """Rows of arrays in memory, of numbers or text, as batches of (features, labels)."""

    seekable = True

    def __init__(
        self,
        features: Any,
        labels: Any,
        *,
        batch_size: int,
        num_epochs: int | None,
        shuffle: bool,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        self.features = {key: _rows(key, x) for key, x in features.items()} if isinstance(features, Mapping) else None
        self._whole: Any = None if self.features is not None else _rows("x", features)
        self.labels = labels if isinstance(labels, Mapping) or labels is None else _rows("y", labels)
        every = [*(self.features or {"x": self._whole}).values(), *self._label_arrays().values()]
        counts = {0 if one is None else len(one) for one in every}
        if len(counts) != 1 or self.features == {}:
            raise DataError(f"x and y have {sorted(counts)} rows: give arrays with the same number of rows")
        self.rows = counts.pop()
        self.batch_size: int | None = batch_size
        self.num_epochs = num_epochs
        self.shuffle = shuffle
        self.seed = seed
        self.drop_remainder = drop_remainder

    def _label_arrays(self) -> dict[str, Any]:
        if self.labels is None:
            return {}
        return dict(self.labels) if isinstance(self.labels, Mapping) else {"y": self.labels}

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        return self.every(epoch, start, 1)

    def count(self, epoch: int) -> int:
        del epoch
        size = self.batch_size or 1
        return self.rows // size if self.drop_remainder else -(-self.rows // size)

    def every(self, epoch: int, start: int, step: int) -> Iterator[Any]:
        """The batches start, start + step, ..."""
        size = self.batch_size or 1
        order = None
        if self.shuffle:  # the order of a TensorSource with this seed
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
            order = torch.randperm(self.rows, generator=generator).numpy()
        for number in range(start, self.count(epoch), step):
            rows: Any = slice(number * size, (number + 1) * size)
            yield self._batch(rows if order is None else order[rows])

    def _batch(self, rows: Any) -> tuple[Any, Any]:
        features = {k: v[rows] for k, v in self.features.items()} if self.features is not None else self._whole[rows]
        if isinstance(self.labels, Mapping):
            return features, {key: value[rows] for key, value in self.labels.items()}
        return features, None if self.labels is None else self.labels[rows]

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "arrays",
            "fields": sorted(map(str, self.features)) if self.features is not None else None,
            "rows": self.rows,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_remainder": self.drop_remainder,
        }


def _rows(name: str, value: Any) -> Any:
    found = value if isinstance(value, _ARRAYS) else np.asarray(value)
    if found.ndim == 0:
        raise DataError(f"{name!r} is one value: give an array with a row for each example")
    return found


def numpy_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int = 1000,
    num_threads: int = 1,
    *,
    seed: int = 0,
    drop_remainder: bool = False,
) -> Callable[[], ArraySource]:
    """An `input_fn` over arrays: numbers and text, one or several by name.

    Args:
        x: an array, or arrays by name.
        y: labels, likewise, or None.
        batch_size: rows in a batch.
        num_epochs: passes over the rows; None: for ever.
        shuffle: whether each pass has an order of its own; has to be said.
        queue_capacity: has no meaning here.
        num_threads: has no meaning here.
        seed: of the orders, which are those of a `TensorSource`.
        drop_remainder: whether rows that are too few for a batch are left out of a pass.

    """
    del queue_capacity, num_threads
    if not isinstance(shuffle, bool):
        raise ConfigError(f"shuffle={shuffle!r}: write True for training, False for evaluation and prediction")
    check_count("batch_size", batch_size)
    if num_epochs is not None:
        check_count("num_epochs", num_epochs)
    source = ArraySource(
        x,
        y,
        batch_size=batch_size,
        num_epochs=_FOR_EVER if num_epochs is None else num_epochs,
        shuffle=shuffle,
        seed=seed,
        drop_remainder=drop_remainder,
    )
    return lambda: source


_FOR_EVER = 2**31
"""Passes enough: a source that names none is read once."""


def call_named(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Call a function with those of the named arguments that it has, as TensorFlow calls its users' functions."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C do not say
        return function(*args)
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return function(*args, **named)
    return function(*args, **{one.name: named[one.name] for one in parameters if one.name in named})


def sample_of(data: Any) -> Sample:
    """What an `input_fn` returned, as something to read from."""
    if data is None:
        raise FunctionError(
            "the input_fn returned None: return (features, labels), a Sample, a DataLoader, or an iterable of batches"
        )
    if isinstance(data, Sample):
        return data
    if isinstance(data, tuple) and len(data) == 2 and _is_batch(data[0]):
        return Sample(FixedSource(data))
    if _is_batch(data):
        return Sample(FixedSource((data, None)))
    return Sample(data)


def _is_batch(value: Any) -> bool:
    return isinstance(value, _ARRAYS) or (
        isinstance(value, Mapping) and bool(value) and all(isinstance(one, _ARRAYS) for one in value.values())
    )


def features_and_labels(sample: Sample, device: torch.device) -> tuple[Any, Any]:
    """A step's batch: a pair is (features, labels), anything else is features."""
    fields = sample.unnamed()
    if fields is None:
        return {name: sample[name] for name in sample.keys()}, None  # noqa: SIM118 - groups are computed by sample[...]
    if len(fields) < len(sample):
        raise DataError(
            "a Sample's groups of columns are made of named fields: let its batches be dicts, with the labels"
        )
    if len(fields) > 2:
        raise DataError(f"a batch has {len(fields)} parts: an Estimator's are (features, labels), or features alone")
    features = _tensors(fields[0], device)
    return features, _tensors(fields[1], device) if len(fields) == 2 else None


def _tensors(value: Any, device: torch.device) -> Any:
    """Arrays of numbers as tensors where the model is; text stays text."""
    if isinstance(value, Mapping):
        return {key: _tensors(one, device) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_tensors(one, device) for one in value) if _plain(value) else value
    found = as_tensor(value)
    return found.to(device) if isinstance(found, torch.Tensor) and found.device != device else found


def _plain(value: Sequence[Any]) -> bool:
    return type(value) in (list, tuple)
