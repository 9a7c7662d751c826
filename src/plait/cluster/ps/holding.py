"""What of a model the servers hold, seen from a worker: how it is described, filled, pushed and pulled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from plait.cluster.ps import rules
from plait.cluster.ps.client import Pending
from plait.cluster.ps.lookup import Embedding, described
from plait.cluster.ps.membership import Membership
from plait.cluster.ps.placement import Part, Placement
from plait.cluster.ps.spec import ModelSpec, OptimizerSpec, VariableSpec
from plait.cluster.ps.wire import Message
from plait.errors import ConfigError

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["Asked", "Holding", "RowsOfTables"]

ROWS_AT_ONCE = 1 << 16
"""Rows of a table in one message."""

RowsOfTables = Mapping[int, tuple[Tensor, Tensor]]
"""By the number of a table: ids, and a row for each."""


class Asked(NamedTuple):
    """Rows that are on their way."""

    table: int
    ids: Tensor
    version: int
    parts: list[Part]
    pendings: list[Pending]


class Holding:
    """The variables and embeddings of one model, as the servers have them."""

    def __init__(self, members: Membership, model: Model, embeddings: Mapping[str, Embedding]) -> None:
        self.members = members
        self.weights = [module.weight for module in embeddings.values()]
        """The worker's own embeddings; their values count only before the first step."""
        numbers, optimizers = _numbered(model)
        apart = set(self.weights)
        named = {name: value for name, value in model.variables().items() if value in numbers and value not in apart}
        self.variables: list[Tensor] = list(named.values())
        self.spec = ModelSpec(
            optimizers=tuple(optimizers),
            variables=tuple(
                VariableSpec(name=name, shape=tuple(value.shape), dtype=_dtype(value), optimizer=numbers[value])
                for name, value in named.items()
            ),
            tables=tuple(described(path, module, numbers.get(module.weight)) for path, module in embeddings.items()),
        )
        self.placement = Placement(self.spec, len(members.connections))

    def fill(self, server: int, *, replicas: int, version: int, load: str | None = None) -> None:
        """Begin a server that has not begun in this generation: with this worker's values, or what was saved."""
        members = self.members
        status = members.ask(server, "status").head
        if status["ready"] and status["generation"] == members.generation and status["mode"] == members.mode:
            return
        generation = {"g": members.generation}
        begin = {"spec": self.spec.to_json(), "mode": members.mode, "replicas": replicas, "version": version}
        flats = [flat.cpu() for flat in self.placement.pack(server, self.variables)[1]]
        members.ask(server, "begin", {**generation, **begin}, flats)
        if load is not None:
            members.ask(server, "load", {**generation, "path": load})
        else:
            self._send_rows(server)
        members.ask(server, "ready", generation)

    def put(self, server: int, *, version: int) -> None:
        """Overwrite what a server has with this worker's values; optimizers' state stays."""
        flats = [flat.cpu() for flat in self.placement.pack(server, self.variables)[1]]
        self.members.ask(server, "put", {"g": self.members.generation, "version": version}, flats)
        self._send_rows(server)

    def _send_rows(self, server: int) -> None:
        count = len(self.members.connections)
        for number, weight in enumerate(self.weights):
            values = weight.detach().cpu()
            for ids in _blocks(torch.arange(len(values))[server::count]):
                head = {"g": self.members.generation, "table": number}
                self.members.ask(server, "rows", head, [ids, values.index_select(0, ids)])

    def push(self, head: dict[str, Any], tensors: Sequence[Tensor | None], rows: RowsOfTables) -> list[Pending]:
        """Send a tensor for each variable, and rows of tables, to whoever has them; every server gets a message."""
        shares = {table: self.placement.partition(table, ids) for table, (ids, _) in rows.items()}
        pendings = []
        for server, connection in enumerate(self.members.connections):
            present, flats = self.placement.pack(server, tensors)
            sent = [flat.cpu() for flat in flats]
            for table, (_, values) in rows.items():
                part, given = shares[table][server], values.cpu()
                sent += [part.ids, given if part.positions is None else given.index_select(0, part.positions)]
            pendings.append(connection.send("push", {**head, "p": present, "t": list(rows)}, sent))
        return pendings

    def take(self, answers: Sequence[Message], into: Sequence[Tensor] | None = None) -> None:
        """Write the variables that the servers sent into this worker's, or into others like them."""
        for server, answer in enumerate(answers):
            targets = self.variables if into is None else into
            flats = answer.tensors[: len(self.placement.groups(server))]
            if targets and targets[0].device.type != "cpu":
                flats = [flat.to(targets[0].device) for flat in flats]
            self.placement.unpack(server, flats, targets)

    def take_rows(self, answers: Sequence[Message], rows: RowsOfTables) -> dict[int, tuple[Tensor, Tensor]]:
        """The rows that the servers sent after the variables, for the ids that were pushed."""
        found = {table: torch.empty_like(values, device="cpu") for table, (_, values) in rows.items()}
        for server, answer in enumerate(answers):
            sent = answer.tensors[len(self.placement.groups(server)) :]
            for (table, (ids, _)), got in zip(rows.items(), sent, strict=True):
                positions = self.placement.partition(table, ids)[server].positions
                if positions is None:
                    found[table] = got
                else:
                    found[table].index_copy_(0, positions, got)
        return {table: (ids, found[table]) for table, (ids, _) in rows.items()}

    def ask_rows(self, table: int, ids: Tensor, version: int, *, create: bool = True) -> Asked:
        """Ask for rows, as they are after `version` steps, without waiting."""
        parts = self.placement.partition(table, ids)
        head = {"g": self.members.generation, "t": table, "v": version, "c": create}
        pendings = [
            connection.send("pull", head, [part.ids])
            for connection, part in zip(self.members.connections, parts, strict=True)
        ]
        return Asked(table, ids, version, parts, pendings)

    def rows(self, asked: Asked) -> Tensor:
        """The rows that were asked for, in the order of their ids."""
        answers = self.members.answers(asked.pendings)
        first = answers[0].tensors[0]
        if asked.parts[0].positions is None:
            return first
        rows = torch.empty(len(asked.ids), first.shape[1], dtype=first.dtype)
        for part, answer in zip(asked.parts, answers, strict=True):
            if part.positions is not None:
                rows.index_copy_(0, part.positions, answer.tensors[0])
        return rows

    def pull_variables(self) -> None:
        """Let this worker's variables be what the servers have."""
        self.take(self.members.ask_all("dense"))

    @torch.no_grad()
    def pull_tables(self) -> None:
        """Let this worker's own embeddings be what the servers have."""
        for table, weight in enumerate(self.weights):
            for ids in _blocks(torch.arange(len(weight))):
                weight[ids] = self.rows(self.ask_rows(table, ids, 0)).to(weight.device)


def _numbered(model: Model) -> tuple[dict[Tensor, int], list[OptimizerSpec]]:
    """Every parameter group of every optimizer, described; and the number of the one that moves each variable."""
    numbers: dict[Tensor, int] = {}
    optimizers: list[OptimizerSpec] = []
    for optimizer in model.optimizers():
        for spec, group in zip(rules.describe(optimizer), optimizer.param_groups, strict=True):
            for variable in group["params"]:
                if variable in numbers:
                    name = next((name for name, value in model.variables().items() if value is variable), "?")
                    raise ConfigError(
                        f"variable {name!r} is moved by two optimizers, and servers keep one for each: give the tasks "
                        "the same optimizer_fn, such as one optimizer_setter(opt) for all"
                    )
                numbers[variable] = len(optimizers)
            optimizers.append(spec)
    return numbers, optimizers


def _blocks(ids: Tensor) -> Sequence[Tensor]:
    """In portions that one message may hold."""
    return ids.tensor_split(-(-len(ids) // ROWS_AT_ONCE)) if len(ids) else []


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
