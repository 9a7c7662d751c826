"""Which training a checkpoint belongs to: one that was interrupted goes on, one that ended is followed by another."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.engine.model import Model
from plait.engine.report import log
from plait.engine.task import TaskScope
from plait.variables.checkpoint import CheckpointDir

__all__ = ["project_of", "where_of"]

_NAME = "estimator-"


def where_of(model: Model, directory: str | os.PathLike[str]) -> Path:
    """Where this worker's checkpoints are: workers that go their own ways have directories of their own."""
    strategy = model.strategy
    apart = strategy.worker_id > 0 and not strategy.in_step
    return Path(directory) / f"worker-{strategy.worker_id}" if apart else Path(directory)


def project_of(model: Model, directory: str | os.PathLike[str]) -> str:
    """The name of the journal to go on with.

    An interrupted training goes on at the very step and batch, if its input is the same. Else the weights are kept,
    and the input is read from its beginning.
    """
    tree = _newest(where_of(model, directory))
    number, goes_on = _number(tree), False
    if number and tree["journal"].get("running") is not None:
        goes_on = _same_inputs(model, tree)
        if not goes_on:
            log.warning("the training in %s was interrupted, and had another input: this one is read anew", directory)
    project = f"{_NAME}{number if goes_on else number + 1}"
    return str(model.strategy.tell(project)) if model.strategy.in_step else project


def _newest(directory: Path) -> Any:
    """The newest checkpoint without its tensors. It is only looked at: who goes on from it verifies it."""
    for info in reversed(CheckpointDir(directory).list()):
        try:
            return json.loads((info.path / "state.json").read_bytes())
        except (OSError, ValueError):
            continue
    return {}


def _number(tree: Mapping[str, Any]) -> int:
    name = str((tree.get("journal") or {}).get("project", ""))
    digits = name.removeprefix(_NAME)
    return int(digits) if name.startswith(_NAME) and digits.isdigit() else 0


def _same_inputs(model: Model, tree: Mapping[str, Any]) -> bool:
    strategy = model.strategy
    workers = tree.get("workers")
    if workers is not None and len(workers) != strategy.worker_num:
        return False
    own = workers[strategy.worker_id] if workers is not None else tree
    return all(_same(stream.source, own["streams"].get(_key(scope))) for scope, stream in model.streams.items())


def _same(source: Any, saved: Mapping[str, Any] | None) -> bool:
    return saved is not None and saved["fingerprint"] == json.loads(json.dumps(source.fingerprint()))


def _key(scope: TaskScope) -> str:
    """As the checkpoint has it."""
    return f"{scope.mode}:{scope.task or ''}"
