"""Several processes as one: roles, collective training, parameter servers, launching."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from plait.cluster.settings import Distributed
from plait.engine.strategy import Strategy, set_default_strategy

if TYPE_CHECKING:
    from plait.cluster.embedding import SparseEmbedding
    from plait.cluster.roles import Role, find_role

__all__ = ["Distributed", "Role", "SparseEmbedding", "find_role"]


_WHERE = {"Role": "roles", "SparseEmbedding": "embedding", "find_role": "roles"}
"""Where a name is; it is imported when it is first used: most programs run in one process."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'plait.cluster' has no attribute {name!r}")
    return getattr(importlib.import_module(f"plait.cluster.{_WHERE[name]}"), name)


def _from_environment(replicas_to_aggregate: int | None = None) -> Strategy:
    from plait.cluster.connect import from_environment  # noqa: PLC0415 - when a model is compiled, not before

    return from_environment(replicas_to_aggregate)


set_default_strategy(_from_environment)
