"""plait: train one model across tasks, machines and organisations, on PyTorch.

Doors to one engine: `plait.efl` (tasks, stages, procedures), `plait.mox` (`run` and five functions), `plait.openks`
(roles, algorithms, few-shot classes), `plait.train` (sessions, hooks, Estimator); beside them are
`plait.feature_column` and `plait.nn` (candidate sampling).
"""

from __future__ import annotations

from plait import cluster, data, efl, errors, feature_column, mox, nets, nn, openks, train
from plait.engine import metrics
from plait.engine.model import Model
from plait.engine.op import Op, op, placeholder
from plait.engine.session import Session
from plait.engine.settings import SessionConfig
from plait.variables.scope import GraphKeys, add_to_collection, get_collection, get_variable, layer, variable_scope
from plait.variables.store import AUTO_REUSE
from plait.version import __version__

__all__ = [
    "AUTO_REUSE",
    "GraphKeys",
    "Model",
    "Op",
    "Session",
    "SessionConfig",
    "__version__",
    "add_to_collection",
    "cluster",
    "data",
    "efl",
    "errors",
    "feature_column",
    "get_collection",
    "get_variable",
    "layer",
    "metrics",
    "mox",
    "nets",
    "nn",
    "op",
    "openks",
    "placeholder",
    "train",
    "variable_scope",
]
