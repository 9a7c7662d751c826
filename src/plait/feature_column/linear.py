"""`LinearModel`: a weighted sum of columns, a module; `linear_model`, the same inside a model's functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import ConfigError, DataError
from plait.feature_column.columns import CategoricalColumn, DenseColumn, FeatureColumn
from plait.feature_column.embedding import COMBINERS, EmbeddingColumn
from plait.feature_column.inputs import Inputs
from plait.feature_column.layers import Tabled, collect, scope_of, sorted_columns, unique_layer
from plait.feature_column.pooling import Pool, Separate
from plait.feature_column.tables import Table

__all__ = ["LinearModel", "linear_model"]


class _Weights(nn.Module):
    """The weights of a dense column: [width, units]."""

    def __init__(self, width: int, units: int, trainable: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(width, units), requires_grad=trainable)


class LinearModel(Tabled):
    """A weight for each number of dense columns and for each id of the others: [batch, units], zero at first.

    Variables are `COLUMN/weights`, shaped as TensorFlow shapes them, and `bias_weights`.
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn] | FeatureColumn,
        units: int = 1,
        sparse_combiner: str = "sum",
        trainable: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if sparse_combiner not in COMBINERS or units < 1:
            raise ConfigError(
                f"LinearModel(units={units}, sparse_combiner={sparse_combiner!r}): write 1 unit or more, and one of "
                f"{', '.join(COMBINERS)}"
            )
        self.name = name or "linear_model"
        self.units, self.sparse_combiner = units, sparse_combiner
        self.columns = sorted_columns(feature_columns, (DenseColumn, CategoricalColumn), "linear_model")
        for column in self.columns:
            if isinstance(column, EmbeddingColumn):
                raise ConfigError(f"linear_model got {column.name!r}: its ids are enough, give {_inner(column)!r}")
        self._sparse = [column for column in self.columns if isinstance(column, CategoricalColumn)]
        self._dense = [
            column
            for column in self.columns
            if isinstance(column, DenseColumn) and not isinstance(column, CategoricalColumn)
        ]
        for column in self._sparse:
            self._add(column, trainable)
        for column in self._dense:
            self._modules[scope_of(column.name)] = _Weights(column.width, units, trainable)
        self.bias_weights = nn.Parameter(torch.zeros(units), requires_grad=trainable)
        self._pool = self._pooled()
        self._separate = [Separate(one, self._tables[one.name], sparse_combiner) for one in self._sparse]

    def _add(self, column: CategoricalColumn, trainable: bool) -> None:
        rows = column.num_buckets
        self.add_table(
            column.name,
            lambda: Table(rows, self.units, "weights", lambda _: None, trainable=trainable, sparse=False),
        )

    def _pooled(self) -> Pool | None:
        tables = [self._tables[column.name] for column in self._sparse]
        self._stacks = []
        if not tables or tables[0].sparse:
            return None
        return Pool(self._sparse, tables, self.stacked(tables), self.sparse_combiner)

    def weights_of(self, column: FeatureColumn) -> Tensor:
        if isinstance(column, CategoricalColumn):
            return self._tables[column.name].weight
        found: Tensor = self._modules[scope_of(column.name)].weights  # type: ignore[union-attr,assignment] # _Weights
        return found

    def forward(self, features: Mapping[str, Any]) -> Tensor:
        inputs = Inputs.of(features)
        if self.look_for_servers():
            self._pool = self._pooled()
        total: Tensor = self.bias_weights
        if self._pool is not None:
            total = self._pool.total(inputs) + total
        else:
            for one in self._separate:
                one.ask(inputs)
            for one in self._separate:
                total = total + one(inputs)
        if not self._dense:
            return total
        parts = [column.dense(inputs).to(total.device) for column in self._dense]
        rows = {len(part) for part in parts} | ({len(total)} if self._sparse else set())
        if len(rows) > 1:
            raise DataError(f"the columns of {self.name!r} have batches of {sorted(rows)} rows; give each as many")
        numbers = torch.cat(parts, 1)
        weights = torch.cat([self.weights_of(column) for column in self._dense])
        return torch.addmm(total, numbers, weights)


def _inner(column: EmbeddingColumn) -> str:
    return column.categorical_column.name


def linear_model(
    features: Mapping[str, Any],
    feature_columns: Iterable[FeatureColumn] | FeatureColumn,
    units: int = 1,
    sparse_combiner: str = "sum",
    weight_collections: Sequence[str] | None = None,
    trainable: bool = True,
    cols_to_vars: dict[Any, list[Tensor]] | None = None,
) -> Tensor:
    """A weighted sum of columns, and a bias. Variables are `linear_model/COLUMN/weights`, `linear_model/bias_weights`.

    Called in a loss_fn, eval_fn or model_fn. Other columns in the same scope make a `linear_model_1`, and so on.
    """
    columns = sorted_columns(feature_columns, (DenseColumn, CategoricalColumn), "linear_model")
    made = unique_layer("linear_model", LinearModel, columns, units, sparse_combiner, trainable)
    variables: dict[Any, list[Tensor]] = {column: [made.weights_of(column)] for column in columns}
    variables["bias"] = [made.bias_weights]
    collect(weight_collections, variables)
    if cols_to_vars is not None:
        cols_to_vars.update(variables)
    found: Tensor = made(features)
    return found
