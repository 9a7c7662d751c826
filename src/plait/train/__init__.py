"""Door `plait.train`: monitored sessions and hooks, with TensorFlow 1's names and meaning."""

from __future__ import annotations

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

__all__ = [
    "CheckpointSaverHook",
    "FeedFnHook",
    "FinalOpsHook",
    "GlobalStep",
    "GlobalStepWaiterHook",
    "LoggingTensorHook",
    "MonitoredSession",
    "MonitoredTrainingSession",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "ProfilerHook",
    "Saver",
    "SecondOrStepTimer",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "Stage",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "SyncReplicasOptimizer",
    "get_or_create_global_step",
]
