"""Door `plait.efl`: staged, multi-task and two-party training as in EFL's documents."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from plait.data import Sample
from plait.efl import framework, optimizer_fn, privacy, procedure_fn, stage
from plait.efl.export import export
from plait.engine import metrics
from plait.engine.model import Model
from plait.engine.stage import Stage
from plait.engine.task import MODE, TaskScope, current_task_scope, task_scope

if TYPE_CHECKING:
    from plait.federal.communicator import Communicator
    from plait.federal.model import FederalModel
    from plait.federal.settings import Party

__all__ = [
    "MODE",
    "Communicator",
    "FederalModel",
    "Model",
    "Party",
    "Sample",
    "Stage",
    "TaskScope",
    "current_task_scope",
    "export",
    "framework",
    "metrics",
    "optimizer_fn",
    "privacy",
    "procedure_fn",
    "stage",
    "task_scope",
]

_WHERE = {"Communicator": "communicator", "FederalModel": "model", "Party": "settings"}
"""Where a name of the federation is; it is imported when it is first used: most programs have one party."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'plait.efl' has no attribute {name!r}")
    return getattr(importlib.import_module(f"plait.federal.{_WHERE[name]}"), name)
