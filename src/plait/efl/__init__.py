"""Door `plait.efl`: staged, multi-task training as in EFL's documents."""

from __future__ import annotations

from plait.data import Sample
from plait.efl import framework, optimizer_fn, procedure_fn, stage
from plait.engine import metrics
from plait.engine.model import Model
from plait.engine.stage import Stage
from plait.engine.task import MODE, TaskScope, current_task_scope, task_scope

__all__ = [
    "MODE",
    "Model",
    "Sample",
    "Stage",
    "TaskScope",
    "current_task_scope",
    "framework",
    "metrics",
    "optimizer_fn",
    "procedure_fn",
    "stage",
    "task_scope",
]
