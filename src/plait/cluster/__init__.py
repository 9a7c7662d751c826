"""Several processes as one: roles, collective training, parameter servers, launching."""

from __future__ import annotations

from plait.cluster.embedding import SparseEmbedding
from plait.cluster.roles import Role, find_role
from plait.cluster.settings import Distributed
from plait.engine.strategy import Strategy, set_default_strategy

__all__ = ["Distributed", "Role", "SparseEmbedding", "find_role"]


def _from_environment(replicas_to_aggregate: int | None = None) -> Strategy:
    from plait.cluster.connect import from_environment  # noqa: PLC0415 - when a model is compiled, not before

    return from_environment(replicas_to_aggregate)


set_default_strategy(_from_environment)
