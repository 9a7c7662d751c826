"""From the ids of several columns to one sum of rows for each example and column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import DataError
from plait.feature_column.inputs import Categorical, Ids, Inputs
from plait.feature_column.rows import alike, joined
from plait.feature_column.tables import Stack, Table

__all__ = ["Bags", "Pool", "Separate", "bags_of"]


class Bags(NamedTuple):
    """Ids of several columns in one row: all of the first column, then all of the second."""

    values: Tensor
    owner: Tensor
    """The number of the column that each belongs to."""
    offsets: Tensor
    """Of each column's examples, one behind the other, and the end."""
    scale: Tensor | None
    """What each row is taken times."""


def bags_of(columns: Sequence[Categorical], given: Sequence[Ids], combiner: str, device: torch.device) -> Bags:
    """Ids that have a bucket, and what makes a sum of their rows the combination."""
    rows = _rows(given[0])
    for column, ids in zip(columns, given, strict=True):
        if _rows(ids) != rows:
            raise DataError(f"column {column.name!r} has {_rows(ids)} examples, and {columns[0].name!r} has {rows}")
    values = torch.cat([ids.values.reshape(-1).to(device) for ids in given])
    lengths = torch.cat([_lengths(ids).to(device) for ids in given])
    counts = torch.tensor([ids.values.numel() for ids in given], device=device)
    owner = torch.repeat_interleave(torch.arange(len(given), device=device), counts)
    bags = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    weights = _weights(given, device)
    sizes = torch.tensor([column.num_buckets for column in columns], device=device)
    over = values >= sizes[owner]
    if bool(over.any()):
        raise _too_large(columns[int(owner[over][0])], int(values[over][0]))
    keep = values >= 0
    if weights is not None and combiner != "sum":
        keep &= weights > 0
    if not bool(keep.all()):
        values, owner, bags = values[keep], owner[keep], bags[keep]
        weights = None if weights is None else weights[keep]
    offsets = torch.zeros(len(given) * rows + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.bincount(bags, minlength=len(given) * rows), 0, out=offsets[1:])
    return Bags(values, owner, offsets, _scale(combiner, weights, bags, offsets))


def _rows(ids: Ids) -> int:
    return len(ids.values) if ids.offsets is None else len(ids.offsets) - 1


def _lengths(ids: Ids) -> Tensor:
    if ids.offsets is not None:
        return ids.offsets.diff()
    rows, columns = ids.values.shape
    return torch.full((rows,), columns, device=ids.values.device)


def _weights(given: Sequence[Ids], device: torch.device) -> Tensor | None:
    if all(ids.weights is None for ids in given):
        return None
    ones = [torch.ones(ids.values.numel(), device=device) if ids.weights is None else ids.weights for ids in given]
    return torch.cat([one.reshape(-1).to(device) for one in ones])


def _scale(combiner: str, weights: Tensor | None, bags: Tensor, offsets: Tensor) -> Tensor | None:
    if combiner == "sum":
        return weights
    power = 1 if combiner == "mean" else 2
    if weights is None:
        totals = offsets.diff().to(torch.float32)
        weights = torch.ones(len(bags), device=bags.device)
    else:
        totals = torch.zeros(len(offsets) - 1, device=bags.device).index_add(0, bags, weights**power)
    divided: Tensor = weights / (totals if power == 1 else totals.sqrt())[bags]
    return divided


def _too_large(column: Categorical, value: int) -> DataError:
    return DataError(
        f"column {column.name!r} has {column.num_buckets} buckets, and got the id {value}; make it larger, or write a "
        "default_value for what is outside"
    )


