"""Several processes as one: roles, collective training, parameter servers, launching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.cluster.roles import Role, find_role
from plait.cluster.settings import Distributed
from plait.engine.strategy import Strategy, set_default_strategy

if TYPE_CHECKING:
    from plait.cluster.embedding import SparseEmbedding

__all__ = ["Distributed", "Role", "SparseEmbedding", "find_role"]


def __getattr__(name: str) -> Any:
    """`SparseEmbedding` brings tables and their rules: it is imported by those who use it."""
    if name == "SparseEmbedding":
        from plait.cluster.embedding import SparseEmbedding  # noqa: PLC0415 - see above

        return SparseEmbedding
    raise AttributeError(f"module 'plait.cluster' has no attribute {name!r}")


def _from_environment(replicas_to_aggregate: int | None = None) -> Strategy:
    from plait.cluster.connect import from_environment  # noqa: PLC0415 - when a model is compiled, not before

    return from_environment(replicas_to_aggregate)


set_default_strategy(_from_environment)
