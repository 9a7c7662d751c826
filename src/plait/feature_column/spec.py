"""What a column wants of a record: `FixedLenFeature`, `VarLenFeature`; a batch of records read by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from plait.data.example import parse_example as _parse_one
from plait.errors import ConfigError, DataError
from plait.feature_column.inputs import Ragged
from plait.feature_column.strings import Strings

__all__ = ["STRING", "FixedLenFeature", "Spec", "VarLenFeature", "as_dtype", "make_parse_example_spec", "parse_example"]

STRING = "string"
"""The dtype of strings, as TensorFlow calls it; `str` and `bytes` stand for it, too."""


class FixedLenFeature(NamedTuple):
    """As many values in every record as `shape` says; one that lacks them has `default_value`, or is refused."""

    shape: Sequence[int]
    dtype: Any
    default_value: Any = None


class VarLenFeature(NamedTuple):
    """Any number of values in each record."""

    dtype: Any


Spec: TypeAlias = "dict[str, FixedLenFeature | VarLenFeature]"


def as_dtype(dtype: Any) -> Any:
    """STRING or a dtype of torch, from what people write for them."""
    if dtype in (str, bytes) or dtype == STRING:
        return STRING
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch.from_numpy(np.empty(0, np.dtype(getattr(dtype, "as_numpy_dtype", dtype)))).dtype
    except TypeError:
        raise ConfigError(f"dtype is {dtype!r}; write 'string', or one of numbers, such as torch.int64") from None


def make_parse_example_spec(feature_columns: Iterable[Any]) -> Spec:
    """What all columns want of a record, by name: for `parse_example`, and for TensorFlow's."""
    spec: Spec = {}
    for column in feature_columns:
        if not hasattr(column, "parse_example_spec"):
            raise ConfigError(f"make_parse_example_spec got {column!r:.80}; give a list of columns")
        for key, feature in column.parse_example_spec.items():
            if spec.setdefault(key, feature) != feature:
                raise ConfigError(
                    f"two columns want {key!r}, one as {spec[key]}, another as {feature}: make them agree"
                )
    return spec


def parse_example(
    serialized: Iterable[bytes | memoryview], features: Mapping[str, FixedLenFeature | VarLenFeature]
) -> dict[str, Any]:
    """The features of a batch of tf.train.Example records, in the forms that columns take.

    Those of fixed length become tensors [batch, *shape], or strings; others (values, offsets).
    """
    rows = [_parse_one(record, features) for record in serialized]
    return {key: _column(key, [row.get(key, ()) for row in rows], one) for key, one in features.items()}


def _column(key: str, rows: list[Any], feature: FixedLenFeature | VarLenFeature) -> Any:
    dtype = as_dtype(feature.dtype)
    kind = list if dtype == STRING else np.ndarray
    wrong = next((row for row in rows if len(row) and not isinstance(row, kind)), None)
    if wrong is not None:
        found = "strings" if isinstance(wrong, list) else f"{wrong.dtype}"
        raise DataError(f"feature {key!r} is {found} in a record, and {dtype} was asked for")
    if isinstance(feature, VarLenFeature):
        return _ragged(rows, dtype)
    return _fixed(key, rows, feature, dtype)


def _ragged(rows: list[Any], dtype: Any) -> Ragged:
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor([len(row) for row in rows], dtype=torch.int64), 0, out=offsets[1:])
    return Ragged(_joined(rows, dtype), offsets)


def _joined(rows: list[Any], dtype: Any) -> Any:
    if dtype == STRING:
        return Strings.of(np.array([item for row in rows for item in row], dtype=object))
    full = [row for row in rows if len(row)]
    return torch.from_numpy(np.concatenate(full)).to(dtype) if full else torch.empty(0, dtype=dtype)


def _fixed(key: str, rows: list[Any], feature: FixedLenFeature, dtype: Any) -> Any:
    size = math.prod(feature.shape)
    default = feature.default_value
    if default is not None:
        filled = np.broadcast_to(np.array(default, object if dtype == STRING else None).ravel(), (size,))
        rows = [row if len(row) else (filled.tolist() if dtype == STRING else filled) for row in rows]
    short = next((number for number, row in enumerate(rows) if len(row) != size), None)
    if short is not None:
        hint = "" if default is not None else "; give its column a default_value, if records may lack it"
        raise DataError(f"record {short} of the batch has {len(rows[short])} values of {key!r}, not {size}{hint}")
    values = _joined(rows, dtype)
    shape = (len(rows), *feature.shape)
    return Strings(values.data, values.offsets, shape) if dtype == STRING else values.view(shape)
