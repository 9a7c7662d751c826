"""`DenseFeatures`: columns side by side as one tensor, a module; `input_layer`, the same inside a model's functions."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plait.data.sources import on_one_device
from plait.errors import ConfigError, DataError
from plait.feature_column.columns import CategoricalColumn, DenseColumn, FeatureColumn
from plait.feature_column.embedding import EmbeddingColumn
from plait.feature_column.inputs import Inputs
from plait.feature_column.pooling import Pool, Separate
from plait.feature_column.tables import Stack, Table
from plait.rng import derive_seed, isolated_rng
from plait.variables.scope import layer, variable_scope
from plait.variables.store import AUTO_REUSE, VariableStore, current

__all__ = [
    "DenseFeatures",
    "Embedding",
    "Tabled",
    "collect",
    "group_layer",
    "input_layer",
    "scope_of",
    "sorted_columns",
    "unique_layer",
]

C = TypeVar("C", bound=FeatureColumn)
M = TypeVar("M", bound=nn.Module)


def scope_of(name: str) -> str:
    """A column's name as a part of its variables' names."""
    clean = re.sub(r"[^A-Za-z0-9_\-]", "_", name)
    return "training_" if clean == "training" else clean  # a module has that name for itself


def sorted_columns(columns: Iterable[C] | C, kind: type | tuple[type, ...], what: str) -> list[C]:
    """The columns by their names, each of which is there once."""
    listed = [columns] if isinstance(columns, FeatureColumn) else list(columns)
    if not listed:
        raise ConfigError(f"{what} got no columns; give a list of them")
    for column in listed:
        if not isinstance(column, kind):
            hint = "; wrap it in indicator_column or embedding_column" if isinstance(column, CategoricalColumn) else ""
            raise ConfigError(f"{what} got {column!r:.80}, which is no column that it takes{hint}")
    ordered: list[C] = sorted(listed, key=lambda column: column.name)
    names = [column.name for column in ordered]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"{what} got columns of one name: {', '.join(map(repr, twice))}; give each once")
    return ordered


def draw_seed() -> int:
    """One draw, whatever is made of it: so a column's first values do not depend on which others there are."""
    return int(torch.randint(2**62, ()))


