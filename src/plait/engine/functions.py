"""The functions that users write, one Protocol each, and what may be asked of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from plait.data import Sample
from plait.engine.task import MODE

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["EvalFn", "InputFn", "LossFn", "OptimizerFn", "ProcedureFn", "StageFn", "takes"]


class InputFn(Protocol):
    """Where a task's data comes from; called once for TRAIN and, if the task evaluates, once for EVAL."""

    def __call__(self, model: Model, mode: MODE, /) -> Any:
        """Give the data of one mode.

        Args:
            model: the model, not compiled yet.
            mode: whether the data is for training or for evaluation.

        Returns:
            A `Sample`, a source, a DataLoader, or any iterable of dicts or tuples; None: no data in this mode.

        """


class LossFn(Protocol):
    """What a task minimises; called at every training step."""

    def __call__(self, model: Model, sample: Sample, /) -> torch.Tensor:
        """Compute the loss of one batch.

        Args:
            model: the model; variables are its modules, or made here with `plait.layer`.
            sample: the batch.

        Returns:
            One number, a tensor that depends on the model's variables.

        """


class EvalFn(Protocol):
    """How a task is evaluated; called at every evaluation step, without gradients."""

    def __call__(self, model: Model, sample: Sample, /) -> Any:
        """Evaluate one batch: add metrics with `model.add_metric`.

        Args:
            model: the model.
            sample: the batch.

        Returns:
            What fetching `model.eval_op()` gives; None is fine.

        """


class OptimizerFn(Protocol):
    """Which optimizer moves which variables; called once, when the variables are known."""

    def __call__(self, model: Model, task: str | None, /) -> Mapping[Any, tuple[list[torch.Tensor], str | None]]:
        """Assign variables to optimizers.

        Args:
            model: the model, with all its variables.
            task: the task whose loss moves them.

        Returns:
            {optimizer or factory: (variables, scope)}; the scope may be None.

        """


class ProcedureFn(Protocol):
    """The whole course of a training, as calls of `model.run_stage`."""

    def __call__(self, model: Model, /) -> Any:
        """Run the stages one after the other. After a restart, it is called again and finds those done skipped.

        Args:
            model: the compiled model.

        """


class StageFn(Protocol):
    """A stage written as a function: `def my_stage(sess)` or `def my_stage(sess, ctx)`."""

    def __call__(self, sess: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Do the stage's work.

        Args:
            sess: the monitored session.
            *args: first the `StageContext`, if the function takes one; then what `run_stage` was given.
            **kwargs: what `run_stage` was given.

        Returns:
            JSON values and tensors; a restart gives them back without running the stage again.

        """


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with so many arguments, by position."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # some functions written in C do not say
        return True
    return True
