"""Tables of rows, one for each column, that lie behind each other in memory: one lookup serves many columns."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.data.recycling import Recycled
from plait.feature_column.rows import added, fetched, followed, joined

__all__ = ["Stack", "Table"]

_trains = operator.attrgetter("requires_grad")


class Table(nn.EmbeddingBag):
    """The rows of a column: an EmbeddingBag, as parameter servers look for; its variable has TensorFlow's name."""

    def __init__(
        self, rows: int, dim: int, variable: str, fill: Callable[[Tensor], Any], *, trainable: bool, sparse: bool
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = rows, dim
        self.max_norm, self.norm_type, self.scale_grad_by_freq = None, 2.0, False
        self.mode, self.include_last_offset, self.padding_idx = "sum", True, None
        self.sparse = sparse
        self.variable = variable
        value = torch.zeros(rows, dim)
        with torch.no_grad():
            fill(value)
        self.register_parameter(variable, nn.Parameter(value, requires_grad=trainable))

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override] # the same, under another name
        found = self._parameters[self.variable]
        assert found is not None  # noqa: S101 - the constructor made it
        return found


class Stack:
    """Tables of one width, whose memory is one piece. Each stays a variable with its own name and optimizer."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        self.sizes = [table.num_embeddings for table in tables]
        self._parameters = [table._parameters for table in tables]  # noqa: SLF001 - ours
        self._names = [table.variable for table in tables]
        self._whole: Tensor | None = None
        self._near = True
        self._weights: list[Any] = []
        self._starts: list[int] = []
        """At which byte of the whole the rows of each variable begin."""
        self._places: list[int] = []
        """Where in memory that was when it was last looked at."""
        self._joined: Tensor | None = None
        self._trained: list[bool] = []
        self._memory = Recycled(1)
        """Of the gradient: fresh memory of its size costs more than to fill it with zeros."""
        self.pack()

    def __getstate__(self) -> dict[str, Any]:
        # a tensor with a history has no copy, and a copy is elsewhere in memory
        return {**self.__dict__, "_joined": None, "_places": [], "_memory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _memory=Recycled(1))

    def pack(self) -> None:
        """Move the tables behind each other, if they are not; their variables stay what they are."""
        if self._whole is not None and self._current()[1] is not None:
            return
        weights = [table.weight for table in self.tables]
        self._whole = self._joined = None
        self._places = []
        if all(type(weight) is nn.Parameter for weight in weights) and len({one.device for one in weights}) == 1:
            self._whole = torch.cat([weight.detach() for weight in weights])
            for weight, part in zip(weights, self._whole.split_with_sizes(self.sizes), strict=True):
                weight.data = part
        self._weights = weights
        self._near = weights[0].device.type == "cpu"
        self._starts = [*itertools.accumulate((weight.nbytes for weight in weights[:-1]), initial=0)]

    def look_up(self, ids: Tensor, offsets: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """The sums of the rows of ids between offsets, or of those in each row of ids ([n, k])."""
        weights, whole = self._current()
        weighed = scale is not None and scale.requires_grad  # whose gradient is of the rows as they are now
        if whole is None or weighed:
            return _sums(_cat(weights), ids, offsets, scale)
        rows = self._with_history(weights, whole)
        if not rows.requires_grad:
            return _sums(rows, ids, offsets, scale)
        sums: Tensor = _Sums.apply(rows, ids, offsets, scale, self._memory)  # type: ignore[no-untyped-call] # torch's
        return sums

    def side_by_side(self, ids: Sequence[Tensor], starts: Tensor, sizes: Tensor) -> Tensor | None:
        """The rows of each example's ids, one of each column whose table starts there: [batch, columns * width].

        None if an id is outside of its table.
        """
        weights, whole = self._current()
        if whole is None or not self._near:
            places = joined(ids, starts, sizes)
            rows = _cat(weights) if whole is None else self._with_history(weights, whole)
            return None if places is None else rows.index_select(0, places.view(-1)).view(places.size(0), -1)
        rows = self._with_history(weights, whole)
        if rows.requires_grad:
            found: Tensor | None = _SideBySide.apply(rows, whole, ids, starts, sizes, self._memory)  # type: ignore[no-untyped-call] # torch's
            return found
        both = fetched(whole, ids, starts, sizes)
        return None if both is None else both[0]

    def _current(self) -> tuple[list[Any], Tensor | None]:
        """The variables, and all rows in one tensor if they are still there: others may have moved or replaced them."""
        weights: list[Any] = [*map(operator.getitem, self._parameters, self._names)]
        if self._whole is None or followed() or not all(map(operator.is_, weights, self._weights)):
            return weights, None
        places = [*map(Tensor.data_ptr, weights)]
        if places != self._places:
            start = self._whole.data_ptr()
            if [place - start for place in places] != self._starts:
                return weights, None
            self._places = places  # the whole has moved, into shared memory
        return weights, self._whole

    def _with_history(self, weights: list[Any], whole: Tensor) -> Tensor:
        """The rows, whose gradient goes to the variables, if they are to have one.

        On the CPU this is made once: it costs more than the rest of a lookup. On a GPU a node of autograd's graph
        belongs to the stream that it was made on.
        """
        if not torch.is_grad_enabled():
            return whole
        trained = [*map(_trains, weights)]
        if self._joined is None or self._trained != trained or not self._near:
            self._joined = _Joined.apply(whole, self.sizes, *weights)  # type: ignore[no-untyped-call] # torch's
            self._trained = trained
        return self._joined


def _cat(weights: list[Any]) -> Tensor:
    return torch.cat(weights) if len(weights) > 1 else weights[0]


def _sums(rows: Tensor, ids: Tensor, offsets: Tensor | None, scale: Tensor | None) -> Tensor:
    return functional.embedding_bag(
        ids, rows, offsets, mode="sum", per_sample_weights=scale, include_last_offset=offsets is not None
    )


class _Joined(torch.autograd.Function):
    """Tables that lie behind each other as one. It keeps nothing for its backward pass, so that it may have many."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, sizes: list[int], *weights: Tensor) -> Tensor:
        del weights
        ctx.sizes = sizes
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (None, None, *gradient.split_with_sizes(ctx.sizes))


