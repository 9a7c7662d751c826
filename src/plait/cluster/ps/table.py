"""One server's share of an embedding table: rows and their optimizer's state, in memory that grows in place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from plait.cluster.ps import rules
from plait.cluster.ps.index import Index, mix, reserve
from plait.cluster.ps.spec import DTYPES, OptimizerSpec, TableSpec
from plait.errors import ClusterError

__all__ = ["Rows", "Table", "rows_here", "start_rows"]

Ids: TypeAlias = npt.NDArray[np.int64]

_BLOCK = 1 << 16
"""Numbers that are drawn at a time, so that making many rows takes little memory beside them."""
_BELOW_TWO = 0.022750131948179212
"""How often a normal number is below -2."""


class Rows:
    """Rows of equal length that are read and written whole; a row is one item to NumPy, so it is copied at once."""

    def __init__(self, tensor: Tensor, start: float = 0.0) -> None:
        self.tensor = tensor
        self.start = start
        """What a row is full of that nobody has written to."""
        self._items = _items(tensor)

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: Ids) -> Tensor:
        taken = torch.empty(len(rows), self.tensor.shape[1], dtype=self.tensor.dtype)
        # "clip" writes straight into `out`; the rows have been checked
        self._items.take(rows, out=_items(taken), mode="clip")
        return taken

    def put(self, rows: Ids, values: Tensor) -> None:
        np.put(self._items, rows, _items(values), mode="clip")

    def add(self, rows: Ids, values: Tensor) -> None:
        """Add to rows, which may be there more than once: in their order."""
        places = torch.from_numpy(rows)[:, None].expand(values.shape)
        self.tensor.scatter_add_(0, places, values)  # several times faster than index_add_

    def begin(self, start: int, stop: int) -> None:
        """New rows; those that begin at zero are left alone, for the memory is zero and need not be there yet."""
        if self.start:
            self.tensor[start:stop] = self.start


class Table:
    """The rows that server `index` of `servers` has, and the rule that moves them.

    Only rows that a push names are moved, with their own state; the number of steps, where the rule has one, is the
    table's. Ids come as the workers know them.
    """

    def __init__(self, spec: TableSpec, optimizer: OptimizerSpec | None, index: int = 0, servers: int = 1) -> None:
        self.spec = spec
        self._server, self._servers = index, servers
        rows = rows_here(spec, index, servers)
        dtype = DTYPES[spec.dtype]
        start = rules.start_values(optimizer) if optimizer else rules.Slots({}, {})
        self.values = Rows(reserve(rows, spec.dim, dtype))
        self.slots = {name: Rows(reserve(rows, spec.dim, dtype), value) for name, value in start.rows.items()}
        self.scalars: dict[str, Any] = {name: torch.tensor(value) for name, value in start.scalars.items()}
        self._index = Index(len(self.values)) if rows is None else None
        self._count = rows or 0
        for slot in self.slots.values():
            slot.begin(0, self._count)
        self._rule = _Rule(spec, optimizer, len(self.values)) if optimizer else None

    def __len__(self) -> int:
        return self._count

    def ids(self) -> Tensor:
        """The ids in the order of rows."""
        if self._index is not None:
            return torch.from_numpy(self._index.ids())
        return torch.arange(self._server, self.spec.rows or 0, self._servers)

    def pull(self, ids: Tensor, *, create: bool = True) -> Tensor:
        """A row for each id. Without `create`, rows that are not there give what they would start with."""
        rows = self._locate(ids, create=create)
        if create or self._index is None:
            return self.values.take(rows)
        unknown = np.flatnonzero(rows < 0)
        taken = self.values.take(np.maximum(rows, 0))
        if len(unknown):
            taken[torch.from_numpy(unknown)] = start_rows(self.spec, ids.numpy()[unknown])
        return taken

    def check_push(self, ids: Tensor, gradients: Tensor) -> None:
        """Raises ClusterError for what `push` would not take; changes nothing."""
        if self._rule is None:
            raise ClusterError(f"table {self.spec.name!r} has no optimizer: gradients cannot be pushed to it")
        self.check_rows(ids, gradients)

    def check_rows(self, ids: Tensor, values: Tensor) -> None:
        self._check_ids(ids)
        shape, dtype = (len(ids), self.spec.dim), DTYPES[self.spec.dtype]
        if values.shape != shape or values.dtype != dtype:
            raise ClusterError(
                f"table {self.spec.name!r} got {tuple(values.shape)} of {values.dtype} for {len(ids)} ids: "
                f"send {shape} of {dtype}"
            )

    def push(self, ids: Tensor, gradients: Tensor, lr: float, scale: float = 1.0) -> None:
        """Move the rows by their gradients, times `scale`; those of an id that is there more than once are summed.

        A push without ids is a step, too: it counts, so that all servers count alike.
        """
        self.check_push(ids, gradients)
        if self._rule is None:
            return
        rows = self._locate(ids, create=True)
        if self._rule.plain:
            self.values.add(rows, gradients * (-lr * scale * self._rule.plain))
            return
        rows, gradients = self._rule.summed(rows, gradients)
        self._rule.move(self, rows, gradients * scale if scale != 1 else gradients, lr)

    def add(self, ids: Tensor, deltas: Tensor) -> None:
        """Add to the rows themselves, past the optimizer."""
        self.check_rows(ids, deltas)
        if len(ids):
            self.values.add(self._locate(ids, create=True), deltas)

    def load(self, ids: Tensor, values: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        """Set rows, and their state where it is given."""
        self.check_rows(ids, values)
        rows = self._locate(ids, create=True)
        self.values.put(rows, values)
        for name, state in (slots or {}).items():
            self.check_rows(ids, state)
            self.slots[name].put(rows, state)

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ClusterError(
                f"the ids for table {self.spec.name!r} are {tuple(ids.shape)} of {ids.dtype}: send a list of int64"
            )
        rows = self.spec.rows
        if rows is None or not len(ids):
            return
        array = ids.numpy()
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= rows:
            wrong = low if low < 0 else high
            raise ClusterError(
                f"id {wrong} is not in table {self.spec.name!r}, which has {rows} rows, 0 to {rows - 1}: make the "
                "table larger, or the ids smaller"
            )
        if self._servers > 1 and (array % self._servers != self._server).any():
            raise ClusterError(
                f"ids of table {self.spec.name!r} came to server {self._server} that are not all its own: of "
                f"{self._servers} servers, it has those with id % {self._servers} == {self._server}"
            )

    def _locate(self, ids: Tensor, *, create: bool) -> Ids:
        """The row of each id here; -1 where there is none."""
        self._check_ids(ids)
        array: Ids = ids.numpy()
        if self._index is None:
            return array // self._servers if self._servers > 1 else array
        rows = self._index.slots(array, create=create)
        if len(self._index) > self._count:
            self._begin(len(self._index))
        return rows

    def _begin(self, stop: int) -> None:
        """Give the new ids their start values."""
        ids = self.ids().numpy()
        for slot in self.slots.values():
            slot.begin(self._count, stop)
        if self.spec.initializer["kind"] != "zeros":
            block = max(1, _BLOCK // self.spec.dim)
            for start in range(self._count, stop, block):
                end = min(start + block, stop)
                self.values.tensor[start:end] = start_rows(self.spec, ids[start:end])
        self._count = stop


class _Rule:
    """How rows move: a torch optimizer over one parameter that stands for the rows of a push."""

    def __init__(self, spec: TableSpec, optimizer: OptimizerSpec, rows: int) -> None:
        options = optimizer.options
        if options.get("dampening"):
            raise ClusterError(
                f"table {spec.name!r} has SGD with dampening={options['dampening']}: torch leaves it out in a "
                "variable's first step, which rows do not have in common; write dampening=0"
            )
        self._parameter = nn.Parameter(torch.zeros(0, spec.dim, dtype=DTYPES[spec.dtype]))
        self._optimizer = rules.make(optimizer, [self._parameter])
        plain = optimizer.kind == "SGD" and not options.get("momentum") and not options.get("weight_decay")
        self.plain = (-1.0 if options.get("maximize") else 1.0) if plain else 0.0
        """1 if a row moves by its gradient times the rate, and nothing else; -1 if upwards; otherwise 0."""
        self._marks = reserve(0 if plain else rows, 1, torch.int32).numpy().reshape(-1)

    def summed(self, rows: Ids, gradients: Tensor) -> tuple[Ids, Tensor]:
        """Each row once, in order of arrival, and the sum of its gradients, in their order."""
        order = np.arange(len(rows), dtype=np.int32)
        marks = self._marks
        marks[rows[::-1]] = order[::-1]  # of several that write to one place the last one stays: the first that came
        first = marks[rows]
        again = np.flatnonzero(first != order)
        if not len(again):
            return rows, gradients
        once = np.flatnonzero(first == order)
        distinct = rows[once]
        marks[distinct] = order[: len(once)]
        sums = Rows(gradients).take(once)
        Rows(sums).add(marks[rows[again]].astype(np.int64), Rows(gradients).take(again))
        return distinct, sums

    @torch.no_grad()
    def move(self, table: Table, rows: Ids, gradients: Tensor, lr: float) -> None:
        parameter, optimizer = self._parameter, self._optimizer
        parameter.data = table.values.take(rows)
        parameter.grad = gradients
        state = {**table.scalars, **{name: slot.take(rows) for name, slot in table.slots.items()}}
        optimizer.state[parameter] = state
        optimizer.param_groups[0]["lr"] = lr
        try:
            optimizer.step()
            table.values.put(rows, parameter.data)
            for name, slot in table.slots.items():
                slot.put(rows, state[name])
            table.scalars = {name: state[name] for name in table.scalars}
        finally:
            parameter.data, parameter.grad = parameter.data[:0].clone(), None
            optimizer.state.clear()


def rows_here(spec: TableSpec, index: int, servers: int) -> int | None:
    """How many rows of a table of a fixed size live on one server."""
    return None if spec.rows is None else max(0, -((index - spec.rows) // servers))


def start_rows(spec: TableSpec, ids: Ids) -> Tensor:
    """What the rows of these ids start with: a function of seed, name and id, whatever else there is and was."""
    kind, scale = spec.initializer["kind"], spec.initializer["scale"]
    dtype = DTYPES[spec.dtype]
    if kind == "zeros":
        return torch.zeros(len(ids), spec.dim, dtype=dtype)
    name = hashlib.sha256(f"{spec.initializer['seed']}/{spec.name}".encode()).digest()
    keys = mix(mix(ids) ^ np.uint64(int.from_bytes(name[:8], "little")))
    columns = np.arange(spec.dim, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = mix(keys[:, None] + columns)
    uniform = torch.from_numpy(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)  # between 0 and 1, never at either
    numbers: Tensor
    if kind == "uniform":
        numbers = uniform * 2 - 1
    elif kind == "normal":
        numbers = torch.special.ndtri(uniform)
    else:
        numbers = torch.special.ndtri(_BELOW_TWO + uniform * (1 - 2 * _BELOW_TWO))
    return numbers.mul_(scale).to(dtype)


def _items(rows: Tensor) -> npt.NDArray[np.void]:
    """Each row as one item of bytes, over the same memory."""
    size = rows.shape[1] * rows.element_size()
    return rows.contiguous().view(torch.uint8).numpy().view(f"V{size}").reshape(-1)
