"""What a batch gives to columns: dense or ragged values, and the ids that columns make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from plait.data.sources import as_tensor, on_one_device
from plait.errors import DataError
from plait.feature_column.rows import alike
from plait.feature_column.strings import Strings

__all__ = ["MISSING", "Categorical", "Ids", "Inputs", "Ragged", "Raw", "as_raw", "dense_values", "dropped"]

MISSING = -(2**63)
"""Stands in dense ids for a value that is not there, where -1 may be the id of one that is."""


class Ragged(NamedTuple):
    """Rows of different lengths: row `i` is `values[offsets[i]:offsets[i + 1]]`."""

    values: Tensor | Strings
    offsets: Tensor


Raw: TypeAlias = "Tensor | Strings | Ragged"


class Ids(NamedTuple):
    """Ids of a column: dense ([batch, k]) without offsets, else in one row. Negative ones belong to no bucket."""

    values: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    missing: int = -1
    """What stands in dense ids where there was no value."""


class Categorical(Protocol):
    """What makes ids of a batch."""

    @property
    def name(self) -> str: ...

    @property
    def num_buckets(self) -> int: ...

    @property
    def plain_key(self) -> str | None: ...

    def ids(self, inputs: Inputs) -> Ids: ...


class Inputs:
    """The features of one call; each is made ready once, whoever asks for it."""

    __slots__ = ("_features", "_made")

    def __init__(self, features: Any) -> None:
        self._features = features
        self._made: dict[Any, Any] = {}

    @classmethod
    def of(cls, features: Any) -> Inputs:
        return features if isinstance(features, Inputs) else cls(features)

    def raw(self, key: str) -> Raw:
        made = self._made
        if key not in made:
            try:
                value = self._features[key]
            except (LookupError, TypeError):
                raise DataError(f"there is no feature {key!r}; {self._listed()}") from None
            made[key] = as_raw(key, value)
        found: Raw = made[key]
        return found

    def ids(self, column: Categorical) -> Ids:
        found: Ids = self.once(column, lambda inputs: _together(column.ids(inputs)))
        return found

    def plain(self, keys: Sequence[str | None]) -> list[Tensor] | None:
        """These features as they are, if each is one int64 number an example."""
        features: Any = self._features
        try:
            values = [features[key] for key in keys]
        except (LookupError, TypeError):
            return None
        return values if alike(values) and values[0].ndim == 1 else None

    def once(self, column: Any, make: Callable[[Inputs], Any]) -> Any:
        """What `make` gives, kept for the next who asks for it of this column."""
        key = id(column)
        if key not in self._made:
            self._made[key] = (make(self), column)  # as long as it is kept, no other column has its id
        return self._made[key][0]

    def _listed(self) -> str:
        try:
            return f"the batch has {', '.join(repr(name) for name in self._features)}"
        except TypeError:
            return f"the batch is a {type(self._features).__name__}: give a dict of features"


def as_raw(key: str, value: Any) -> Raw:
    """A feature's value in one of three forms; a plain number in each row becomes [batch, 1]."""
    kind = type(value)
    if kind is Tensor or isinstance(value, Tensor):
        return _with_columns(key, value)
    if kind is tuple and len(value) == 2 and isinstance(value[1], (Tensor, np.ndarray)):
        return _ragged(key, *value)
    if isinstance(value, Ragged):
        return _ragged(key, *value)
    if isinstance(value, Strings):
        return value
    if isinstance(value, (list, tuple)):
        value = _array(key, value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU" and value.ndim:
        return Strings.of(value)
    tensor = as_tensor(value)
    if isinstance(tensor, Tensor):
        return _with_columns(key, tensor)
    raise DataError(
        f"feature {key!r} is a {kind.__name__}; give a tensor, an array or list of numbers or strings with a row for "
        "each example, or (values, offsets) for rows of different lengths"
    )


def _array(key: str, value: Any) -> np.ndarray[Any, Any]:
    first = value
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    try:
        if isinstance(first, Tensor):
            return torch.stack(list(value)).cpu().numpy()
        made = np.array(value, dtype=object if isinstance(first, (str, bytes)) else None)
        # NumPy would write numbers as text where text stands beside them
        return np.array(value, dtype=object) if made.dtype.kind in "SU" else made
    except (ValueError, TypeError, RuntimeError):
        raise DataError(
            f"feature {key!r} is a list with rows of different lengths; give (values, offsets), with all values in one "
            "row and the places where each example's begin"
        ) from None


def _with_columns(key: str, value: Tensor) -> Tensor:
    if value.layout is not torch.strided or value.is_nested:
        raise DataError(f"feature {key!r} is a tensor of layout {value.layout}; give (values, offsets) instead")
    if value.ndim == 1:
        return value.unsqueeze(1)
    if value.ndim == 0:
        raise DataError(f"feature {key!r} is a single number, {value.item()}; give one for each example")
    return value


def _ragged(key: str, values: Any, offsets: Any) -> Ragged:
    if not isinstance(values, (Tensor, Strings)):
        values = as_tensor(np.asarray(values)) if _numbers(values) else Strings.of(values)
    flat = values
    places = as_tensor(offsets)
    if (
        (isinstance(flat, Tensor) and flat.ndim != 1)
        or places.ndim != 1
        or places.is_floating_point()
        or not len(places)
    ):
        raise DataError(f"feature {key!r}: of (values, offsets) both have one dimension, and offsets are whole numbers")
    places = places.long()
    count, steps = len(flat), places.diff()
    if int(places[0]) != 0 or int(places[-1]) != count or (len(steps) and int(steps.min()) < 0):
        raise DataError(
            f"feature {key!r}: offsets go from {int(places[0])} to {int(places[-1])} over {count} values; they begin "
            "with 0, never fall, and end with the number of values: one more than there are examples"
        )
    return Ragged(flat, places.to(flat.device) if isinstance(flat, Tensor) else places)


def _numbers(values: Any) -> bool:
    return np.asarray(values).dtype.kind in "biuf"


def dense_values(key: str, raw: Raw, what: str) -> Tensor:
    """The numbers of a dense feature."""
    if not isinstance(raw, Tensor):
        kind = "strings" if isinstance(raw, Strings) else "(values, offsets)"
        raise DataError(f"{what} of feature {key!r} takes numbers in rows of one length, got {kind}")
    return raw


def _together(ids: Ids) -> Ids:
    """On one device: ids of strings are made in the host's memory, whose offsets or weights may be on a GPU."""
    given = {name: value for name, value in ids._asdict().items() if isinstance(value, Tensor)}
    together: dict[str, Any] = dict(zip(given, on_one_device(list(given.values())), strict=True))
    return ids._replace(**together)


def dropped(ids: Ids) -> Ids:
    """Ids in one row, without the places of dense ones where there was no value."""
    if ids.offsets is not None:
        return ids
    rows, columns = ids.values.shape
    keep = ids.values != ids.missing
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=keep.device)
    if bool(keep.all()):
        torch.mul(torch.arange(rows + 1, device=keep.device), columns, out=offsets)
        return Ids(ids.values.reshape(-1), offsets, None if ids.weights is None else ids.weights.reshape(-1))
    torch.cumsum(keep.sum(1), 0, out=offsets[1:])
    return Ids(ids.values[keep], offsets, None if ids.weights is None else ids.weights[keep])
