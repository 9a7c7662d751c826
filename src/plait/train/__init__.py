"""Door `plait.train`: monitored sessions, hooks and Estimators, with TensorFlow 1's names and meaning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from plait.engine.hooks import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from plait.engine.monitored import MonitoredSession
from plait.engine.op import GlobalStep
from plait.engine.op import default_global_step as get_or_create_global_step
from plait.engine.ready_hooks import (
    CheckpointSaverHook,
    FeedFnHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    NanTensorHook,
    ProfilerHook,
    SecondOrStepTimer,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from plait.engine.stage import Stage
from plait.engine.sync_replicas import SyncReplicasOptimizer
from plait.engine.training_session import MonitoredTrainingSession, Saver
from plait.errors import NanLossError as NanLossDuringTrainingError

if TYPE_CHECKING:
    from plait.train.canned import (
        DNNClassifier,
        DNNLinearCombinedClassifier,
        DNNLinearCombinedRegressor,
        DNNRegressor,
        LinearClassifier,
        LinearRegressor,
    )
    from plait.train.config import EvalSpec, RunConfig, TrainSpec, VocabInfo, WarmStartSettings
    from plait.train.estimator import Estimator
    from plait.train.evaluating import train_and_evaluate
    from plait.train.exporting import (
        BestExporter,
        FinalExporter,
        LatestExporter,
        ServingInputReceiver,
        build_raw_serving_input_receiver_fn,
    )
    from plait.train.heads import Reduction
    from plait.train.inputs import numpy_input_fn
    from plait.train.listeners import CheckpointSaverListener
    from plait.train.optimizers import (
        AdadeltaOptimizer,
        AdagradOptimizer,
        AdamOptimizer,
        FtrlOptimizer,
        GradientDescentOptimizer,
        MomentumOptimizer,
        Optimizer,
        RMSPropOptimizer,
    )
    from plait.train.program import get_global_step
    from plait.train.spec import EstimatorSpec, ModeKeys

__all__ = [
    "AdadeltaOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "BestExporter",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "DNNClassifier",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "FeedFnHook",
    "FinalExporter",
    "FinalOpsHook",
    "FtrlOptimizer",
    "GlobalStep",
    "GlobalStepWaiterHook",
    "GradientDescentOptimizer",
    "LatestExporter",
    "LinearClassifier",
    "LinearRegressor",
    "LoggingTensorHook",
    "ModeKeys",
    "MomentumOptimizer",
    "MonitoredSession",
    "MonitoredTrainingSession",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "Optimizer",
    "ProfilerHook",
    "RMSPropOptimizer",
    "Reduction",
    "RunConfig",
    "Saver",
    "SecondOrStepTimer",
    "ServingInputReceiver",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "Stage",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "SyncReplicasOptimizer",
    "TrainSpec",
    "VocabInfo",
    "WarmStartSettings",
    "build_raw_serving_input_receiver_fn",
    "get_global_step",
    "get_or_create_global_step",
    "numpy_input_fn",
    "train_and_evaluate",
]

_WHERE = {
    "canned": (
        "DNNClassifier",
        "DNNLinearCombinedClassifier",
        "DNNLinearCombinedRegressor",
        "DNNRegressor",
        "LinearClassifier",
        "LinearRegressor",
    ),
    "config": ("EvalSpec", "RunConfig", "TrainSpec", "VocabInfo", "WarmStartSettings"),
    "estimator": ("Estimator",),
    "evaluating": ("train_and_evaluate",),
    "exporting": (
        "BestExporter",
        "FinalExporter",
        "LatestExporter",
        "ServingInputReceiver",
        "build_raw_serving_input_receiver_fn",
    ),
    "heads": ("Reduction",),
    "inputs": ("numpy_input_fn",),
    "listeners": ("CheckpointSaverListener",),
    "optimizers": (
        "AdadeltaOptimizer",
        "AdagradOptimizer",
        "AdamOptimizer",
        "FtrlOptimizer",
        "GradientDescentOptimizer",
        "MomentumOptimizer",
        "Optimizer",
        "RMSPropOptimizer",
    ),
    "program": ("get_global_step",),
    "spec": ("EstimatorSpec", "ModeKeys"),
}
"""Where the names of Estimators are: imported when first used, for those who need none."""


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(importlib.import_module(f"plait.train.{module}"), name)
    raise AttributeError(f"module 'plait.train' has no attribute {name!r}")
