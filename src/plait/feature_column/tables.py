"""Tables of rows, one for each column, that lie behind each other in memory: one lookup serves many columns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Stack", "Table"]

_SMALL = 1 << 16
"""Numbers in tables that are joined for each lookup: to copy so few takes less time than a Function of ours."""
_LARGE = 1 << 18
"""Numbers in tables that no cache holds: bags of one, whose rows torch fetches ahead, are quicker there."""


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
        self._whole: Tensor | None = None
        self._entries: list[tuple[Mapping[str, Any], str, int]] = []
        """Where each variable is found, and at which byte of the whole its rows begin."""
        self.pack()

    def pack(self) -> None:
        """Move the tables behind each other, if they are not; their variables stay what they are."""
        if self._entries and self._current()[1] is not None:
            return
        weights = [table.weight for table in self.tables]
        self._whole = None
        if all(type(weight) is nn.Parameter for weight in weights) and len({one.device for one in weights}) == 1:
            self._whole = torch.cat([weight.detach() for weight in weights])
            for weight, part in zip(weights, self._whole.split_with_sizes(self.sizes), strict=True):
                weight.data = part
        starts = itertools.accumulate((weight.nbytes for weight in weights), initial=0)
        self._entries = [
            (table._parameters, table.variable, start)  # noqa: SLF001 - ours
            for table, start in zip(self.tables, starts, strict=False)
        ]

    def look_up(
        self, ids: Tensor, offsets: Tensor | None = None, scale: Tensor | None = None, *, summed: bool = True
    ) -> Tensor:
        """The sums of the rows of ids between offsets, or of those in each row of ids ([n, k]).

        Without `summed`, the rows of the latter side by side: [n, k * width].
        """
        weights, whole = self._current()
        if whole is not None and not torch.is_grad_enabled():
            return _looked_up(whole, ids, offsets, scale, summed)
        small = not summed and whole is not None and whole.numel() <= _SMALL
        if whole is None or small or (scale is not None and scale.requires_grad):
            joined = torch.cat(weights) if len(weights) > 1 else weights[0]
            return _looked_up(joined, ids, offsets, scale, summed)
        found: Tensor = _Lookup.apply(whole, ids, offsets, scale, summed, self.sizes, *weights)  # type: ignore[no-untyped-call] # torch's
        return found

    def _current(self) -> tuple[list[Any], Tensor | None]:
        """The variables, and all rows in one tensor if they are still there: others may have moved or replaced them."""
        weights: list[Any] = []
        whole = None if torch.compiler.is_compiling() else self._whole
        first = 0 if whole is None else whole.data_ptr()
        for parameters, name, start in self._entries:
            weight = parameters[name]
            weights.append(weight)
            if whole is not None and (type(weight) is not nn.Parameter or weight.data_ptr() != first + start):
                whole = None
        return weights, whole


def _looked_up(rows: Tensor, ids: Tensor, offsets: Tensor | None, scale: Tensor | None, summed: bool) -> Tensor:
    if offsets is None and not summed:
        if rows.numel() > _LARGE and rows.device.type == "cpu" and not rows.requires_grad:
            return functional.embedding_bag(ids.view(-1, 1), rows, mode="sum").view(len(ids), -1)
        return rows.index_select(0, ids.view(-1)).view(len(ids), ids.shape[1] * rows.shape[1])
    return functional.embedding_bag(
        ids, rows, offsets, mode="sum", per_sample_weights=scale, include_last_offset=offsets is not None
    )


class _Lookup(torch.autograd.Function):
    """`_looked_up` in tables that lie behind each other. One gradient is made for all, and each gets its part of it."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        ids: Tensor,
        offsets: Tensor | None,
        scale: Tensor | None,
        summed: bool,
        sizes: list[int],
        *weights: Tensor,
    ) -> Tensor:
        del weights
        ctx.save_for_backward(ids, offsets, scale)
        ctx.summed, ctx.sizes, ctx.shape = summed, sizes, whole.shape
        return _looked_up(whole, ids, offsets, scale, summed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ids, offsets, scale = ctx.saved_tensors
        width = ctx.shape[1]
        if offsets is not None:
            bags = torch.arange(len(offsets) - 1, device=ids.device)
            rows = gradient.index_select(0, torch.repeat_interleave(bags, offsets.diff()))
            rows = rows if scale is None else rows * scale[:, None]
        elif ctx.summed:
            rows = gradient[:, None].expand(*ids.shape, width).reshape(-1, width)
        else:
            rows = gradient.reshape(-1, width)
        whole = gradient.new_zeros(ctx.shape).index_add_(0, ids.view(-1), rows)
        return (None, None, None, None, None, None, *whole.unsafe_split_with_sizes(ctx.sizes))