class Tabled(nn.Module):
    """A module that has tables: those of one width lie behind each other, and parameter servers may have them."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: dict[str, Table] = {}
        self._stacks: list[Stack] = []
        self._looked = False

    def add_table(self, scope: str, make: Callable[[], Table]) -> Table:
        """The table of this scope, made from (what was drawn, its name) if it is new."""
        if scope not in self._tables:
            with isolated_rng(derive_seed(self._seed, scope)):
                self._tables[scope] = make()
            self._modules[scope_of(scope)] = self._tables[scope]  # not add_module(): it refuses some names
        return self._tables[scope]

    @property
    def _seed(self) -> int:
        if not hasattr(self, "_drawn"):
            self._drawn = draw_seed()
        return self._drawn

    def stacked(self, tables: Sequence[Table]) -> Stack:
        """The tables, once each, as one stack."""
        self._stacks.append(Stack(list(dict.fromkeys(tables))))
        return self._stacks[-1]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Tabled:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call] # torch's
        for stack in self._stacks:
            stack.pack()
        return self

    def home(self) -> torch.device | None:
        """Where the tables are; without any, where the model is, and None if there is no model."""
        for table in self._tables.values():
            return table.weight.device
        store = current.frame.store
        return None if store is None else store.device

    def look_for_servers(self) -> bool:
        """In the first call inside a model: if servers have its variables, let them have the tables' rows.

        Says whether that changed a table.
        """
        store = current.frame.store
        if self._looked or store is None:
            return False
        self._looked = True
        strategy = getattr(store.module, "strategy", None)
        served = getattr(getattr(strategy, "role", None), "servers", 0) and getattr(strategy, "mode", "") != "geo"
        changed = [table for table in self._tables.values() if served and not table.sparse]
        for table in changed:
            table.sparse = True
        return bool(changed)


class Embedding(Tabled):
    """A module with the tables of embedding columns."""

    def add_tables(self, columns: Iterable[FeatureColumn], trainable: bool) -> None:
        for column in columns:
            if isinstance(column, EmbeddingColumn):
                self._add(column, trainable)

    def _add(self, column: EmbeddingColumn, trainable: bool) -> None:
        rows = column.categorical_column.num_buckets
        table = self.add_table(
            column.table,
            lambda: Table(
                rows,
                column.dimension,
                "embedding_weights",
                column.fill,
                trainable=trainable and column.trainable,
                sparse=bool(column.sparse),
            ),
        )
        if (table.num_embeddings, table.embedding_dim) != (rows, column.dimension):
            raise ConfigError(
                f"columns share the table {column.table!r}, but one wants {[rows, column.dimension]} and another "
                f"{[table.num_embeddings, table.embedding_dim]}: give them other names"
            )

    def table_of(self, column: EmbeddingColumn) -> Table:
        return self._tables[column.table]

    def source_of(self, column: DenseColumn, ids: CategoricalColumn | None = None) -> Callable[[Inputs], Tensor]:
        """What gives a column by itself; of other ids than its own, if they are given."""
        if not isinstance(column, EmbeddingColumn):
            return column.dense
        return Separate(ids or column.categorical_column, self.table_of(column), column.combiner, column.max_norm)


class DenseFeatures(Embedding):
    """Columns side by side, in the order of their names: [batch, sum of their widths].

    The variable of an embedding column is `COLUMN_embedding/embedding_weights`.

    >>> from plait.feature_column import bucketized_column, numeric_column
    >>> age = numeric_column("age")
    >>> DenseFeatures([bucketized_column(age, [18, 65]), age])({"age": torch.tensor([20.0, 70.0])}).tolist()
    [[20.0, 0.0, 1.0, 0.0], [70.0, 0.0, 0.0, 1.0]]
    """

    def __init__(
        self, feature_columns: Iterable[DenseColumn] | DenseColumn, trainable: bool = True, name: str | None = None
    ) -> None:
        super().__init__()
        self.name = name or "dense_features"
        self.columns = sorted_columns(feature_columns, DenseColumn, "DenseFeatures")
        self.add_tables(self.columns, trainable)
        self._parts = self._plan()

    def _plan(self) -> _Plan:
        """What is looked up, and where each column's numbers are in that: one lookup for each width and combiner."""
        sources: list[Callable[[Inputs], Tensor]] = []
        layout: list[tuple[int, int, int]] = []
        pooled: dict[tuple[int, str], list[EmbeddingColumn]] = {}
        self._stacks = []
        for column in self.columns:
            if isinstance(column, EmbeddingColumn) and self._may_fuse(column):
                pooled.setdefault((column.dimension, column.combiner), []).append(column)
        stacks = {
            width: self.stacked([self.table_of(one) for (at, _), some in pooled.items() if at == width for one in some])
            for width in {width: None for width, _ in pooled}
        }
        numbers: dict[tuple[int, str], int] = {}
        for (width, combiner), members in pooled.items():
            numbers[width, combiner] = len(sources)
            tables = [self.table_of(column) for column in members]
            sources.append(Pool([one.categorical_column for one in members], tables, stacks[width], combiner).each)
        for column in self.columns:
            if isinstance(column, EmbeddingColumn) and self._may_fuse(column):
                members = pooled[column.dimension, column.combiner]
                start = members.index(column) * column.dimension
                layout.append((numbers[column.dimension, column.combiner], start, start + column.dimension))
            else:
                layout.append((len(sources), 0, column.width))
                sources.append(self.source_of(column))
        return _Plan(sources, layout)

    def _may_fuse(self, column: EmbeddingColumn) -> bool:
        return column.max_norm is None and not self.table_of(column).sparse

    def forward(
        self,
        features: Mapping[str, Any],
        cols_to_output_tensors: dict[DenseColumn, Tensor] | None = None,
        training: bool | None = None,
    ) -> Tensor:
        """The columns of a batch; `cols_to_output_tensors` is filled with each by itself."""
        del training  # for scripts that pass it
        inputs = Inputs.of(features)
        if self.look_for_servers():
            self._parts = self._plan()
        for one in self._parts.separate:
            one.ask(inputs)
        found = [source(inputs) for source in self._parts.sources]
        if cols_to_output_tensors is not None:
            for column, (source, start, stop) in zip(self.columns, self._parts.layout, strict=True):
                cols_to_output_tensors[column] = found[source][:, start:stop].to(self.home())
        joined = self._parts.joined(found)
        return joined if self._tables else joined.to(self.home())  # of strings alone, it is in the host's memory


