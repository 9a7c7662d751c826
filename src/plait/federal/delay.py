"""Staleness: a follower goes on with its next forward pass while gradients travel, and moves its variables a step late.

Always by exactly one step, so that a run can be repeated. At checkpoints and at the end of a stage nothing is left to
come: both are part of the schedule, and steps say when.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.errors import FunctionError

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["Delay", "keeping_variables"]


class Delay:
    """The updates of one model, each made after the next step's forward pass."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._pending: Callable[[], None] | None = None

    def wrap(self) -> None:
        """Let every task's update come a step late."""
        for task, ops in self._model.train_ops.items():
            if task in self._model.assignments:
                ops[0].fn = self._later(task, ops[0].fn)

    def _later(self, task: str | None, update: Callable[[Any], None]) -> Callable[[Any], None]:
        optimizers, step = list(self._model.assignments[task]), self._model.global_step

        def apply(loss: Tensor) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            update(loss)
            step.value -= 1  # it was counted when its forward pass was made

        def later(loss: Tensor) -> None:
            due, self._pending = self._pending, functools.partial(apply, loss)
            step.value += 1
            if due is not None:
                due()

        return later

    def drain(self) -> None:
        """Make the update that is still to come."""
        due, self._pending = self._pending, None
        if due is not None:
            due()

    def drop(self) -> None:
        self._pending = None


def keeping_variables() -> torch.autograd.graph.saved_tensors_hooks:
    """A forward pass in here goes back with the variables that it had, whatever they are by then."""
    return torch.autograd.graph.saved_tensors_hooks(_keep, _kept)


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    base = tensor._base if tensor._base is not None else tensor  # noqa: SLF001 - the only way from a view
    kept = tensor.detach().clone() if base.is_leaf and base.requires_grad else tensor.detach()
    return kept, kept._version  # noqa: SLF001 - autograd looks at it, too, where nobody keeps tensors for it


def _kept(kept: tuple[Tensor, int]) -> Tensor:
    tensor, version = kept
    if tensor._version != version:  # noqa: SLF001 - same
        raise FunctionError(
            f"a tensor of shape {list(tensor.shape)} that the backward pass needs was changed in place after it was "
            "used: change a clone() of it"
        )
    return tensor
