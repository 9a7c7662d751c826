"""Which server has what: a pure function of the model and the number of servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, _foreach_copy_
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from plait.cluster.ps.index import mix
from plait.cluster.ps.spec import DTYPES, ModelSpec
from plait.errors import ClusterError

__all__ = ["CUT", "Group", "Part", "Placement", "Slice"]

CUT = 8192
"""A variable with at least so many elements for each server is cut into equal slices; a smaller one stays whole."""
# one call for all tensors; as old as DDP, which is built on them
_flatten: Callable[[Sequence[Tensor]], Tensor] = _flatten_dense_tensors
_unflatten: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]] = _unflatten_dense_tensors
_MAX_PLANS = 64
"""Sets of present variables whose plans are kept; a model that trains by tasks has a few."""


class Slice(NamedTuple):
    """Elements `start` to `stop` of a variable, seen flat."""

    variable: int
    start: int
    stop: int


class Group(NamedTuple):
    """Slices of one dtype of one server; they travel as one flat tensor, in this order."""

    dtype: torch.dtype
    slices: tuple[Slice, ...]
    whole: bool
    """Every slice is a whole variable."""

    @property
    def size(self) -> int:
        return sum(piece.stop - piece.start for piece in self.slices)


class Part(NamedTuple):
    """What of a batch of ids goes to one server."""

    ids: Tensor
    positions: Tensor | None
    """Where they stood in the batch; None: these are all of them, in order."""


class Placement:
    """The plan for one model; workers and servers make the same one, each for itself."""

    def __init__(self, spec: ModelSpec, servers: int) -> None:
        if servers < 1:
            raise ClusterError(f"{servers} servers cannot hold a model: start at least 1")
        self.spec = spec
        self.servers = servers
        self._slices = _place(spec, servers)
        self._numbers = [[piece.variable for piece in slices] for slices in self._slices]
        self._groups = [self._group(slices) for slices in self._slices]
        self._plans: dict[tuple[int, tuple[int, ...]], tuple[Group, ...]] = {}

    def slices(self, server: int) -> list[Slice]:
        """What the server has, in the order of variables."""
        return list(self._slices[server])

    def groups(self, server: int, present: Sequence[int] | None = None) -> tuple[Group, ...]:
        """The slices by dtype, each dtype where its first slice is; of all variables, or of those that are present."""
        if present is None:
            return self._groups[server]
        key = server, tuple(present)
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = self._present(server, key[1])
        return self._plans[key]

    @torch.no_grad()
    def pack(self, server: int, tensors: Sequence[Tensor | None]) -> tuple[list[int] | None, list[Tensor]]:
        """What goes to the server of a tensor for each variable: the numbers of those that are there (None: all that
        the server has), and one new flat tensor for each dtype.
        """
        numbers = self._numbers[server]
        present = [number for number in numbers if tensors[number] is not None]
        complete = len(present) == len(numbers)
        groups = self._groups[server] if complete else self.groups(server, present)
        return (None if complete else present), [_pack(group, tensors) for group in groups]

    def unpack(self, server: int, flats: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Write what the server gave of all its variables (`Shard.dense`) into the variables."""
        groups = self._groups[server]
        sizes = [flat.numel() for flat in flats]
        if sizes != [group.size for group in groups] or any(
            flat.dtype != group.dtype for flat, group in zip(flats, groups, strict=True)
        ):
            raise ClusterError(f"server {server} sent {sizes} elements, {[group.size for group in groups]} are awaited")
        with torch.no_grad():
            for group, flat in zip(groups, flats, strict=True):
                _unpack(group, flat, into)

    def owner(self, table: int, ids: Tensor) -> Tensor | None:
        """The server of each id of a table; None when there is one server."""
        if self.servers == 1:
            return None
        if self.spec.tables[table].rows is not None:
            return ids % self.servers
        return torch.from_numpy((mix(ids.numpy()) % self.servers).view("int64"))

    def partition(self, table: int, ids: Tensor) -> list[Part]:
        """The ids (1-D, int64) of each server, in their order."""
        owner = self.owner(table, ids)
        if owner is None:
            return [Part(ids, None)]
        positions = [(owner == server).nonzero().view(-1) for server in range(self.servers)]
        return [Part(ids[found], found) for found in positions]

    def _group(self, slices: Sequence[Slice]) -> tuple[Group, ...]:
        by_dtype: dict[str, list[Slice]] = {}
        for piece in slices:
            by_dtype.setdefault(self.spec.variables[piece.variable].dtype, []).append(piece)
        return tuple(
            Group(DTYPES[dtype], tuple(pieces), all(self._is_whole(piece) for piece in pieces))
            for dtype, pieces in by_dtype.items()
        )

    def _is_whole(self, piece: Slice) -> bool:
        return piece.stop - piece.start == self.spec.variables[piece.variable].numel

    def _present(self, server: int, present: tuple[int, ...]) -> tuple[Group, ...]:
        chosen = set(present)
        slices = [piece for piece in self._slices[server] if piece.variable in chosen]
        if [piece.variable for piece in slices] != list(present):
            raise ClusterError(
                f"variables {list(present)[:20]} are said to be present: server {server} has "
                f"{self._numbers[server][:20]}; send numbers of those, each once, in rising order"
            )
        return self._group(slices)


def _place(spec: ModelSpec, servers: int) -> list[list[Slice]]:
    slices: list[list[Slice]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for number, variable in enumerate(spec.variables):
        size = variable.numel
        if size >= CUT * servers:
            bounds = [size * server // servers for server in range(servers + 1)]
            pieces = [(server, bounds[server], bounds[server + 1]) for server in range(servers)]
        else:
            pieces = [(loads.index(min(loads)), 0, size)]
        for server, start, stop in pieces:
            slices[server].append(Slice(number, start, stop))
            loads[server] += (stop - start) * DTYPES[variable.dtype].itemsize
    return slices


def _pack(group: Group, tensors: Sequence[Tensor | None]) -> Tensor:
    pieces = []
    for number, start, stop in group.slices:
        tensor = tensors[number]
        if tensor is not None:
            pieces.append(tensor if group.whole else tensor.reshape(-1)[start:stop])
    # one tensor would come back as it is; what is sent must not change while it is under way
    flat = _flatten(pieces) if len(pieces) > 1 else pieces[0].detach().reshape(-1).clone()
    if flat.numel() != group.size or flat.dtype != group.dtype:
        raise ClusterError(
            f"{flat.numel()} elements of {flat.dtype} were given for variables of {group.size} of {group.dtype}: give "
            "tensors of the variables' shapes and dtypes"
        )
    return flat


def _unpack(group: Group, flat: Tensor, into: Sequence[Tensor]) -> None:
    if group.whole:
        targets = [into[piece.variable] for piece in group.slices]
        _foreach_copy_(targets, _unflatten(flat, targets))
        return
    pieces = flat.split_with_sizes([piece.stop - piece.start for piece in group.slices])
    for (number, start, stop), piece in zip(group.slices, pieces, strict=True):
        variable = into[number]
        if variable.is_contiguous():
            variable.view(-1)[start:stop] = piece
        else:  # such as channels last: its elements do not lie in their order
            values = variable.reshape(-1)
            values[start:stop] = piece
            variable.copy_(values.view(variable.shape))