class _Plan:
    """What is called, and which slices of the results stand side by side."""

    def __init__(self, sources: list[Callable[[Inputs], Tensor]], layout: list[tuple[int, int, int]]) -> None:
        self.sources = sources
        self.separate = [source for source in sources if isinstance(source, Separate)]
        self.layout = layout
        runs: list[tuple[int, int, int]] = []
        for source, start, stop in layout:
            if runs and runs[-1][0] == source and runs[-1][2] == start:
                runs[-1] = (source, runs[-1][1], stop)
            else:
                runs.append((source, start, stop))
        self._runs = runs

    def joined(self, found: Sequence[Tensor]) -> Tensor:
        if len(self._runs) == len(found) == 1:
            return found[0]
        parts = []
        for source, start, stop in self._runs:
            value = found[source]
            parts.append(value if stop - start == value.shape[1] else value[:, start:stop])
        try:
            return torch.cat(on_one_device(parts), 1)
        except RuntimeError as error:
            raise DataError(
                f"the columns do not fit side by side: their batches have {sorted({len(part) for part in parts})} rows"
            ) from error


def input_layer(
    features: Mapping[str, Any],
    feature_columns: Iterable[DenseColumn] | DenseColumn,
    weight_collections: Sequence[str] | None = None,
    trainable: bool = True,
    cols_to_vars: dict[Any, list[Tensor]] | None = None,
    cols_to_output_tensors: dict[DenseColumn, Tensor] | None = None,
) -> Tensor:
    """Columns side by side, by their names. Variables are `input_layer/COLUMN_embedding/embedding_weights`.

    Called in a loss_fn, eval_fn or model_fn. Other columns in the same scope make an `input_layer_1`, and so on.
    """
    columns = sorted_columns(feature_columns, DenseColumn, "input_layer")
    if not any(column.has_variables for column in columns):
        made = DenseFeatures(columns)
    else:
        made = unique_layer("input_layer", DenseFeatures, columns, trainable)
    variables: dict[Any, list[Tensor]] = {
        column: [made.table_of(column).weight] if isinstance(column, EmbeddingColumn) else [] for column in columns
    }
    collect(weight_collections, variables)
    if cols_to_vars is not None:
        cols_to_vars.update(variables)
    found: Tensor = made(features, cols_to_output_tensors)
    return found


def group_layer(group: str, columns: Sequence[Any]) -> Callable[[Any], Tensor]:
    """The `input_layer` of a Sample's group, in the scope `group`; its columns stay in the order given."""
    strange = [column for column in columns if not isinstance(column, DenseColumn)]
    if strange:
        raise DataError(
            f"columns: group {group!r} has columns with variables beside {strange[0]!r}; write numeric_column(...)"
        )
    ordered = sorted(columns, key=lambda column: column.name) == list(columns)

    def compute(features: Any) -> Tensor:
        each: dict[DenseColumn, Tensor] | None = None if ordered else {}
        with variable_scope(group, reuse=AUTO_REUSE):
            found = input_layer(features, columns, cols_to_output_tensors=each)
        return found if each is None else torch.cat([each[column] for column in columns], 1)

    return compute


_made: weakref.WeakKeyDictionary[VariableStore, dict[str, list[Any]]] = weakref.WeakKeyDictionary()
"""For each scope, of which columns its first, second, ... layer of a name is."""


def unique_layer(name: str, factory: Callable[..., M], columns: Sequence[FeatureColumn], *args: Any) -> M:
    """The layer of these columns in this scope: the first is called `name`, that of others `name`_1, and so on."""
    store = current.frame.store
    number = 0
    if store is not None:
        known = _made.setdefault(store, {}).setdefault(current.frame.prefix + name, [])
        key = (tuple(columns), args)
        if key not in known:
            known.append(key)
        number = known.index(key)
    return layer(f"{name}_{number}" if number else name, factory, columns, *args)


def collect(weight_collections: Sequence[str] | None, variables: Mapping[Any, Sequence[Tensor]]) -> None:
    """Add variables to collections that are to have them, once."""
    store = current.frame.store
    for key in weight_collections or ():
        kept = store.collections.setdefault(key, []) if store is not None else []
        kept += [one for some in variables.values() for one in some if all(one is not other for other in kept)]
