"""Dense columns of ids: `indicator_column`, `embedding_column`, `shared_embedding_columns`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from plait.errors import ConfigError, DataError
from plait.feature_column.columns import CategoricalColumn, DenseColumn, check_count
from plait.feature_column.inputs import Inputs, dropped
from plait.feature_column.spec import Spec
from plait.variables.bank import read_variables

__all__ = [
    "COMBINERS",
    "EmbeddingColumn",
    "IndicatorColumn",
    "Initializer",
    "embedding_column",
    "indicator_column",
    "shared_embedding_columns",
]

COMBINERS = ("mean", "sqrtn", "sum")
"""How several rows become one: their sum, divided by that of their weights, by the root of that of squares, or not."""

Initializer: TypeAlias = "Tensor | float | Callable[[Tensor], Any] | None"


@dataclass(frozen=True)
class IndicatorColumn(DenseColumn):
    categorical_column: CategoricalColumn

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_indicator"

    @property
    def width(self) -> int:
        return self.categorical_column.num_buckets

    @property
    def parse_example_spec(self) -> Spec:
        return self.categorical_column.parse_example_spec

    def dense(self, inputs: Inputs) -> Tensor:
        """How often each id is among an example's, or the sum of its weights."""
        ids = dropped(inputs.ids(self.categorical_column))
        assert ids.offsets is not None  # noqa: S101 - dropped() gives them
        values, rows = ids.values, len(ids.offsets) - 1
        if len(values) and int(values.max()) >= self.width:
            raise DataError(
                f"{self.categorical_column.name!r} has the id {int(values.max())}, and {self.width} buckets; "
                "write a larger number, or a default_value"
            )
        owner = torch.repeat_interleave(torch.arange(rows, device=values.device), ids.offsets.diff())
        amounts = torch.ones(len(values), device=values.device) if ids.weights is None else ids.weights
        keep = values >= 0
        places = (owner * self.width + values)[keep]
        flat = torch.zeros(rows * self.width, device=values.device)
        return flat.index_add_(0, places, amounts[keep]).view(rows, self.width)


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """As many numbers as there are buckets, each the count of that id in the example."""
    return IndicatorColumn(_categorical("indicator_column", categorical_column))


@dataclass(frozen=True)
class EmbeddingColumn(DenseColumn):
    """A row of a table for each id, combined. Columns that share a table have the `table` name of it."""

    categorical_column: CategoricalColumn
    dimension: int
    combiner: str = "mean"
    initializer: Initializer = field(default=None, compare=False)
    ckpt_to_load_from: str | None = None
    tensor_name_in_ckpt: str | None = None
    max_norm: float | None = None
    trainable: bool = True
    use_safe_embedding_lookup: bool = True
    shared: str | None = None
    sparse: bool | None = None
    has_variables = True

    @property
    def name(self) -> str:
        return f"{self.categorical_column.name}_{'shared_' if self.shared else ''}embedding"

    @property
    def table(self) -> str:
        return self.shared or self.name

    @property
    def width(self) -> int:
        return self.dimension

    @property
    def parse_example_spec(self) -> Spec:
        return self.categorical_column.parse_example_spec

    def dense(self, inputs: Inputs) -> Tensor:
        del inputs
        raise DataError(
            f"{self.name!r} has variables, which a column alone does not: look it up with input_layer(features, "
            "[column]) inside a model's function, or with DenseFeatures([column])"
        )

    def in_model(self, group: str, columns: Sequence[Any]) -> Callable[[Any], Tensor]:
        """What computes a group of a Sample that this column is in."""
        from plait.feature_column.layers import group_layer  # noqa: PLC0415 - it needs this module

        return group_layer(group, columns)

    def fill(self, value: Tensor) -> None:
        """Give a new table its first values."""
        if self.ckpt_to_load_from is not None and self.tensor_name_in_ckpt is not None:
            value.copy_(self._loaded(value))
        elif isinstance(self.initializer, Tensor):
            if self.initializer.shape != value.shape:
                shapes = f"{list(self.initializer.shape)}, and its table {list(value.shape)}"
                raise ConfigError(f"{self.name!r}: the initializer has the shape {shapes}; give one of that shape")
            value.copy_(self.initializer)
        elif isinstance(self.initializer, (int, float)):
            value.fill_(self.initializer)
        elif self.initializer is not None:
            self.initializer(value)
        else:
            scale = self.dimension**-0.5
            nn.init.trunc_normal_(value, std=scale, a=-2 * scale, b=2 * scale)

    def _loaded(self, value: Tensor) -> Tensor:
        found = read_variables(str(self.ckpt_to_load_from)).get(str(self.tensor_name_in_ckpt))
        if found is None or found.shape != value.shape:
            got = "no variable of that name" if found is None else f"one of shape {list(found.shape)}"
            raise ConfigError(
                f"{self.name!r} wants {self.tensor_name_in_ckpt!r} of {self.ckpt_to_load_from}, as "
                f"{list(value.shape)}: there is {got}"
            )
        return found


