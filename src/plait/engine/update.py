"""The update: gradients, then optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from plait.engine.layout import laid_like
from plait.errors import ConfigError, OutOfRangeError

if TYPE_CHECKING:
    from plait.engine.model import Model
    from plait.engine.settings import GradientConfig

__all__ = [
    "Flags",
    "LeftError",
    "backward_of",
    "clear_step",
    "clear_when_moved",
    "leave_step",
    "moved_by",
    "optimizers_step",
    "refuse_scaler",
    "update_step",
]

Optimizers = list[torch.optim.Optimizer]


class LeftError(OutOfRangeError):
    """Another worker takes no more steps: the step that this one was in is dropped."""

    def __init__(self, *, stop: bool) -> None:
        super().__init__("another worker has left the loop: " + ("it was told to stop" if stop else "its data ended"))
        self.stop = stop


def clear_step(optimizers: Optimizers) -> Callable[[], None]:
    """Drop the old gradients before the forward pass, which then finds their memory free and warm."""

    def clear() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    return optimizers[0].zero_grad if len(optimizers) == 1 else clear


def clear_when_moved(model: Model, optimizers: Optimizers) -> Callable[[], None]:
    """The same; gradients that are being merged stay until the variables have moved."""
    merge, step, clear = model.strategy.gradient_merge, model.global_step, clear_step(optimizers)

    def clear_merged() -> None:
        if step.value % merge == 0:
            clear()

    return clear if merge == 1 else clear_merged


def update_step(model: Model, task: str | None, optimizers: Optimizers, losses: int) -> Callable[[Any], None]:
    """One backward pass and all optimizers; or, with several losses, each loss's gradients, then all optimizers."""
    step, shown, backward = model.global_step, model.loss_metrics[task], backward_of(model)
    if losses > 1:
        return _for_each_loss(model, task, optimizers)
    finish = _finisher(model, moved_by(optimizers), optimizers)
    moved = model.strategy.mover(model, task, optimizers)
    if moved is not None:
        refuse_scaler(model, "servers or a SparseEmbedding")
    move = moved or optimizers_step(model, optimizers)

    def update(loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it unannotated
        for optimizer in optimizers:
            optimizer.step()
        shown.value = loss
        step.value += 1

    def update_and_finish(loss: torch.Tensor) -> None:
        backward(loss)
        finish()
        move()
        shown.value = loss
        step.value += 1

    plain = finish is _nothing and moved is None and model.strategy.worker_num == 1
    full = update if plain else update_and_finish
    return full if model.strategy.gradient_merge == 1 else _merged(model, full, shown)


def backward_of(model: Model) -> Callable[[torch.Tensor], None]:
    """The backward pass of a loss, which is scaled before if that was asked for."""
    scaled = _scaled(model)

    def backward(loss: torch.Tensor) -> None:
        scaled(loss).backward()  # type: ignore[no-untyped-call] # torch leaves it unannotated

    return backward


def refuse_scaler(model: Model, what: str) -> None:
    """A scale that follows overflows is this process's own: where others see gradients, it has to be one number."""
    if model.scaler is not None:
        raise ConfigError(
            f"precision='fp16' with {what} needs a fixed scale: write gradient=GradientConfig(loss_scale=1024) in "
            "compile(), or precision='bf16'"
        )


def _scaled(model: Model) -> Callable[[torch.Tensor], torch.Tensor]:
    scaler, scale = model.scaler, model.gradient.loss_scale
    if scaler is not None:
        return scaler.scale
    return (lambda loss: loss * scale) if scale != 1 else (lambda loss: loss)


def _merged(model: Model, update: Callable[[Any], None], shown: Any) -> Callable[[Any], None]:
    """Variables move every so many steps; until then, gradients add up."""
    merge, step, backward = model.strategy.gradient_merge, model.global_step, backward_of(model)

    def update_when_due(loss: torch.Tensor) -> None:
        if (step.value + 1) % merge == 0:
            update(loss)
            return
        backward(loss)
        shown.value = loss
        step.value += 1

    return update_when_due


def _for_each_loss(model: Model, task: str | None, optimizers: Optimizers) -> Callable[[Any], None]:
    """Loss number i moves what optimizer number i has, all from the same forward pass."""
    if model.strategy.gradient_merge > 1:
        raise ConfigError(f"gradient_merge with several losses (task {task!r}): leave it out, or add the losses up")
    step, shown, scaled = model.global_step, model.loss_metrics[task], _scaled(model)
    moved = [moved_by([optimizer]) for optimizer in optimizers]
    finishers = [_finisher(model, variables, [one]) for variables, one in zip(moved, optimizers, strict=True)]
    mover = model.strategy.mover(model, task, optimizers)
    if mover is not None:
        refuse_scaler(model, "servers or a SparseEmbedding")
    steps = [_nothing if mover is not None else _step_of(model, optimizer) for optimizer in optimizers]
    finally_move = mover or optimizers_step(model, [])

    def update(losses: Sequence[torch.Tensor]) -> None:
        gradients = [
            torch.autograd.grad(scaled(loss), variables, retain_graph=True, allow_unused=True)
            for loss, variables in zip(losses, moved, strict=True)
        ]
        for variables, values, finish, move in zip(moved, gradients, finishers, steps, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.grad = None if value is None else laid_like(variable, value)
            finish()
            move()
        finally_move()
        shown.value = torch.stack([loss.detach() for loss in losses]).sum()
        step.value += 1

    return update


def moved_by(optimizers: Optimizers) -> list[torch.Tensor]:
    """The variables of all these optimizers, each once."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return list(dict.fromkeys(variable for group in groups for variable in group["params"]))


def _nothing() -> None:
    """Gradients are used as they are."""


def optimizers_step(model: Model, optimizers: Optimizers) -> Callable[[], None]:
    """All optimizers, and what a strategy does after them."""
    after = model.strategy.after_step if model.strategy.worker_num > 1 else None
    steps, scaler = [_step_of(model, optimizer) for optimizer in optimizers], model.scaler

    def move() -> None:
        for step in steps:
            step()
        if scaler is not None:
            scaler.update()
        if after is not None:
            after(model)

    return move


def _step_of(model: Model, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's step; after an overflow, none."""
    scaler = model.scaler
    return optimizer.step if scaler is None else lambda: scaler.step(optimizer)


def _finisher(model: Model, variables: Sequence[torch.Tensor], optimizers: Optimizers) -> Callable[[], None]:
    """What happens to gradients between the backward pass and the optimizers."""
    parts: list[Callable[[Sequence[torch.Tensor]], None]] = []
    if model.strategy.gradient_merge > 1:
        parts.append(_unscale(model.strategy.gradient_merge))
    if model.strategy.in_step:
        parts.append(_together(model))
    if model.gradient.loss_scale != 1:
        parts.append(_unscale(model.gradient.loss_scale))
    if model.scaler is not None:
        parts.append(_unscale_with(model.scaler, optimizers))
    if model.gradient.clip is not None:
        parts.append(_clip(model.gradient))
    if not parts:
        return _nothing

    def finish() -> None:
        for part in parts:
            part(variables)

    return finish


class Flags:
    """Two numbers that travel with the gradients: how many workers have left the loop, and how many want to stop.

    A worker that leaves takes part in one more reduction, with flags instead of gradients; the others see them, drop
    the step that they were in, and leave, too. `more` numbers may travel beside them.
    """

    def __init__(self, device: torch.device, more: int = 0) -> None:
        self.tensor = torch.zeros(2 + more, device=device)

    def sent(self, left: float, stop: float, *more: float) -> torch.Tensor:
        """The tensor whose gradient holds the flags."""
        self.tensor.grad = torch.tensor([left, stop, *more], device=self.tensor.device)
        return self.tensor

    def check(self) -> list[float]:
        """Raise if somebody has left; returns what travelled beside the flags."""
        found = self.tensor.grad
        left, stop, *more = found.tolist() if found is not None else (0.0, 0.0)
        if left > 0:
            raise LeftError(stop=stop > 0)
        return more


def _together(model: Model) -> Callable[[Sequence[torch.Tensor]], None]:
    reduce, device = model.strategy.reduce_gradients, model.config.resolved_device()
    if device.type != "cpu":  # to look at the flags would mean to wait for the device at every step
        return reduce
    flags = Flags(device)

    def together(variables: Sequence[torch.Tensor]) -> None:
        reduce([*variables, flags.sent(0.0, 0.0)])
        flags.check()

    return together


def leave_step(model: Model, task: str | None, *, stop: bool) -> None:
    """Take part in one more reduction, to say that this worker takes no more steps."""
    if model.config.resolved_device().type != "cpu":
        return
    if task in model.private_tasks:
        model.private_tasks[task].leave(stop=stop)
        return
    optimizers = list(model.assignments[task])
    groups = [moved_by([one]) for one in optimizers] if model.loss_counts[task] > 1 else [moved_by(optimizers)]
    flags = Flags(model.config.resolved_device())
    merging = model.strategy.gradient_merge > 1  # then, what has moved nothing yet is kept for the next run
    kept = [variable.grad.clone() if merging and variable.grad is not None else None for variable in groups[0]]
    for variable in groups[0]:
        variable.grad = torch.zeros_like(variable)
    model.strategy.reduce_gradients([*groups[0], flags.sent(1.0, float(stop))])
    for variable, gradient in zip(groups[0], kept, strict=True):
        variable.grad = gradient


def _unscale(scale: float) -> Callable[[Sequence[torch.Tensor]], None]:
    def unscale(variables: Sequence[torch.Tensor]) -> None:
        gradients = [variable.grad for variable in variables if variable.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, scale)

    return unscale


def _unscale_with(scaler: torch.amp.GradScaler, optimizers: Optimizers) -> Callable[[Sequence[torch.Tensor]], None]:
    """Take the scale of now out of the gradients, and note whether one has overflowed."""

    def unscale(_: Sequence[torch.Tensor]) -> None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)

    return unscale


def _clip(config: GradientConfig) -> Callable[[Sequence[torch.Tensor]], None]:
    limit = float(config.clip or 0.0)

    def clip(variables: Sequence[torch.Tensor]) -> None:
        if config.clip_type == "norm":
            torch.nn.utils.clip_grad_norm_(variables, limit)
        else:
            torch.nn.utils.clip_grad_value_(variables, limit)

    return clip
