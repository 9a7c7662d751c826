"""Places in tables and the rows that are there, for many columns at once.

Loops in C do it where they were built (`_rows.c`), and torch's operators elsewhere, with the same numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.data.recycling import Recycled
from plait.data.sources import on_one_device

try:
    from plait.feature_column import _rows as loops
except ImportError:  # there was no compiler
    loops = None  # type: ignore[assignment] # whoever uses them asks first

__all__ = ["added", "fetched", "followed", "joined"]

_MANY = 1 << 16
"""With more places, torch's threads do more than a loop."""
_on_cpu = operator.attrgetter("is_cpu")


def followed() -> bool:
    """Whether the compiler, torch.func or a mode of its own looks at each operation: it would not see a loop."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()  # noqa: SLF001 - torch's own Functions ask so
        or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001 - same
    )


def joined(ids: Sequence[Tensor], starts: Tensor, sizes: Tensor) -> Tensor | None:
    """Where each column's table starts, and its ids added: [batch, columns]. None if an id is outside of its table.

    The ids are int64, one an example, in tensors of one shape.
    """
    places = torch.stack(on_one_device(ids), 1).view(-1, len(ids)).to(starts.device)
    low, high = places.aminmax(dim=0)
    return None if bool(((low < 0) | (high >= sizes)).any()) else places.add_(starts)


def fetched(table: Tensor, ids: Sequence[Tensor], starts: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor] | None:
    """The rows of each example's ids side by side, [batch, columns * width], and their places, as `joined` has them.

    The table is on the CPU, its rows have no history, and nobody has `followed` this.
    """
    batch, columns, width = ids[0].numel(), len(ids), table.shape[1]
    few = batch * columns <= _MANY or torch.get_num_threads() == 1
    if few and loops is not None and all(map(_on_cpu, ids)):
        found, places = table.new_empty((batch, columns * width)), starts.new_empty((batch, columns))
        given = [*map(Tensor.data_ptr, ids)], [*map(Tensor.stride, ids)], starts.data_ptr(), sizes.data_ptr()
        rows = found.data_ptr(), places.data_ptr(), table.data_ptr(), width * table.itemsize
        return (found, places) if loops.fetch(*rows, *given, batch) else None
    places_ = joined(ids, starts, sizes)
    return None if places_ is None else (table.index_select(0, places_.view(-1)).view(batch, -1), places_)


def added(shape: Sequence[int], places: Tensor, rows: Tensor, memory: Recycled) -> Tensor:
    """Zeros, and each row added at its place, in this order."""
    lines = rows.contiguous()
    where = _where(lines, places) if lines.shape == (len(places), shape[1]) else 0
    if loops is not None and where:
        sums = memory.empty(shape, rows.dtype)
        doubles = rows.dtype is torch.float64
        if loops.add(sums.data_ptr(), shape[0], places.data_ptr(), len(places), where, shape[1], doubles):
            return sums
    return rows.new_zeros(shape).index_add_(0, places, rows)  # which says what is outside


def _where(rows: Tensor, places: Tensor) -> int:
    """The address of contiguous rows if a loop can add them up, else 0."""
    if rows.dtype not in (torch.float32, torch.float64) or places.dtype is not torch.int64 or not rows.is_cpu:
        return 0
    if not places.is_contiguous() or rows.is_neg() or torch.is_grad_enabled() or followed():
        return 0
    try:
        return rows.data_ptr()  # 0 of zeros that have no memory
    except RuntimeError:  # many gradients as one
        return 0
