"""Columns of sequences: one value, or row, for each place of an example's list; `SequenceFeatures` joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.errors import ConfigError, DataError
from plait.feature_column.categorical import (
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
)
from plait.feature_column.columns import CategoricalColumn, FeatureColumn, check_key
from plait.feature_column.embedding import EmbeddingColumn, IndicatorColumn
from plait.feature_column.inputs import Ids, Inputs, Ragged, dropped
from plait.feature_column.layers import Embedding, sorted_columns
from plait.feature_column.spec import STRING, Spec, VarLenFeature, as_dtype
from plait.feature_column.strings import Strings

__all__ = [
    "SequenceCategoricalColumn",
    "SequenceFeatures",
    "SequenceNumericColumn",
    "sequence_categorical_column_with_hash_bucket",
    "sequence_categorical_column_with_identity",
    "sequence_categorical_column_with_vocabulary_file",
    "sequence_categorical_column_with_vocabulary_list",
    "sequence_numeric_column",
]


@dataclass(frozen=True)
class SequenceCategoricalColumn(CategoricalColumn):
    """Ids that are not combined: each has its own place."""

    categorical_column: CategoricalColumn

    @property
    def name(self) -> str:
        return self.categorical_column.name

    @property
    def num_buckets(self) -> int:
        return self.categorical_column.num_buckets

    @property
    def parse_example_spec(self) -> Spec:
        return self.categorical_column.parse_example_spec

    def ids(self, inputs: Inputs) -> Ids:
        del inputs
        raise DataError(f"{self.name!r} is a column of sequences: give it to SequenceFeatures, not to {_OTHERS}")

    def steps(self, inputs: Inputs) -> Ids:
        """The ids of all examples in one row."""
        return dropped(inputs.ids(self.categorical_column))


_OTHERS = "input_layer, DenseFeatures or linear_model"


def sequence_categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> SequenceCategoricalColumn:
    """As `categorical_column_with_identity`, for each place of a list."""
    return SequenceCategoricalColumn(categorical_column_with_identity(key, num_buckets, default_value))


def sequence_categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: Any = STRING
) -> SequenceCategoricalColumn:
    """As `categorical_column_with_hash_bucket`, for each place of a list."""
    return SequenceCategoricalColumn(categorical_column_with_hash_bucket(key, hash_bucket_size, dtype))


def sequence_categorical_column_with_vocabulary_list(
    key: str, vocabulary_list: Sequence[Any], dtype: Any = None, default_value: int = -1, num_oov_buckets: int = 0
) -> SequenceCategoricalColumn:
    """As `categorical_column_with_vocabulary_list`, for each place of a list."""
    return SequenceCategoricalColumn(
        categorical_column_with_vocabulary_list(key, vocabulary_list, dtype, default_value, num_oov_buckets)
    )


def sequence_categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str,
    vocabulary_size: int | None = None,
    num_oov_buckets: int = 0,
    default_value: int | None = None,
    dtype: Any = STRING,
) -> SequenceCategoricalColumn:
    """As `categorical_column_with_vocabulary_file`, for each place of a list."""
    return SequenceCategoricalColumn(
        categorical_column_with_vocabulary_file(
            key, vocabulary_file, vocabulary_size, num_oov_buckets, default_value, dtype
        )
    )


@dataclass(frozen=True)
class SequenceNumericColumn(FeatureColumn):
    key: str
    shape: tuple[int, ...] = (1,)
    default_value: float = 0.0
    dtype: torch.dtype = torch.float32
    normalizer_fn: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check_key(self.key)

    @property
    def name(self) -> str:
        return self.key

    @property
    def width(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def parse_example_spec(self) -> Spec:
        return {self.key: VarLenFeature(self.dtype)}

    def padded(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        raw = inputs.raw(self.key)
        values, offsets = (raw.values, raw.offsets) if isinstance(raw, Ragged) else (raw, None)
        if isinstance(values, Strings):
            raise DataError(f"sequence_numeric_column of feature {self.key!r} takes numbers, got strings")
        if offsets is None:
            rows, flat = len(values), values.reshape(-1)
            offsets = torch.arange(rows + 1, device=values.device) * (flat.numel() // max(rows, 1))
            values = flat
        lengths = offsets.diff()
        if bool((lengths % self.width).any()):
            raise DataError(f"feature {self.key!r} has lists that do not consist of {list(self.shape)} numbers each")
        values = values if self.normalizer_fn is None else self.normalizer_fn(values)
        rows_of = values.to(torch.float32).view(-1, self.width)
        return _padded(rows_of, lengths // self.width, self.default_value)


def sequence_numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: float = 0.0,
    dtype: Any = torch.float32,
    normalizer_fn: Callable[[Tensor], Tensor] | None = None,
) -> SequenceNumericColumn:
    """Numbers for each place of a list; those behind a list's end are `default_value`."""
    sides = (shape,) if isinstance(shape, int) else tuple(int(side) for side in shape)
    kind = as_dtype(dtype)
    if not sides or min(sides) < 1 or kind == STRING:
        raise ConfigError(
            f"sequence_numeric_column({key!r}, shape={shape!r}, dtype={dtype!r}): write whole numbers from 1 up, and a "
            "dtype of numbers"
        )
    return SequenceNumericColumn(key, sides, float(default_value), kind, normalizer_fn)


