"""Embeddings whose rows are on servers: a lookup in the forward pass, its gradients after the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.data.sample import Sample
from plait.data.sources import Source
from plait.errors import ConfigError

__all__ = ["AheadSource", "Gradients", "Lookup", "replace_embeddings", "sparse_embeddings"]

Pull = Callable[[int, Tensor], Tensor]
"""The rows of a table for 1-D ids."""


class Gradients:
    """What a backward pass left for each table: ids and their rows of gradients."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def add(self, table: int, ids: Tensor, rows: Tensor) -> None:
        self._found.setdefault(table, []).append((ids, rows))

    def take(self, scale: float) -> dict[int, tuple[Tensor, Tensor]]:
        """All of it, times `scale`; nothing is left."""
        found, self._found = self._found, {}
        taken = {}
        for table, parts in found.items():
            ids, rows = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
            taken[table] = (ids, rows * scale if scale != 1 else rows)
        return taken


class _Rows(torch.autograd.Function):
    """Rows as the result of a lookup in `weight`; their gradient goes to a `Gradients`, not into the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, ids: Tensor, table: int, gradients: Gradients) -> Tensor:
        del weight
        ctx.found = (table, ids, gradients)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        table, ids, gradients = ctx.found
        gradients.add(table, ids, outputs[0].contiguous())
        return None, None, None, None, None


class Tables(Protocol):
    """Who gives the rows."""

    gradients: Gradients

    def pull(self, table: int, ids: Tensor, *, create: bool) -> Tensor: ...


class Lookup:
    """The forward pass of an embedding whose rows are elsewhere."""

    def __init__(self, module: nn.Embedding | nn.EmbeddingBag, table: int, tables: Tables) -> None:
        self.module = module
        self.table = table
        self._tables = tables

    def rows(self, ids: Tensor) -> Tensor:
        """[n, dim] for n ids; they take part in the backward pass if the weight does."""
        flat = ids.reshape(-1).to(device="cpu", dtype=torch.int64)
        trains = torch.is_grad_enabled() and self.module.weight.requires_grad
        rows = self._tables.pull(self.table, flat, create=trains).to(self.module.weight.device)
        if not trains:
            return rows
        found: Tensor = _Rows.apply(self.module.weight, rows, flat, self.table, self._tables.gradients)  # type: ignore[no-untyped-call] # torch leaves it unannotated
        padding = self.module.padding_idx
        return found if padding is None else found.masked_fill((flat == padding)[:, None].to(found.device), 0.0)


class EmbeddingLookup(Lookup):
    def __call__(self, ids: Tensor) -> Tensor:
        return self.rows(ids).view(*ids.shape, -1)


class BagLookup(Lookup):
    def __call__(
        self,
        input: Tensor,  # noqa: A002 - torch's name
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        module: Any = self.module
        rows = self.rows(input)
        places = torch.arange(len(rows), device=rows.device).view(input.shape)
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=module.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
        )


def replace_embeddings(model: nn.Module, tables: Tables) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Let every embedding with `sparse=True` look its rows up in `tables`; returns them by their paths, in order."""
    found = sparse_embeddings(model)
    for number, module in enumerate(found.values()):
        kind = EmbeddingLookup if isinstance(module, nn.Embedding) else BagLookup
        module.forward = kind(module, number, tables)  # type: ignore[assignment] # only this object's
    return found


def sparse_embeddings(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The embeddings whose gradients are rows, by their paths."""
    found: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not module.sparse:
            continue
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise ConfigError(
                f"embedding {path!r} has max_norm or scale_grad_by_freq, which servers do not know: leave them out"
            )
        found[path] = module
    return found


class AheadSource:
    """Reads one batch ahead, and says so: what the next step needs can then be asked for while this one computes."""

    def __init__(self, source: Source, announce: Callable[[Sample], None]) -> None:
        self.source = source
        self.num_epochs = source.num_epochs
        self.batch_size = source.batch_size
        self.seekable = source.seekable
        self._announce = announce

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        batches = self.source.batches(epoch, start)
        ready: list[Sample] = []
        for batch in batches:
            sample = Sample.of(batch)
            if ready:
                self._announce(sample)
                yield ready.pop()
            ready.append(sample)
        yield from ready

    def fingerprint(self) -> dict[str, Any]:
        return self.source.fingerprint()
