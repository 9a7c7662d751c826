"""Places in tables and the rows that are there, for many columns at once.

Loops in C do it where they were built (`_rows.c`), and torch's operators elsewhere, with the same numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.data.recycling import Recycled
from plait.data.sources import on_one_device

try:
    from plait.feature_column import _rows as loops
except ImportError:  # there was no compiler
    loops = None  # type: ignore[assignment] # whoever uses them asks first

__all__ = ["added", "alike", "fetched", "followed", "joined"]

_MANY = 1 << 16
"""To fetch more rows than that, torch's threads are quicker than a loop."""
_APART = 8
"""Between the places of two columns: where the batch is a power of two, they would share a line of the cache."""
_on_cpu = operator.attrgetter("is_cpu")


def followed() -> bool:
    """Whether a tracer, the compiler, torch.func or a mode of its own looks at each operation: it sees no loop."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()  # noqa: SLF001 - torch's own Functions ask so
        or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001 - same
        or torch._C._get_tracing_state() is not None  # noqa: SLF001 - as torch.jit.is_tracing() does
    )


def alike(ids: Sequence[Any]) -> bool:
    """Whether these are plain tensors of int64, all of one shape, with numbers in them: what `joined` takes."""
    whole, strided = torch.int64, torch.strided
    try:
        shape = ids[0].shape
        for one in ids:
            if type(one) is not Tensor or one.dtype is not whole or one.layout is not strided or one.shape != shape:
                return False
    except (AttributeError, RuntimeError):  # no tensors, or nested ones
        return False
    return bool(shape.numel() > 0)


def joined(ids: Sequence[Tensor], starts: Tensor, sizes: Tensor) -> Tensor | None:
    """Where each column's table starts, and its ids added: [batch, columns]. None if an id is outside of its table.

    The ids are `alike`, one an example.
    """
    try:
        places = torch.stack([*ids], 1)
    except RuntimeError:  # some of them are on a GPU
        places = torch.stack(on_one_device(ids), 1)
    places = places.view(-1, len(ids)).to(starts.device)
    low, high = places.aminmax()
    large = bool(high >= sizes.min()) and bool((places.amax(0) >= sizes).any())
    return None if large or bool(low < 0) else places.add_(starts)


def fetched(table: Tensor, ids: Sequence[Tensor], starts: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor] | None:
    """The rows of each example's ids side by side, [batch, columns * width], and their places, as `joined` has them.

    The table is on the CPU, its rows have no history, and nothing is `followed`.
    """
    batch, columns, width = ids[0].numel(), len(ids), table.shape[1]
    few = batch * columns <= _MANY or torch.get_num_threads() == 1
    where, there = [*map(Tensor.data_ptr, ids)], table.data_ptr()
    if few and loops is not None and all(map(_on_cpu, ids)) and all(where) and there:  # 0: it has no memory
        across = batch + _APART
        found = table.new_empty((batch, columns * width))
        places = starts.new_empty_strided((batch, columns), (1, across))
        rows = found.data_ptr(), places.data_ptr(), there, width * table.itemsize
        strides = None if all(map(Tensor.is_contiguous, ids)) else [one.stride(0) for one in ids]
        given = where, strides, starts.data_ptr(), sizes.data_ptr()
        return (found, places) if loops.fetch(*rows, *given, batch, across) else None
    joint = joined(ids, starts, sizes)
    if joint is None:
        return None
    each = torch.arange(joint.numel(), device="cpu")  # sums of one row: torch fetches rows ahead for sums alone
    return torch.embedding_bag(table, joint.view(-1), each, False, 0)[0].view(batch, -1), joint


def added(shape: Sequence[int], places: Tensor, rows: Tensor, memory: Recycled) -> Tensor:
    """Zeros, and each row ([n * k, width]) added at its place ([n, k]), in this order."""
    lines = rows.contiguous()
    where = _where(lines, places) if lines.shape == (places.numel(), shape[1]) else None
    if where is None:
        return rows.new_zeros(shape).index_add_(0, places.reshape(-1), rows)
    sums, doubles = memory.empty(shape, rows.dtype), rows.dtype is torch.float64
    given = *where, *places.shape, *places.stride(), doubles
    if loops is not None and loops.add(sums.data_ptr(), shape[0], shape[1], *given):
        return sums
    return sums.zero_().index_add_(0, places.reshape(-1), rows)  # which says what is outside


def _where(rows: Tensor, places: Tensor) -> tuple[int, int] | None:
    """The addresses of contiguous rows and of their places, if a loop can add them up."""
    plain = type(rows) is type(places) is Tensor
    if not plain or rows.dtype not in (torch.float32, torch.float64) or places.dtype is not torch.int64:
        return None
    if not (rows.is_cpu and places.is_cpu) or rows.is_neg() or torch.is_grad_enabled() or followed():
        return None
    try:
        found = rows.data_ptr(), places.data_ptr()
    except RuntimeError:  # many gradients as one
        return None
    return found if all(found) else None  # 0: zeros without memory
