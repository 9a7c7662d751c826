"""Tables of rows, one for each column, that lie behind each other in memory: one lookup serves many columns."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from plait.data.recycling import Recycled

__all__ = ["Stack", "Table"]

_MANY = range(1 << 11, 1 << 20)
"""How many rows SciPy adds up, more quickly than torch; of more, what it wants beside them would be large to keep."""
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


def _followed() -> bool:
    """Whether the compiler, torch.func or a mode of its own looks at each operation: nothing is kept then."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()  # noqa: SLF001 - torch's own Functions ask so
        or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001 - same
    )


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

    def look_up(
        self, ids: Tensor, offsets: Tensor | None = None, scale: Tensor | None = None, *, summed: bool = True
    ) -> Tensor:
        """The sums of the rows of ids between offsets, or of those in each row of ids ([n, k]).

        Without `summed`, the rows of the latter side by side: [n, k * width].
        """
        weights, whole = self._current()
        weighed = scale is not None and scale.requires_grad  # whose gradient is of the rows as they are now
        if whole is None or weighed:
            joined = torch.cat(weights) if len(weights) > 1 else weights[0]
            return _looked_up(joined, ids, offsets, scale, summed)
        rows = self._with_history(weights, whole) if torch.is_grad_enabled() else whole
        if not summed and self._near:
            return _side_by_side(rows, whole, ids, self._memory)
        if not summed or not rows.requires_grad:
            return _looked_up(rows, ids, offsets, scale, summed)
        sums: Tensor = _Sums.apply(rows, ids, offsets, scale, self._memory)  # type: ignore[no-untyped-call] # torch's
        return sums

    def _current(self) -> tuple[list[Any], Tensor | None]:
        """The variables, and all rows in one tensor if they are still there: others may have moved or replaced them."""
        weights: list[Any] = [*map(operator.getitem, self._parameters, self._names)]
        if self._whole is None or _followed() or not all(map(operator.is_, weights, self._weights)):
            return weights, None
        places = [*map(Tensor.data_ptr, weights)]
        if places != self._places:
            start = self._whole.data_ptr()
            if [place - start for place in places] != self._starts:
                return weights, None
            self._places = places  # the whole has moved, into shared memory
        return weights, self._whole

    def _with_history(self, weights: list[Any], whole: Tensor) -> Tensor:
        """The rows, whose gradient goes to the variables.

        On the CPU this is made once: it costs more than the rest of a lookup. On a GPU a node of autograd's graph
        belongs to the stream that it was made on.
        """
        trained = [*map(_trains, weights)]
        if self._joined is None or self._trained != trained or not self._near:
            self._joined = _Joined.apply(whole, self.sizes, *weights)  # type: ignore[no-untyped-call] # torch's
            self._trained = trained
        return self._joined


def _looked_up(rows: Tensor, ids: Tensor, offsets: Tensor | None, scale: Tensor | None, summed: bool) -> Tensor:
    if not summed:
        return rows.index_select(0, ids.view(-1)).view(ids.size(0), -1)
    return functional.embedding_bag(
        ids, rows, offsets, mode="sum", per_sample_weights=scale, include_last_offset=offsets is not None
    )


def _side_by_side(rows: Tensor, whole: Tensor, ids: Tensor, memory: Recycled) -> Tensor:
    """On the CPU; `whole` is `rows` without a history."""
    if not rows.requires_grad:
        return _bags_of_one(whole, ids)
    found: Tensor = _SideBySide.apply(rows, whole, ids, memory)  # type: ignore[no-untyped-call] # torch's
    return found


def _bags_of_one(rows: Tensor, ids: Tensor) -> Tensor:
    """A bag of one is a copy of its row, and torch fetches the rows of bags ahead."""
    flat = ids.view(-1)
    return torch.embedding_bag(rows, flat, _numbers(flat.numel()), False, 0)[0].view(ids.size(0), -1)


@functools.lru_cache(4)
def _numbers(count: int) -> Tensor:
    with torch.inference_mode(False):  # it outlives the call, whatever mode that is in
        return torch.arange(count, device="cpu")


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
    """`_bags_of_one` with a history."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, whole: Tensor, ids: Tensor, memory: Recycled) -> Tensor:
        del rows
        ctx.save_for_backward(ids)
        ctx.shape, ctx.memory = whole.shape, memory
        return _bags_of_one(whole, ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        rows = gradient.reshape(-1, ctx.shape[1])
        return _added(ctx.shape, ids.view(-1), rows, ctx.memory), None, None, None


class _Sums(torch.autograd.Function):
    """Sums of rows; torch's own backward pass of them takes many times as long."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ids: Tensor, offsets: Tensor | None, scale: Tensor | None, memory: Recycled
    ) -> Tensor:
        ctx.save_for_backward(ids, offsets, scale)
        ctx.shape, ctx.memory = rows.shape, memory
        return _looked_up(rows.detach(), ids, offsets, scale, summed=True)  # for which torch prepares no backward pass

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
        return _added(ctx.shape, ids.view(-1), rows, ctx.memory), None, None, None, None


def _added(shape: Sequence[int], ids: Tensor, rows: Tensor, memory: Recycled) -> Tensor:
    """Zeros, and each row added at the place of its id, in this order; the ids are known to be inside.

    It is also a product with a matrix that has a one in each column, for which SciPy takes half the time of torch, and
    does not look at the ids.
    """
    product = _product() if _may_leave_torch(ids, rows) else None
    try:
        there = None if product is None else rows.numpy()
    except RuntimeError:  # many gradients as one, zeros without memory
        there = None
    if product is None or there is None:
        return rows.new_zeros(shape).index_add_(0, ids, rows)
    found = memory.empty(shape, rows.dtype).zero_()
    ones, starts = _ones(len(ids), there.dtype)
    product(shape[0], len(ids), shape[1], starts, ids.numpy(), ones, there.ravel(), found.numpy().ravel())
    return found


def _may_leave_torch(ids: Tensor, rows: Tensor) -> bool:
    near = rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64) and ids.dtype == torch.int64
    followed = torch.is_grad_enabled() or _followed()
    return near and not followed and len(rows) == len(ids) and len(ids) in _MANY


@functools.lru_cache(4)
def _ones(count: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The values of a matrix with a one in each column, and where those of each column begin."""
    return np.ones(count, dtype), np.arange(count + 1, dtype=np.int64)


@functools.cache
def _product() -> Callable[..., None] | None:
    """SciPy's loop behind the public product, which cannot add to memory that is there; tried out first, therefore."""
    rows, found = np.arange(6, dtype=np.float32), np.zeros(6, np.float32)
    try:
        from scipy.sparse._sparsetools import csc_matvecs  # noqa: PLC0415 - heavy

        ones, starts = _ones(3, rows.dtype)
        csc_matvecs(3, 3, 2, starts, np.array([2, 0, 2]), ones, rows, found)
    except (ImportError, TypeError, ValueError):
        return None
    return csc_matvecs if found.tolist() == [2, 3, 0, 0, 4, 6] else None
