"""`efl.optimizer_fn`: which optimizer moves which variables."""

from __future__ import annotations

from plait.engine.meta import inner_adam
from plait.optim.assign import optimizer_setter, scope_optimizer

__all__ = ["inner_adam", "optimizer_setter", "optimzier_setter", "scope_optimizer"]

optimzier_setter = optimizer_setter
"""The spelling of a heading in the document."""
