"""Geo mode: a worker moves its own variables, and now and then sends how far, and takes what all have made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Drift"]


class Drift:
    """How far variables, and rows of embeddings, are from where the servers last had them."""

    def __init__(self, variables: Sequence[Tensor], weights: Sequence[Tensor], workers: int) -> None:
        self._variables, self._weights, self._workers = variables, weights, workers
        self._old = [variable.detach().clone() for variable in variables]
        self._old_rows = [weight.detach().clone() for weight in weights]
        self._touched: list[list[Tensor]] = [[] for _ in weights]

    def note(self) -> None:
        """After a backward pass: remember which rows the optimizers will move."""
        for weight, touched in zip(self._weights, self._touched, strict=True):
            if weight.grad is not None and weight.grad.is_sparse:
                touched.append(weight.grad._indices().view(-1).cpu())  # noqa: SLF001 - without sorting them

    @torch.no_grad()
    def taken(self) -> tuple[list[Tensor], dict[int, tuple[Tensor, Tensor]]]:
        """The worker's share of the way gone since the last time: of variables, and of rows by table."""
        deltas = []
        for variable, old in zip(self._variables, self._old, strict=True):
            delta = (variable - old) / self._workers
            old.add_(delta)
            deltas.append(delta)
        rows = {}
        for table, (weight, old, touched) in enumerate(zip(self._weights, self._old_rows, self._touched, strict=True)):
            ids = torch.unique(torch.cat(touched)) if touched else torch.empty(0, dtype=torch.int64)
            touched.clear()
            delta = (weight[ids] - old[ids]) / self._workers
            old.index_add_(0, ids.to(old.device), delta)
            rows[table] = (ids, delta)
        return deltas, rows

    @torch.no_grad()
    def given(self, values: Sequence[Tensor], rows: dict[int, tuple[Tensor, Tensor]]) -> None:
        """What the servers have now: this worker's variables move by the difference."""
        for variable, old, value in zip(self._variables, self._old, values, strict=True):
            variable.add_(value - old)
            old.copy_(value)
        for table, (ids, found) in rows.items():
            weight, old = self._weights[table], self._old_rows[table]
            moved = found.to(weight.device)
            weight.index_add_(0, ids.to(weight.device), moved - old[ids])
            old[ids] = moved

    @torch.no_grad()
    def begin(self) -> None:
        """The variables are the servers': nothing has been moved yet."""
        for variable, old in zip(self._variables, self._old, strict=True):
            old.copy_(variable)
        for weight, old, touched in zip(self._weights, self._old_rows, self._touched, strict=True):
            old.copy_(weight)
            touched.clear()