def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: Initializer = None,
    ckpt_to_load_from: str | None = None,
    tensor_name_in_ckpt: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
    use_safe_embedding_lookup: bool = True,
    *,
    sparse: bool | None = None,
) -> EmbeddingColumn:
    """A learned row of `dimension` numbers for each id; those of an example are combined.

    Args:
        categorical_column: what gives the ids.
        dimension: how many numbers.
        combiner: "mean", "sqrtn" or "sum".
        initializer: a tensor, a number, or a function that fills a tensor in place; by default a normal distribution
            with the deviation `dimension ** -0.5`, cut off at twice that.
        ckpt_to_load_from: with `tensor_name_in_ckpt`, a checkpoint that has the first values.
        tensor_name_in_ckpt: the variable's name in it.
        max_norm: longer rows are shortened to this as they are looked up.
        trainable: whether the rows are learned.
        use_safe_embedding_lookup: negative ids are always left out; it is there for TensorFlow's scripts.
        sparse: whether gradients are rows of the table, which not all optimizers take. By default they are if the
            rows are on parameter servers.

    """
    return _embedding(
        "embedding_column", categorical_column, dimension, combiner, initializer, ckpt_to_load_from,
        tensor_name_in_ckpt, max_norm, trainable, use_safe_embedding_lookup, None, sparse,
    )  # fmt: skip


def shared_embedding_columns(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: str = "mean",
    initializer: Initializer = None,
    shared_embedding_collection_name: str | None = None,
    ckpt_to_load_from: str | None = None,
    tensor_name_in_ckpt: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
    use_safe_embedding_lookup: bool = True,
    *,
    sparse: bool | None = None,
) -> list[EmbeddingColumn]:
    """Columns of one table: an id has the same row in all of them. They need the same number of buckets."""
    listed = [categorical_columns] if isinstance(categorical_columns, CategoricalColumn) else categorical_columns
    columns = [_categorical("shared_embedding_columns", column) for column in listed]
    sizes = {column.name: column.num_buckets for column in columns}
    if not columns or len(set(sizes.values())) > 1:
        raise ConfigError(
            f"shared_embedding_columns of columns with {sizes} buckets: they have to have the same number"
        )
    shared = shared_embedding_collection_name or "_".join(sorted(sizes)) + "_shared_embedding"
    return [
        _embedding(
            "shared_embedding_columns", column, dimension, combiner, initializer, ckpt_to_load_from,
            tensor_name_in_ckpt, max_norm, trainable, use_safe_embedding_lookup, shared, sparse,
        )
        for column in columns
    ]  # fmt: skip


def _embedding(what: str, column: CategoricalColumn, dimension: int, combiner: str, *rest: Any) -> EmbeddingColumn:
    width = check_count(f"{what} of {_categorical(what, column).name!r}: dimension", dimension)
    made = EmbeddingColumn(column, width, combiner, *rest)
    start = made.initializer
    if start is not None and not isinstance(start, (Tensor, int, float)) and not callable(start):
        raise ConfigError(
            f"{what} of {column.name!r}: initializer is {start!r}; give a tensor, a number, or a function that fills a "
            "tensor in place, such as torch.nn.init.zeros_"
        )
    if combiner not in COMBINERS:
        raise ConfigError(f"{what} of {column.name!r}: combiner is {combiner!r}; write one of {', '.join(COMBINERS)}")
    if (made.ckpt_to_load_from is None) != (made.tensor_name_in_ckpt is None):
        raise ConfigError(
            f"{what} of {column.name!r}: write both of ckpt_to_load_from and tensor_name_in_ckpt, or none"
        )
    if made.max_norm is not None and not made.max_norm > 0:
        raise ConfigError(f"{what} of {column.name!r}: max_norm is {made.max_norm}; write a number above 0")
    return made


def _categorical(what: str, column: Any) -> CategoricalColumn:
    if not isinstance(column, CategoricalColumn):
        raise ConfigError(
            f"{what} got {column!r:.80}; give a column of ids, as categorical_column_with_identity(...) or "
            "bucketized_column(...) make"
        )
    return column
