"""What settings do to a model, whatever the strategy: precision before the build, recompute after it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from plait.cluster.settings import Distributed

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["after_build", "before_build"]


def before_build(model: Model, settings: Distributed) -> None:
    """Compute in the precision that was asked for."""
    if settings.precision is not None:
        model.config = dataclasses.replace(model.config, precision=settings.precision)


def after_build(model: Model, settings: Distributed) -> None:
    """Variables exist: modules that are to be computed again can be found by their scopes."""
    if settings.recompute:
        from plait.cluster.recompute import recompute  # noqa: PLC0415 - few need it

        recompute(model, settings.recompute)
