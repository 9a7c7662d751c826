"""What is done to a model whatever the strategy: its GPU and precision before the build, recompute after it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from plait.cluster.roles import Role
from plait.cluster.settings import Distributed

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["after_build", "before_build", "choose_gpu"]


def choose_gpu(role: Role) -> None:
    """Workers of a machine take its GPUs in turn."""
    if torch.cuda.is_available():
        torch.cuda.set_device(role.local_index % torch.cuda.device_count())


def before_build(model: Model, settings: Distributed) -> None:
    """Compute in the precision that was asked for."""
    if settings.precision is not None:
        model.config = dataclasses.replace(model.config, precision=settings.precision)


def after_build(model: Model, settings: Distributed) -> None:
    """Variables exist: modules that are to be computed again can be found by their scopes."""
    if settings.recompute:
        from plait.cluster.recompute import recompute  # noqa: PLC0415 - few need it

        recompute(model, settings.recompute)
