"""Embeddings whose rows are on servers: a lookup in the forward pass, its gradients after the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.cluster.embedding import Gradients, Rows, SparseEmbedding
from plait.cluster.ps.spec import TableSpec
from plait.data.sample import Sample
from plait.data.sources import Source
from plait.errors import ConfigError
from plait.variables.store import variable_name

__all__ = ["AheadSource", "Embedding", "Lookup", "Tables", "described", "replace_embeddings", "sparse_embeddings"]

Embedding: TypeAlias = "nn.Embedding | nn.EmbeddingBag | SparseEmbedding"


_MOST_ASKED = 64
"""Questions of a table whose answers nobody has taken; more are of calls that were never made."""


class Tables(Protocol):
    """Who gives the rows."""

    gradients: Gradients

    def ask(self, table: int, ids: Tensor, *, create: bool) -> None: ...

    def pull(self, table: int, ids: Tensor, *, create: bool) -> Tensor: ...


class Lookup:
    """The forward pass of an embedding whose rows are elsewhere."""

    def __init__(self, module: Embedding, table: int, tables: Tables) -> None:
        self.module = module
        self.table = table
        self._tables = tables
        self._asked: dict[int, tuple[Tensor, Tensor]] = {}
        """Ids that were asked for, as they were given and as they were sent."""

    def ask(self, ids: Tensor) -> None:
        """The same ids will be looked up: who has many tables need not wait for each by itself."""
        if len(self._asked) >= _MOST_ASKED:
            self._asked.clear()
        flat = _flat(ids)
        self._asked[id(ids)] = ids, flat
        self._tables.ask(self.table, flat, create=self._trains())

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self.module.weight.requires_grad

    def rows(self, ids: Tensor) -> Tensor:
        """[n, dim] for n ids; they take part in the backward pass if the weight does."""
        asked, trains = self._asked.pop(id(ids), None), self._trains()
        flat = _flat(ids) if asked is None else asked[1]
        rows = self._tables.pull(self.table, flat, create=trains).to(self.module.weight.device)
        if not trains:
            return rows
        found: Tensor = Rows.apply(self.module.weight, rows, flat, self.table, self._tables.gradients)  # type: ignore[no-untyped-call] # torch leaves it unannotated
        padding = self.module.padding_idx
        if padding is None:
            return found
        return torch.where((flat == padding)[:, None].to(rows.device), rows, found)  # that row is not trained


def _flat(ids: Tensor) -> Tensor:
    return ids.reshape(-1).to(device="cpu", dtype=torch.int64)


class EmbeddingLookup(Lookup):
    def __call__(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        return rows.view(*ids.shape, rows.shape[1])


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


def replace_embeddings(model: nn.Module, tables: Tables) -> dict[str, Embedding]:
    """Let every embedding with `sparse=True` look its rows up in `tables`; returns them by their paths, in order."""
    found = sparse_embeddings(model)
    for number, module in enumerate(found.values()):
        kind = BagLookup if isinstance(module, nn.EmbeddingBag) else EmbeddingLookup
        module.forward = kind(module, number, tables)  # type: ignore[method-assign] # only this object's
    return found


def sparse_embeddings(model: nn.Module) -> dict[str, Embedding]:
    """The embeddings whose gradients are rows, by their paths."""
    found: dict[str, Embedding] = {}
    for path, module in model.named_modules():
        if isinstance(module, SparseEmbedding):
            found[path] = module
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not module.sparse:
            continue
        if isinstance(module, nn.EmbeddingBag) and module.padding_idx is not None:
            raise ConfigError(f"EmbeddingBag {path!r} has a padding_idx, which servers do not know: leave it out")
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise ConfigError(
                f"embedding {path!r} has max_norm or scale_grad_by_freq, which servers do not know: leave them out"
            )
        found[path] = module
    return found


def described(path: str, module: Embedding, optimizer: int | None) -> TableSpec:
    """The table of an embedding, as those are told who hold it."""
    name = variable_name(f"{path}.weight")
    if isinstance(module, SparseEmbedding):
        return module.table(name, optimizer)
    rows, dim = module.weight.shape
    dtype = str(module.weight.dtype).removeprefix("torch.")
    return TableSpec(name=name, dim=dim, dtype=dtype, rows=rows, optimizer=optimizer)


class AheadSource:
    """Reads one batch ahead, and says so: what the next step needs can then be asked for while this one computes."""

    def __init__(self, source: Source, announce: Callable[[Sample], None]) -> None:
        self.source = source
        self.num_epochs = source.num_epochs
        self.batch_size = source.batch_size
        self.seekable = source.seekable
        self.read_in_step = True
        """It is not read by a thread ahead of the steps: who is told asks servers, as the steps do."""
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
