"""Columns of numbers: `numeric_column`, `bucketized_column`; and what all columns have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import ConfigError, DataError
from plait.feature_column.inputs import Ids, Inputs, dense_values
from plait.feature_column.spec import STRING, FixedLenFeature, Spec, as_dtype

__all__ = [
    "BucketizedColumn",
    "CategoricalColumn",
    "DenseColumn",
    "FeatureColumn",
    "NumericColumn",
    "bucketized_column",
    "check_count",
    "check_key",
    "numeric_column",
]


def check_key(key: Any) -> None:
    """Refuse what is no feature's name."""
    if not isinstance(key, str):
        raise ConfigError(f"the key of a column is {key!r}; write the feature's name, a string")


def check_count(what: str, value: Any) -> int:
    """A whole number from 1 up, NumPy's too."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(f"{what} is {value!r}; write a whole number from 1 up")
    return int(value)


class FeatureColumn:
    """A recipe: what is made of a batch's features. It has no variables, and compares by what it was made of."""

    has_variables = False
    """Whether its values depend on variables, so that they can be had only inside a model."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def parse_example_spec(self) -> Spec:
        raise NotImplementedError


class DenseColumn(FeatureColumn):
    """A column of `width` numbers for each example; called with a batch's features, it gives them: [batch, width]."""

    @property
    def width(self) -> int:
        raise NotImplementedError

    def dense(self, inputs: Inputs) -> Tensor:
        raise NotImplementedError

    def __call__(self, features: Mapping[str, Any]) -> Tensor:
        return self.dense(Inputs.of(features))


class CategoricalColumn(FeatureColumn):
    """A column of ids: any number of them for each example."""

    @property
    def num_buckets(self) -> int:
        raise NotImplementedError

    @property
    def plain_key(self) -> str | None:
        """The feature whose values are the ids as they are, where they are from 0 to `num_buckets` - 1."""
        return None

    def ids(self, inputs: Inputs) -> Ids:
        raise NotImplementedError


@dataclass(frozen=True)
class NumericColumn(DenseColumn):
    key: str
    shape: tuple[int, ...] = (1,)
    default_value: tuple[float, ...] | None = None
    dtype: torch.dtype = torch.float32
    normalizer_fn: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check_key(self.key)

    @property
    def name(self) -> str:
        return self.key

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    @property
    def parse_example_spec(self) -> Spec:
        return {self.key: FixedLenFeature(self.shape, self.dtype, self.default_value)}

    def dense(self, inputs: Inputs) -> Tensor:
        found: Tensor = inputs.once(self, self._values)
        return found

    def _values(self, inputs: Inputs) -> Tensor:
        value = dense_values(self.key, inputs.raw(self.key), "numeric_column")
        if self.normalizer_fn is not None:
            value = self._normalized(self.normalizer_fn, value)
        value = value.to(torch.float32)
        if value.ndim == 2 and value.shape[1] == self.width:
            return value
        if math.prod(value.shape[1:]) != self.width:
            raise DataError(
                f"feature {self.key!r} has shape {list(value.shape)}, and its numeric_column takes {list(self.shape)} "
                f"an example; write numeric_column({self.key!r}, shape={tuple(value.shape[1:])})"
            )
        return value.reshape(len(value), self.width)

    def _normalized(self, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        found = function(value)
        if not isinstance(found, Tensor) or found.shape[:1] != value.shape[:1]:
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise DataError(
                f"the normalizer_fn of {self.key!r} made {got} of {list(value.shape)}; let it return a tensor with the "
                "same rows"
            )
        return found


def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: Any = None,
    dtype: Any = torch.float32,
    normalizer_fn: Callable[[Tensor], Tensor] | None = None,
) -> NumericColumn:
    """Numbers as they are, or as `normalizer_fn` makes them. `default_value` is for records that lack them."""
    sides = (shape,) if isinstance(shape, int) else tuple(int(side) for side in shape)
    if not sides or min(sides) < 1:
        raise ConfigError(f"numeric_column({key!r}): shape is {shape!r}; write whole numbers from 1 up")
    kind = as_dtype(dtype)
    if kind == STRING or kind is torch.bool:
        raise ConfigError(f"numeric_column({key!r}): dtype is {dtype!r}; write one of numbers, such as torch.float32")
    if normalizer_fn is not None and not callable(normalizer_fn):
        raise ConfigError(f"numeric_column({key!r}): normalizer_fn is {normalizer_fn!r}; give a function of a tensor")
    return NumericColumn(key, sides, _defaults(key, sides, default_value), kind, normalizer_fn)


def _defaults(key: str, shape: tuple[int, ...], value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    numbers = np.asarray(value)
    if numbers.dtype.kind not in "biuf" or numbers.shape not in ((), shape):
        raise ConfigError(
            f"numeric_column({key!r}): default_value is {value!r}; write a number, or {list(shape)} of them"
        )
    return tuple(np.broadcast_to(numbers, shape).ravel().tolist())


@dataclass(frozen=True)
class BucketizedColumn(DenseColumn, CategoricalColumn):
    source_column: NumericColumn
    boundaries: tuple[float, ...]
    _limits: Tensor = field(repr=False, compare=False, hash=False)

    @property
    def name(self) -> str:
        return f"{self.source_column.name}_bucketized"

    @property
    def width(self) -> int:
        return self.num_buckets

    @property
    def num_buckets(self) -> int:
        return (len(self.boundaries) + 1) * self.source_column.width

    @property
    def parse_example_spec(self) -> Spec:
        return self.source_column.parse_example_spec

    def _buckets(self, inputs: Inputs) -> Tensor:
        """Which bucket each number is in: as many as there are boundaries that are not above it."""
        values = self.source_column.dense(inputs).contiguous()  # torch warns of a table's column that is not
        found = torch.bucketize(values, self._limits.to(values.device), right=True)
        return found.masked_fill_(values.isnan(), len(self.boundaries))  # as TensorFlow has it

    def dense(self, inputs: Inputs) -> Tensor:
        hot = torch.nn.functional.one_hot(self._buckets(inputs), len(self.boundaries) + 1)
        return hot.to(torch.float32).flatten(1)

    def ids(self, inputs: Inputs) -> Ids:
        buckets = self._buckets(inputs)
        if self.source_column.width > 1:
            count = len(self.boundaries) + 1
            buckets = buckets + torch.arange(0, self.num_buckets, count, device=buckets.device)
        return Ids(buckets)


def bucketized_column(source_column: NumericColumn, boundaries: Sequence[float]) -> BucketizedColumn:
    """Which of the ranges that `boundaries` part a number is in; a boundary belongs to the range above it."""
    if not isinstance(source_column, NumericColumn) or len(source_column.shape) > 1:
        raise ConfigError(f"bucketized_column takes a numeric_column of one dimension, got {source_column!r}")
    numbers = np.asarray(boundaries)
    limits = tuple(numbers.tolist()) if numbers.ndim == 1 and numbers.dtype.kind in "iuf" else ()
    if not limits or any(not low < high for low, high in pairwise(limits)):
        raise ConfigError(f"bucketized_column: boundaries are {boundaries!r}; write numbers that rise, at least one")
    return BucketizedColumn(source_column, limits, torch.tensor(limits, dtype=torch.float32))
