"""Optimizers: which one moves which variables."""

from plait.optim.assign import Factory, optimizer_setter, scope_optimizer

__all__ = ["Factory", "optimizer_setter", "scope_optimizer"]
