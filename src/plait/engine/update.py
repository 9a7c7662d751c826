"""The update: gradients, then optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from plait.engine.model import Model
    from plait.engine.settings import GradientConfig

__all__ = ["clear_step", "update_step"]

Optimizers = list[torch.optim.Optimizer]


def clear_step(optimizers: Optimizers) -> Callable[[], None]:
    """Drop the old gradients before the forward pass, which then finds their memory free and warm."""

    def clear() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    return optimizers[0].zero_grad if len(optimizers) == 1 else clear


def update_step(model: Model, task: str | None, optimizers: Optimizers, losses: int) -> Callable[[Any], None]:
    """One backward pass and all optimizers; or, with several losses, each loss's gradients, then all optimizers."""
    finish = _finisher(model)
    if losses > 1:
        return _for_each_loss(model, task, optimizers, finish)
    step, shown, scale = model.global_step, model.loss_metrics[task], model.gradient.loss_scale
    variables = list(dict.fromkeys(variable for optimizer in optimizers for variable in _variables(optimizer)))

    def update(loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        for optimizer in optimizers:
            optimizer.step()
        shown.value = loss
        step.value += 1

    def update_and_finish(loss: torch.Tensor) -> None:
        (loss * scale if scale != 1 else loss).backward()  # type: ignore[no-untyped-call] # same
        finish(variables)
        for optimizer in optimizers:
            optimizer.step()
        shown.value = loss
        step.value += 1

    return update if finish is _nothing else update_and_finish


def _for_each_loss(
    model: Model, task: str | None, optimizers: Optimizers, finish: Callable[[Sequence[torch.Tensor]], None]
) -> Callable[[Any], None]:
    """Loss number i moves what optimizer number i has, all from the same forward pass."""
    step, shown, scale = model.global_step, model.loss_metrics[task], model.gradient.loss_scale
    moved = [_variables(optimizer) for optimizer in optimizers]

    def update(losses: Sequence[torch.Tensor]) -> None:
        gradients = [
            torch.autograd.grad(loss * scale if scale != 1 else loss, variables, retain_graph=True, allow_unused=True)
            for loss, variables in zip(losses, moved, strict=True)
        ]
        for optimizer, variables, values in zip(optimizers, moved, gradients, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.grad = value
            finish(variables)
            optimizer.step()
        shown.value = torch.stack([loss.detach() for loss in losses]).sum()
        step.value += 1

    return update


def _variables(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [variable for group in optimizer.param_groups for variable in group["params"]]


def _nothing(variables: Sequence[torch.Tensor]) -> None:
    """Gradients are used as they are."""


def _finisher(model: Model) -> Callable[[Sequence[torch.Tensor]], None]:
    """What happens to gradients between the backward pass and the optimizers."""
    parts: list[Callable[[Sequence[torch.Tensor]], None]] = []
    if model.strategy.worker_num > 1:
        parts.append(model.strategy.reduce_gradients)
    if model.gradient.loss_scale != 1:
        parts.append(_unscale(model.gradient.loss_scale))
    if model.gradient.clip is not None:
        parts.append(_clip(model.gradient))
    if not parts:
        return _nothing

    def finish(variables: Sequence[torch.Tensor]) -> None:
        for part in parts:
            part(variables)

    return finish


def _unscale(scale: float) -> Callable[[Sequence[torch.Tensor]], None]:
    def unscale(variables: Sequence[torch.Tensor]) -> None:
        gradients = [variable.grad for variable in variables if variable.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, scale)

    return unscale


def _clip(config: GradientConfig) -> Callable[[Sequence[torch.Tensor]], None]:
    limit = float(config.clip or 0.0)

    def clip(variables: Sequence[torch.Tensor]) -> None:
        if config.clip_type == "norm":
            torch.nn.utils.clip_grad_norm_(variables, limit)
        else:
            torch.nn.utils.clip_grad_value_(variables, limit)

    return clip
