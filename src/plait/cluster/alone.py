"""One process that holds its own tables: what servers do for `SparseEmbedding`, without servers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.cluster.embedding import Gradients, SparseEmbedding
from plait.cluster.ps import rules, saving
from plait.cluster.ps.lookup import EmbeddingLookup
from plait.cluster.ps.shard import Push, Shard
from plait.cluster.ps.spec import ModelSpec, OptimizerSpec
from plait.cluster.settings import Distributed
from plait.cluster.transforms import after_build, before_build
from plait.engine.op import GlobalStep
from plait.engine.strategy import Local
from plait.engine.update import moved_by
from plait.errors import ConfigError
from plait.variables.store import variable_name

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["Alone"]

log = logging.getLogger("plait")


class Alone(Local):
    """One process. A model without a `SparseEmbedding` pays nothing for it."""

    def __init__(self, settings: Distributed | None = None) -> None:
        self.settings = settings or Distributed()
        super().__init__(self.settings.gradient_merge)
        self.gradients = Gradients()
        self._tables: dict[str, SparseEmbedding] = {}
        self._shard: Shard | None = None
        self._step: GlobalStep | None = None

    def begin(self, model: Model) -> None:
        before_build(model, self.settings)

    def transform(self, model: Model) -> None:
        after_build(model, self.settings)
        self._tables = {p: module for p, module in model.named_modules() if isinstance(module, SparseEmbedding)}
        for number, module in enumerate(self._tables.values()):
            module.forward = EmbeddingLookup(module, number, self)  # type: ignore[method-assign] # only this object's
        if self._tables and model.gradient.clip is not None:
            raise ConfigError("gradient_clip with a SparseEmbedding: its rows are not among the gradients that it sees")

    def prepare(self, model: Model) -> None:
        """Which optimizer moves which table is known now."""
        if not self._tables:
            return
        found: list[OptimizerSpec] = []
        numbers: dict[Tensor, int] = {}
        weights = {module.weight for module in self._tables.values()}
        for optimizer in model.optimizers():
            for number, group in enumerate(optimizer.param_groups):
                mine = [variable for variable in group["params"] if variable in weights]
                if mine:
                    numbers.update(dict.fromkeys(mine, len(found)))
                    found.append(rules.describe(optimizer)[number])
        tables = tuple(
            module.table(variable_name(f"{path}.weight"), numbers.get(module.weight))
            for path, module in self._tables.items()
        )
        self._shard = Shard(ModelSpec(optimizers=tuple(found), tables=tables), 0, 1)

    def ask(self, table: int, ids: Tensor, *, create: bool) -> None:
        """Nobody has to be asked: the rows are here."""

    def pull(self, table: int, ids: Tensor, *, create: bool) -> Tensor:
        assert self._shard is not None  # noqa: S101 - prepared with the model
        return self._shard.pull(table, ids, create=create)

    def mover(
        self, model: Model, task: str | None, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Callable[[], None] | None:
        del task
        if not self._tables:
            return None
        scale = 1.0 / (self.gradient_merge * model.gradient.loss_scale)
        moved = set(moved_by(list(optimizers)))
        weights = {module.weight for module in self._tables.values()}
        tables = {number for number, module in enumerate(self._tables.values()) if module.weight in moved}
        self._step = model.global_step

        def move() -> None:
            for optimizer in optimizers:
                optimizer.step()
            groups = [group for one in model.optimizers() for group in one.param_groups]
            rates = [float(group["lr"]) for group in groups if any(value in weights for value in group["params"])]
            if self._shard is not None:
                self._shard.apply([Push(None, [], self.gradients.take(scale, tables))], rates)

        return move

    def whole(self) -> bool:
        """Rows whose gradients are being merged are in no checkpoint."""
        merging = self._shard is not None and self._step is not None and self._step.value % self.gradient_merge
        return not merging

    def capture(self, model: Model, directory: str | None) -> dict[str, Any]:
        if self._shard is None or directory is None:
            return {}
        name = saving.name_of(model.global_step.value)
        self._shard.snapshot(copy=False)(Path(directory) / name)
        return {"servers": name}

    def durable(self, state: Mapping[str, Any], directory: str | None) -> bool:
        if state and directory is not None:
            saving.prune(directory)
        return True

    def restore(self, model: Model, state: Mapping[str, Any], directory: str | None) -> None:
        del model
        if self._shard is None and "servers" in state:
            log.warning("the checkpoint was made with servers, which had the optimizers' state: it begins anew here")
        elif self._shard is not None and directory is not None and "servers" in state:
            self._shard.load(Path(directory) / str(state["servers"]))
