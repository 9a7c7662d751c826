"""Door `plait.mox`: MoXing's `run` and what goes with it."""

from __future__ import annotations

from plait.engine.evaluation_hooks import (
    AggregativeSessionRunHook,
    EarlyStoppingHook,
    FeedSessionRunHook,
    LogEvaluationMetricHook,
    PlateauLREarlyStoppingHook,
)
from plait.engine.op import placeholder
from plait.mox import file
from plait.mox.flags import get_flag, get_help, set_flag
from plait.mox.run import run
from plait.mox.spec import ExportKeys, ExportSpec, ModeKeys, ModelSpec
from plait.optim import schedules as learning_rate_scheduler
from plait.optim.factories import get_optimizer_fn
from plait.optim.wrappers import get_optimizer_wrapper_fn
from plait.variables.scope import GraphKeys, get_collection, var_scope

__all__ = [
    "AggregativeSessionRunHook",
    "EarlyStoppingHook",
    "ExportKeys",
    "ExportSpec",
    "FeedSessionRunHook",
    "GraphKeys",
    "LogEvaluationMetricHook",
    "ModeKeys",
    "ModelSpec",
    "PlateauLREarlyStoppingHook",
    "file",
    "get_collection",
    "get_flag",
    "get_help",
    "get_optimizer_fn",
    "get_optimizer_wrapper_fn",
    "learning_rate_scheduler",
    "placeholder",
    "run",
    "set_flag",
    "var_scope",
]