class _Sequences(NamedTuple):
    sequence_input: Tensor
    sequence_length: Tensor


class SequenceFeatures(Embedding):
    """Columns of sequences side by side: ([batch, places, widths], [batch] lengths). Short lists are filled up."""

    def __init__(
        self, feature_columns: Iterable[FeatureColumn] | FeatureColumn, trainable: bool = True, name: str | None = None
    ) -> None:
        super().__init__()
        self.name = name or "sequence_features"
        self.columns = sorted_columns(
            feature_columns, (SequenceNumericColumn, EmbeddingColumn, IndicatorColumn), "SequenceFeatures"
        )
        for column in self.columns:
            inner = getattr(column, "categorical_column", None)
            if inner is not None and not isinstance(inner, SequenceCategoricalColumn):
                raise ConfigError(f"SequenceFeatures got {column.name!r} of a column that is no sequence_... one")
        self.add_tables(self.columns, trainable)

    def forward(self, features: Mapping[str, Any]) -> _Sequences:
        inputs = Inputs.of(features)
        self.look_for_servers()
        made = [self._column(column, inputs) for column in self.columns]
        home = self.home() or made[0][0].device
        found = [(part.to(home), lengths.to(home)) for part, lengths in made]
        lengths = found[0][1]
        for column, (_, others) in zip(self.columns, found, strict=True):
            if not torch.equal(lengths, others):
                raise DataError(f"{column.name!r} has lists of other lengths than {self.columns[0].name!r} has")
        return _Sequences(torch.cat([part for part, _ in found], 2), lengths)

    def _column(self, column: FeatureColumn, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if isinstance(column, SequenceNumericColumn):
            return column.padded(inputs)
        assert isinstance(column, (EmbeddingColumn, IndicatorColumn))  # noqa: S101 - the constructor looked
        inner = column.categorical_column
        assert isinstance(inner, SequenceCategoricalColumn)  # noqa: S101 - same
        ids = inner.steps(inputs)
        assert ids.offsets is not None  # noqa: S101 - dropped() gives them
        rows = _Steps(inner, ids)
        alone = (
            self.source_of(column, rows)(inputs)
            if isinstance(column, EmbeddingColumn)
            else IndicatorColumn(rows).dense(inputs)
        )
        return _padded(alone, ids.offsets.diff().to(alone.device), 0.0)


@dataclass(frozen=True, eq=False)
class _Steps(CategoricalColumn):
    """Every place of every list as an example of its own."""

    column: SequenceCategoricalColumn
    found: Ids

    @property
    def name(self) -> str:
        return self.column.name

    @property
    def num_buckets(self) -> int:
        return self.column.num_buckets

    def ids(self, inputs: Inputs) -> Ids:
        del inputs
        weights = self.found.weights
        return Ids(self.found.values[:, None], None, None if weights is None else weights[:, None])


def _padded(rows: Tensor, lengths: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """Rows of all examples behind each other as [batch, places, width]."""
    places = int(lengths.max()) if len(lengths) else 0
    inside = torch.arange(places, device=rows.device)[None] < lengths[:, None]
    whole = rows.new_full((len(lengths), places, rows.shape[1]), fill)
    return whole.masked_scatter(inside[:, :, None], rows), lengths