class _SideBySide(torch.autograd.Function):
    """`fetched` with a history."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, whole: Tensor, ids: Sequence[Tensor], starts: Tensor, sizes: Tensor, memory: Recycled
    ) -> Tensor | None:
        del rows
        both = fetched(whole, ids, starts, sizes)
        if both is None:
            return None
        found, places = both
        ctx.save_for_backward(places)
        ctx.shape, ctx.memory = whole.shape, memory
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        rows = gradient.reshape(-1, ctx.shape[1])
        return added(ctx.shape, places, rows, ctx.memory), None, None, None, None, None


class _Sums(torch.autograd.Function):
    """Sums of rows; torch's own backward pass of them takes many times as long."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ids: Tensor, offsets: Tensor | None, scale: Tensor | None, memory: Recycled
    ) -> Tensor:
        ctx.save_for_backward(ids, offsets, scale)
        ctx.shape, ctx.memory = rows.shape, memory
        return _sums(rows.detach(), ids, offsets, scale)  # for which torch prepares no backward pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ids, offsets, scale = ctx.saved_tensors
        width = ctx.shape[1]
        if offsets is None:
            rows = gradient[:, None].expand(*ids.shape, width).reshape(-1, width)
        else:
            bags = torch.arange(len(offsets) - 1, device=ids.device)
            rows = gradient.index_select(0, torch.repeat_interleave(bags, offsets.diff()))
            rows = rows if scale is None else rows * scale[:, None]
        return added(ctx.shape, ids.view(-1, 1), rows, ctx.memory), None, None, None, None
