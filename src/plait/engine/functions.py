"""The functions that users write, one Protocol each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from plait.data import Sample
from plait.engine.task import MODE

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["EvalFn", "InputFn", "LossFn", "OptimizerFn", "ProcedureFn", "StageFn"]


class InputFn(Protocol):
    """Where a task's data comes from; called once for TRAIN and, if the task evaluates, once for EVAL."""

    def __call__(self, model: Model, mode: MODE, /) -> Any:
        """Return a `Sample`, a source, a DataLoader, or any iterable of dicts or tuples; None: no data in this mode."""


class LossFn(Protocol):
    """What a task minimises; called at every training step."""

    def __call__(self, model: Model, sample: Sample, /) -> torch.Tensor:
        """Return the loss: one number that depends on the model's variables."""


class EvalFn(Protocol):
    """How a task is evaluated; called at every evaluation step, without gradients."""

    def __call__(self, model: Model, sample: Sample, /) -> Any:
        """Add metrics with `model.add_metric`; return a value to fetch, or None."""


class OptimizerFn(Protocol):
    """Which optimizer moves which variables; called once, when the variables are known."""

    def __call__(self, model: Model, task: str | None, /) -> Mapping[Any, tuple[list[torch.Tensor], str | None]]:
        """Return {optimizer or factory: (variables, scope)}."""


class ProcedureFn(Protocol):
    """The whole course of a training, as calls of `model.run_stage`."""

    def __call__(self, model: Model, /) -> None: ...


class StageFn(Protocol):
    """A stage written as a function: `def my_stage(sess)` or `def my_stage(sess, ctx)`."""

    def __call__(self, sess: Any, /, *args: Any, **kwargs: Any) -> Any: ...
