"""Embeddings as rows that somebody else holds; `SparseEmbedding` has one for every id that was ever trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from plait.cluster.ps.spec import INITIALIZERS, TableSpec
from plait.cluster.ps.table import start_rows
from plait.errors import ConfigError

__all__ = ["Gradients", "Rows", "SparseEmbedding"]


class Gradients:
    """What a backward pass left for each table: ids and their rows of gradients."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def add(self, table: int, ids: Tensor, rows: Tensor) -> None:
        self._found.setdefault(table, []).append((ids, rows))

    def take(self, scale: float, tables: Collection[int] | None = None) -> dict[int, tuple[Tensor, Tensor]]:
        """All of it, or that of `tables`, times `scale`; nothing is left."""
        found, self._found = self._found, {}
        taken = {}
        for table, parts in found.items():
            if tables is not None and table not in tables:
                continue
            ids, rows = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
            rows = rows.cpu()  # as the tables are
            taken[table] = (ids, rows * scale if scale != 1 else rows)
        return taken


class Rows(torch.autograd.Function):
    """Rows as the result of a lookup in `weight`; their gradient goes to a `Gradients`, not into the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, ids: Tensor, table: int, gradients: Gradients) -> Tensor:
        del weight
        ctx.found = (table, ids, gradients)
        return rows.detach()  # not a view to autograd: the user may change what came in place

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        table, ids, gradients = ctx.found
        gradients.add(table, ids, outputs[0].contiguous())
        return None, None, None, None, None


class SparseEmbedding(nn.Module):
    """Rows of `dim` numbers for ids that are any int64; a row is made when training first asks for it.

    The rows are on the parameter servers; in one process, beside the model. A row begins with numbers that depend on
    (`seed`, the table's name, the id) alone: "zeros", "uniform" in ±`scale`, "normal" or "truncated_normal".

    >>> SparseEmbedding(4, initializer="zeros")(torch.tensor([[7, -1]])).shape
    torch.Size([1, 2, 4])
    """

    def __init__(
        self,
        dim: int,
        *,
        initializer: str = "normal",
        scale: float = 0.01,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim < 1 or initializer not in INITIALIZERS or scale < 0:
            raise ConfigError(
                f"SparseEmbedding(dim={dim}, initializer={initializer!r}, scale={scale}): write a dim from 1 on, a "
                f"scale from 0 up, and one of {', '.join(INITIALIZERS)}"
            )
        self.dim = dim
        self.initializer = {"kind": initializer, "scale": float(scale), "seed": seed}
        self.weight = nn.Parameter(torch.empty(0, dim, dtype=dtype))
        """Has no rows: it says which optimizer moves them."""
        self.padding_idx = None

    def table(self, name: str, optimizer: int | None = None) -> TableSpec:
        """How the table is described to those who hold it."""
        dtype = str(self.weight.dtype).removeprefix("torch.")
        return TableSpec(
            name=name, dim=self.dim, dtype=dtype, rows=None, optimizer=optimizer, initializer=self.initializer
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Rows as they begin: what holds the trained ones replaces this when the model is compiled."""
        flat = ids.reshape(-1).to(device="cpu", dtype=torch.int64)
        rows = start_rows(self.table("table"), flat.numpy()).to(self.weight.device)
        found: Tensor = Rows.apply(self.weight, rows, flat, 0, Gradients())  # type: ignore[no-untyped-call] # torch's
        return found.view(*ids.shape, self.dim)
