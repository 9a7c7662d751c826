"""What one parameter server holds: slices of variables with torch's optimizers over them, and shares of tables."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plait.cluster.ps import rules
from plait.cluster.ps.index import physical_memory
from plait.cluster.ps.placement import Group, Placement
from plait.cluster.ps.shard_files import Saved, ShardState, open_shards, slots_of, write_shard
from plait.cluster.ps.spec import DTYPES, ModelSpec, TableSpec, VariableSpec
from plait.cluster.ps.table import Table, rows_here
from plait.errors import ClusterError

__all__ = ["Push", "Shard"]


class Push(NamedTuple):
    """What a worker sends for one step: gradients, or in geo mode what it has moved."""

    present: list[int] | None
    """Numbers of the variables that have a gradient; None: all that the server has."""
    flats: list[Tensor]
    """Their slices, one flat tensor for each dtype, as `Placement.pack` gives them."""
    rows: dict[int, tuple[Tensor, Tensor]]
    """Table number: (ids, a row for each)."""


class Shard:
    """The share of server `index` of `servers`. For one thread; no call waits for anything."""

    def __init__(self, spec: ModelSpec, index: int, servers: int) -> None:
        spec.check()
        if not 0 <= index < servers:
            raise ClusterError(f"there is no server {index} of {servers}: they are counted from 0")
        self.spec, self.index, self.servers = spec, index, servers
        self.version = 0
        """Steps applied."""
        self.placement = Placement(spec, servers)
        self._check_memory()
        self._groups = self.placement.groups(index)
        self._flats = [torch.zeros(group.size, dtype=group.dtype) for group in self._groups]
        self._views = {
            piece.variable: view
            for group, flat in zip(self._groups, self._flats, strict=True)
            for piece, view in zip(group.slices, _split(group, flat), strict=True)
        }
        self._bounds = {piece.variable: (piece.start, piece.stop) for piece in self.placement.slices(index)}
        self._parameters = {
            number: nn.Parameter(view)
            for number, view in sorted(self._views.items())
            if spec.variables[number].optimizer is not None
        }
        self._optimizers = [self._make_optimizer(number) for number in range(len(spec.optimizers))]
        self.tables = self._make_tables()

    def set_dense(self, flats: Sequence[Tensor]) -> None:
        """Take the values of all variables, packed as `Placement.pack` does it."""
        self._check_flats("the values", self._groups, flats)
        for flat, given in zip(self._flats, flats, strict=True):
            flat.copy_(given)

    def dense(self) -> list[Tensor]:
        """The values of all variables: new tensors, for `Placement.unpack`."""
        return [flat.clone() for flat in self._flats]

    def pull(self, table: int, ids: Tensor, *, create: bool = True) -> Tensor:
        return self._table(table).pull(ids, create=create)

    def load_rows(self, table: int, ids: Tensor, values: Tensor) -> None:
        """Set rows of a table, such as the start values that a worker has."""
        self._table(table).load(ids, values)

    def apply(self, pushes: Sequence[Push], rates: Sequence[float], scale: float = 1.0) -> None:
        """One step by the sum of the pushes' gradients, in their order, times `scale`.

        A variable that no push has is left alone. All is checked before anything is changed.
        """
        self.check_rates(rates)
        for push in pushes:
            self.check_push(push, gradients=True)
        self._apply_dense(pushes, rates, scale)
        for number, table in enumerate(self.tables):
            pushed = [push.rows[number] for push in pushes if number in push.rows]
            optimizer = table.spec.optimizer
            if pushed and optimizer is not None:
                ids, gradients = pushed[0] if len(pushed) == 1 else map(torch.cat, zip(*pushed, strict=True))
                table.push(ids, gradients, rates[optimizer], scale)
        self.version += 1

    def add(self, push: Push) -> None:
        """Geo: values, and rows, plus what is given; no optimizer."""
        self.check_push(push, gradients=False)
        for number, delta in self._pieces(push).items():
            self._views[number] += delta
        for number, (ids, deltas) in push.rows.items():
            self.tables[number].add(ids, deltas)
        self.version += 1

    def snapshot(self, extra: dict[str, Any] | None = None, *, copy: bool = True) -> Callable[[Path], None]:
        """Copy everything now; what is returned writes it into a directory, in any thread.

        Args:
            extra: JSON values of the caller's, which `load` gives back.
            copy: False spares the memory of the copy: nothing may be applied until it is written.

        """
        state = ShardState(
            spec=self.spec,
            server=self.index,
            servers=self.servers,
            version=self.version,
            extra=deepcopy(extra or {}),
            scalars=self._scalars(),
            tensors={name: tensor.clone() if copy else tensor for name, tensor in self._tensors().items()},
        )
        return partial(write_shard, state=state)

    def load(self, directory: Path) -> list[dict[str, Any]]:
        """Take this server's share of what `snapshot` wrote, for any number of servers; their extras are returned."""
        saved = open_shards(directory)
        saved.check_spec(self.spec)
        same = saved.servers == self.servers
        sources = [self.index] if same else list(range(saved.servers))
        saved.verify(sources)
        self.tables = []  # the old ones' memory goes before that of the new ones is taken
        self.tables = self._make_tables()
        with contextlib.ExitStack() as stack:
            opened = {server: stack.enter_context(saved.open(server)) for server in sources}
            for number in self._views:
                self._load_variable(number, saved, opened)
            for number in range(len(self.tables)):
                self._load_table(number, saved, opened)
        self.version = saved.versions[self.index] if same else max(saved.versions)
        return saved.extras

    def _load_variable(self, number: int, saved: Saved, opened: Mapping[int, Any]) -> None:
        start, stop = self._bounds[number]
        name, view = self.spec.variables[number].name, self._views[number]
        parameter = self._parameters.get(number)
        state: dict[str, Any] = {}
        for server, low, high, first in saved.elements(number, start, stop):
            part = slice(low - first, high - first)
            view[low - start : high - start] = opened[server].get_slice(f"values/{name}")[part]
            for slot in slots_of(opened[server], name):
                whole = state.setdefault(slot, torch.zeros_like(view))
                whole[low - start : high - start] = opened[server].get_slice(f"slots/{slot}/{name}")[part]
            state |= {key: torch.tensor(value) for key, value in saved.scalars(server, name).items()}
        optimizer = self._optimizers[self.spec.variables[number].optimizer or 0] if parameter is not None else None
        if parameter is not None and optimizer is not None:
            optimizer.state[parameter] = state

    def _load_table(self, number: int, saved: Saved, opened: Mapping[int, Any]) -> None:
        table = self.tables[number]
        for server, tensors in opened.items():
            for ids, values, slots in saved.rows(server, number, tensors):
                owner = self.placement.owner(number, ids)
                if owner is None or saved.servers == self.servers:
                    table.load(ids, values, slots)
                else:
                    own = owner == self.index
                    table.load(ids[own], values[own], {slot: rows[own] for slot, rows in slots.items()})
            scalars = saved.scalars(server, table.spec.name)
            table.scalars = {name: torch.tensor(scalars.get(name, 0.0)) for name in table.scalars}

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that is held, by its name in a file."""
        tensors = {f"values/{self.spec.variables[number].name}": view for number, view in self._views.items()}
        for name, slot, value in self._states():
            if isinstance(value, Tensor) and value.dim():
                tensors[f"slots/{slot}/{name}"] = value
        for table in self.tables:
            name = table.spec.name
            tensors[f"values/{name}"] = table.values.tensor[: len(table)]
            tensors |= {f"slots/{slot}/{name}": rows.tensor[: len(table)] for slot, rows in table.slots.items()}
            if table.spec.rows is None:
                tensors[f"ids/{name}"] = table.ids()
        return tensors

    def _scalars(self) -> dict[str, dict[str, float]]:
        scalars: dict[str, dict[str, float]] = {}
        for name, slot, value in self._states():
            if not isinstance(value, Tensor) or not value.dim():
                scalars.setdefault(name, {})[slot] = float(value)
        for table in self.tables:
            scalars[table.spec.name] = {slot: float(value) for slot, value in table.scalars.items()}
        return scalars

    def _states(self) -> Iterator[tuple[str, str, Any]]:
        """Name, slot and value of the optimizers' state of variables."""
        for number, parameter in self._parameters.items():
            variable = self.spec.variables[number]
            optimizer = self._optimizers[variable.optimizer or 0]
            for slot, value in optimizer.state.get(parameter, {}).items() if optimizer else ():
                yield variable.name, slot, value

    def _check_memory(self) -> None:
        """The spec may come from a peer: what could never fit is refused before memory is taken."""
        sizes = [
            (self.spec.variables[number], stop - start) for number, start, stop in self.placement.slices(self.index)
        ]
        held: list[tuple[VariableSpec | TableSpec, int]] = [
            *sizes,
            *((table, (rows_here(table, self.index, self.servers) or 0) * table.dim) for table in self.spec.tables),
        ]
        needed = sum(size * DTYPES[item.dtype].itemsize * self._copies(item.optimizer) for item, size in held)
        if needed > physical_memory():
            raise ClusterError(
                f"server {self.index} of {self.servers} would need {needed} bytes, this machine has "
                f"{physical_memory()}: use more servers"
            )

    def _copies(self, optimizer: int | None) -> int:
        """Numbers kept for each element: itself and its state."""
        return 1 + (0 if optimizer is None else len(rules.start_values(self.spec.optimizers[optimizer]).rows))

    def _make_optimizer(self, number: int) -> Optimizer | None:
        variables = self.spec.variables
        moved = [parameter for of, parameter in self._parameters.items() if variables[of].optimizer == number]
        spec = self.spec.optimizers[number]
        optimizer = rules.make(spec, moved or [torch.zeros(0, requires_grad=True)])  # wrong options show even if unused
        return optimizer if moved else None

    def _make_tables(self) -> list[Table]:
        made = []
        for spec in self.spec.tables:
            optimizer = None if spec.optimizer is None else self.spec.optimizers[spec.optimizer]
            made.append(Table(spec, optimizer, self.index, self.servers))
        return made

    def _apply_dense(self, pushes: Sequence[Push], rates: Sequence[float], scale: float) -> None:
        gradients = self._summed(pushes, scale)
        if not gradients:
            return
        for number, gradient in gradients.items():
            self._parameters[number].grad = gradient
        for optimizer, rate in zip(self._optimizers, rates, strict=True):
            if optimizer is not None:
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
        for number in gradients:
            self._parameters[number].grad = None

    def _summed(self, pushes: Sequence[Push], scale: float) -> dict[int, Tensor]:
        """The gradient of each variable that a push has."""
        if len({None if push.present is None else tuple(push.present) for push in pushes}) == 1:
            flats = pushes[0].flats
            for push in pushes[1:]:
                flats = [total + flat for total, flat in zip(flats, push.flats, strict=True)]
            if scale != 1:
                flats = [flat * scale for flat in flats]
            return self._pieces(Push(pushes[0].present, flats, {}))
        sums: dict[int, Tensor] = {}
        for push in pushes:
            for number, piece in self._pieces(push).items():
                sums[number] = sums[number] + piece if number in sums else piece
        return {number: total * scale for number, total in sums.items()} if scale != 1 else sums

    def _pieces(self, push: Push) -> dict[int, Tensor]:
        """The part of each variable in a push, by its number."""
        groups = self.placement.groups(self.index, push.present)
        return {
            piece.variable: part
            for group, flat in zip(groups, push.flats, strict=True)
            for piece, part in zip(group.slices, _split(group, flat), strict=True)
        }

    def check_rates(self, rates: Sequence[float]) -> None:
        if len(rates) != len(self.spec.optimizers):
            raise ClusterError(f"{len(rates)} learning rates came for {len(self.spec.optimizers)} optimizers")
        for rate, spec in zip(rates, self.spec.optimizers, strict=True):
            if not 0 <= rate < math.inf or (rate == 0 and spec.kind == "plait.Ftrl"):
                raise ClusterError(f"the learning rate of {spec.kind} is {rate!r}: send a number above 0")

    def check_push(self, push: Push, *, gradients: bool) -> None:
        groups = self.placement.groups(self.index, push.present)
        self._check_flats("a push", groups, push.flats)
        fixed = [piece.variable for group in groups for piece in group.slices if piece.variable not in self._parameters]
        if gradients and fixed:
            raise ClusterError(
                f"variable {self.spec.variables[fixed[0]].name!r} has no optimizer: do not push gradients of it"
            )
        for number, (ids, rows) in push.rows.items():
            table = self._table(number)
            (table.check_push if gradients else table.check_rows)(ids, rows)

    def _check_flats(self, what: str, groups: Sequence[Group], flats: Sequence[Tensor]) -> None:
        awaited = [(group.dtype, (group.size,)) for group in groups]
        got = [(flat.dtype, tuple(flat.shape)) for flat in flats]
        if got != awaited:
            raise ClusterError(
                f"server {self.index} of {self.servers} got {what} as {got[:8]}: its slices are {awaited[:8]}"
            )

    def _table(self, number: int) -> Table:
        if not 0 <= number < len(self.tables):
            raise ClusterError(f"there is no table {number}: the model has {len(self.tables)}, counted from 0")
        return self.tables[number]


def _split(group: Group, flat: Tensor) -> Sequence[Tensor]:
    return flat.split_with_sizes([piece.stop - piece.start for piece in group.slices])
