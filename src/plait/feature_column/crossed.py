"""`crossed_column`: one id for each combination of the values of several features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from plait.errors import ConfigError, DataError
from plait.feature_column.categorical import HashedColumn, WeightedColumn, integers
from plait.feature_column.columns import CategoricalColumn, check_count
from plait.feature_column.fingerprint import CROSS_KEY, U64, fingerprint_cat64
from plait.feature_column.inputs import Ids, Inputs, Ragged, dropped
from plait.feature_column.spec import STRING, Spec, VarLenFeature
from plait.feature_column.strings import Strings

__all__ = ["CrossedColumn", "crossed_column"]


class _Codes(NamedTuple):
    """A number for each value of one of the crossed features."""

    codes: U64
    offsets: NDArray[np.int64]
    width: int | None
    """How many each row has, if all have as many because they are dense."""


@dataclass(frozen=True)
class CrossedColumn(CategoricalColumn):
    keys: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int | None = None

    @property
    def leaves(self) -> list[str | CategoricalColumn]:
        """The keys, with those of crosses among them."""
        found: list[str | CategoricalColumn] = []
        for key in self.keys:
            found += key.leaves if isinstance(key, CrossedColumn) else [key]
        return found

    @property
    def name(self) -> str:
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self.leaves))

    @property
    def num_buckets(self) -> int:
        return self.hash_bucket_size

    @property
    def parse_example_spec(self) -> Spec:
        spec: Spec = {}
        for key in self.leaves:
            spec.update({key: VarLenFeature(STRING)} if isinstance(key, str) else key.parse_example_spec)
        return spec

    def ids(self, inputs: Inputs) -> Ids:
        # TensorFlow takes dense features after the others, whatever order they are given in
        crossed = [_codes_of(key, inputs) for key in sorted(self.leaves, key=lambda key: _is_dense(key, inputs))]
        if len({len(one.offsets) for one in crossed}) > 1:
            rows = sorted({len(one.offsets) - 1 for one in crossed})
            raise DataError(f"the features of the cross {self.name!r} have {rows} examples; give each as many")
        start = CROSS_KEY if self.hash_key is None else self.hash_key % 2**64
        places, offsets = _product(crossed)
        total = np.full(len(places[0]), start, np.uint64)
        for one, here in zip(crossed, places, strict=True):
            total = fingerprint_cat64(total, one.codes[here])
        buckets = torch.from_numpy((total % np.uint64(self.hash_bucket_size)).view(np.int64))
        if all(one.width is not None for one in crossed) and len(offsets) > 1:
            return Ids(buckets.view(len(offsets) - 1, -1))
        return Ids(buckets, torch.from_numpy(offsets))


def _is_dense(key: str | CategoricalColumn, inputs: Inputs) -> bool:
    return isinstance(key, str) and not isinstance(inputs.raw(key), Ragged)


def _codes_of(key: str | CategoricalColumn, inputs: Inputs) -> _Codes:
    """Fingerprints of strings; numbers and ids are their own codes."""
    if isinstance(key, str):
        raw = inputs.raw(key)
        value, offsets = (raw.values, raw.offsets.cpu().numpy()) if isinstance(raw, Ragged) else (raw, None)
        if isinstance(value, Strings):
            codes = value.fingerprints()
        else:
            codes = integers(key, value, "crossed_column").reshape(-1).cpu().numpy().view(np.uint64)
        if offsets is None:
            return _dense(codes, value.shape[0])
        return _Codes(codes, offsets, None)
    ids = inputs.ids(key)
    flat = dropped(ids)
    assert flat.offsets is not None  # noqa: S101 - dropped() gives them
    codes = flat.values.cpu().numpy().view(np.uint64)
    if ids.offsets is None and len(codes) == ids.values.numel():
        return _dense(codes, len(ids.values))
    return _Codes(codes, flat.offsets.cpu().numpy(), None)


def _dense(codes: U64, rows: int) -> _Codes:
    width = len(codes) // rows if rows else 1
    return _Codes(codes, np.arange(rows + 1) * width, width)


def _product(crossed: list[_Codes]) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """For each feature, which of its values stand in the combinations of each row; and where rows begin."""
    first = crossed[0].offsets
    if all(one.width == 1 for one in crossed):
        return [np.arange(len(first) - 1)] * len(crossed), first
    counts = [np.diff(one.offsets) for one in crossed]
    totals = np.prod(counts, axis=0, dtype=np.int64)
    offsets = np.zeros(len(first), np.int64)
    np.cumsum(totals, out=offsets[1:])
    rows = np.repeat(np.arange(len(totals)), totals)
    rest = np.arange(len(rows)) - offsets[rows]
    places = []
    for one, count in zip(reversed(crossed), reversed(counts), strict=True):  # the last varies first
        rest, here = np.divmod(rest, count[rows])
        places.append(one.offsets[:-1][rows] + here)
    return places[::-1], offsets


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """Combinations of features (by name: strings or whole numbers) and columns, hashed as TensorFlow hashes them."""
    given: tuple[Any, ...] = (keys,) if isinstance(keys, (str, CategoricalColumn)) else tuple(keys)
    if len(given) < 2:
        raise ConfigError(f"crossed_column got {keys!r:.80}; give a list of two keys or more")
    buckets = check_count("crossed_column: hash_bucket_size", hash_bucket_size)
    for key in given:
        if not isinstance(key, (str, CategoricalColumn)) or isinstance(key, WeightedColumn):
            raise ConfigError(f"crossed_column got {key!r}; give names of features, or columns of ids without weights")
        if isinstance(key, HashedColumn):
            raise ConfigError(
                f"crossed_column got the hashed column {key.name!r}, whose collisions it would hash again; write the "
                f"feature's name, {key.key!r}"
            )
    return CrossedColumn(given, buckets, hash_key)