class Pool:
    """Columns whose tables are one stack and whose rows are combined alike: one lookup for all of them."""

    def __init__(self, columns: Sequence[Categorical], tables: Sequence[Table], stack: Stack, combiner: str) -> None:
        self.columns = list(columns)
        self.stack = stack
        self.combiner = combiner
        numbers = [stack.tables.index(table) for table in tables]
        starts = torch.tensor([0, *stack.sizes]).cumsum(0)
        self._starts = starts[numbers]
        sizes = [column.num_buckets for column in columns]
        self._sizes = torch.tensor(sizes)
        self._keys = [column.plain_key for column in columns]

    def each(self, inputs: Inputs) -> Tensor:
        """The combined rows, those of a batch's columns side by side: [batch, columns * width]."""
        ids = self._single(inputs)
        found = None if ids is None else self.stack.side_by_side(ids, self._starts, self._sizes)
        return self._combined(inputs).transpose(0, 1).flatten(1) if found is None else found

    def total(self, inputs: Inputs) -> Tensor:
        """The sum over the columns: [batch, width]."""
        ids = self._single(inputs)
        places = None if ids is None else joined(ids, self._starts, self._sizes)
        return self._combined(inputs).sum(0) if places is None else self.stack.look_up(places)

    def _device(self) -> torch.device:
        """Where the tables are; what is known of them goes with them."""
        device = self.stack.tables[0].weight.device
        if self._starts.device != device:
            self._starts, self._sizes = self._starts.to(device), self._sizes.to(device)
        return device

    def _single(self, inputs: Inputs) -> list[Tensor] | None:
        """The ids of each column, if each example has just one."""
        self._device()
        plain = inputs.plain(self._keys)
        if plain is not None:
            return plain
        found = [inputs.ids(column) for column in self.columns]
        if any(ids.offsets is not None or ids.weights is not None for ids in found):
            return None
        values = [ids.values for ids in found]
        return values if alike(values) and values[0].shape[1] == 1 else None

    def _combined(self, inputs: Inputs) -> Tensor:
        given = [inputs.ids(column) for column in self.columns]
        bags = bags_of(self.columns, given, self.combiner, self._device())
        found = self.stack.look_up(bags.values + self._starts[bags.owner], bags.offsets, bags.scale)
        return found.view(len(given), len(found) // len(given), found.shape[1])


class Separate:
    """The combined rows of one column, from a table that may be elsewhere: [batch, width]."""

    def __init__(self, column: Categorical, table: Table, combiner: str, max_norm: float | None = None) -> None:
        self.column, self.table = column, table
        self.combiner, self.max_norm = combiner, max_norm

    def ask(self, inputs: Inputs) -> None:
        """If the table is elsewhere, ask for the rows, without waiting for them."""
        ask = getattr(self.table.forward, "ask", None)
        if ask is not None:
            ask(self._wanted(inputs)[0])

    def __call__(self, inputs: Inputs) -> Tensor:
        ids, bags = self._wanted(inputs)
        if bags is None:
            single: Tensor = self.table(ids)
            return single
        if self.max_norm is None:
            found: Tensor = self.table(ids, bags.offsets, bags.scale)
            return found
        rows: Tensor = self.table(ids)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        rows = rows * (self.max_norm / norms.clamp(min=self.max_norm))
        rows = rows if bags.scale is None else rows * bags.scale[:, None]
        owner = torch.repeat_interleave(torch.arange(len(bags.offsets) - 1, device=rows.device), bags.offsets.diff())
        return rows.new_zeros(len(bags.offsets) - 1, rows.shape[1]).index_add(0, owner, rows)

    def _wanted(self, inputs: Inputs) -> tuple[Tensor, Bags | None]:
        found: tuple[Tensor, Bags | None] = inputs.once(self, self._find)
        return found

    def _find(self, inputs: Inputs) -> tuple[Tensor, Bags | None]:
        """The ids as the table takes them; and, unless each example has just one, what is done with their rows."""
        ids, device = inputs.ids(self.column), self.table.weight.device
        if self.max_norm is None and ids.offsets is None and ids.weights is None and ids.values.shape[1] == 1:
            values = ids.values.to(device)
            if len(values) and int(values.min()) >= 0 and int(values.max()) < self.column.num_buckets:
                return values, None
        bags = bags_of([self.column], [ids], self.combiner, device)
        return bags.values if self.max_norm is None else bags.values[:, None], bags
