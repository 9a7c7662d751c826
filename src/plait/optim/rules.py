"""TensorFlow's update rules where torch's differ. State has the dtype of its variable, as in both of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import (
    Tensor,
    _foreach_add,
    _foreach_add_,
    _foreach_addcdiv_,
    _foreach_addcmul,
    _foreach_addcmul_,
    _foreach_clamp_max,
    _foreach_clamp_min_,
    _foreach_copy_,
    _foreach_div,
    _foreach_div_,
    _foreach_lerp_,
    _foreach_mul_,
    _foreach_pow,
    _foreach_sqrt,
    _foreach_sqrt_,
    _foreach_sub,
    _foreach_sub_,
)
from torch.optim.optimizer import ParamsT

from plait.errors import ConfigError

__all__ = ["Adam", "Ftrl", "RMSProp", "loss_of"]

Tensors = list[Tensor] | tuple[Tensor, ...]
"""What the foreach functions take (a list or a tuple) and give (a tuple)."""

TINY = 2e-38
"""Just above the least normal float32 (and bfloat16): a divisor that keeps 0 / 0 at 0."""


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """What the closure given to `step()` returns; it may run a backward pass."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check_at_least_zero(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:  # written so that nan is refused
            raise ConfigError(f"{name} is {value}: write a number that is not negative")


def _check_below_one(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} is {value}: write a number from 0 to below 1")


class _Rule(torch.optim.Optimizer):
    """What every rule does alike; a subclass says how the variables of one group move."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            moving = [variable for variable in group["params"] if variable.grad is not None]
            if moving:
                self._move(group, moving, self._gradients(group, moving))
        return loss

    def _gradients(self, group: dict[str, Any], variables: list[Tensor]) -> Tensors:
        gradients = [variable.grad for variable in variables if variable.grad is not None]
        if any(gradient.layout != torch.strided for gradient in gradients):
            raise ConfigError(f"{type(self).__name__} got a sparse gradient: make the embedding with sparse=False")
        decay = group.get("weight_decay")
        return _foreach_add(gradients, variables, alpha=decay) if decay else gradients

    def _move(self, group: dict[str, Any], variables: list[Tensor], gradients: Tensors) -> None:
        raise NotImplementedError

    def _slot(self, name: str, variables: list[Tensor], start: float = 0.0) -> list[Tensor]:
        """A tensor of state for each variable, made full of `start` when first asked for."""
        slots = []
        for variable in variables:
            state = self.state[variable]
            if name not in state:
                state[name] = torch.full_like(variable, start, memory_format=torch.preserve_format)
            slots.append(state[name])
        return slots


class Adam(_Rule):
    """Adam with epsilon-hat: epsilon is added to the root of the second moment before its bias is corrected.

    With t the number of steps of a variable::

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g * g - v)
        w -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + eps)

    `weight_decay` adds `weight_decay * w` to the gradient. With `capturable`, steps are counted on the device, for a
    step that is recorded in a graph.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        capturable: bool = False,
    ) -> None:
        _check_at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        beta1, beta2 = betas
        _check_below_one(beta1=beta1, beta2=beta2)
        settings = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "capturable": capturable})

    def _move(self, group: dict[str, Any], variables: list[Tensor], gradients: Tensors) -> None:
        beta1, beta2 = group["betas"]
        means = self._slot("exp_avg", variables)
        squares = self._slot("exp_avg_sq", variables)
        _foreach_lerp_(means, gradients, 1 - beta1)
        _foreach_mul_(squares, beta2)
        _foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = _foreach_sqrt(squares)
        _foreach_add_(roots, group["eps"])
        if group.get("capturable"):
            self._move_on_device(group, variables, means, roots)
            return
        counts = [self._count(variable) for variable in variables]
        rates = {n: -group["lr"] * math.sqrt(1 - beta2**n) / (1 - beta1**n) for n in set(counts)}
        _foreach_addcdiv_(variables, means, roots, [rates[n] for n in counts])

    def _move_on_device(
        self, group: dict[str, Any], variables: list[Tensor], means: list[Tensor], roots: Tensors
    ) -> None:
        """The same with the counts as tensors: nothing is looked at. In float32, little is left of 1 - 0.999."""
        beta1, beta2 = group["betas"]
        counts = []
        for variable in variables:
            state = self.state[variable]
            count = state.get("step", 0.0)
            if not isinstance(count, Tensor) or count.device != variable.device or count.dtype != torch.float64:
                state["step"] = count = torch.full((), float(count), dtype=torch.float64, device=variable.device)
            counts.append(count)
        _foreach_add_(counts, 1.0)
        moves = _foreach_div(means, roots)
        for count, move, variable in zip(counts, moves, variables, strict=True):
            rate = group["lr"] * torch.sqrt(1 - beta2**count) / (1 - beta1**count)
            variable.sub_(move.mul_(rate))

    def _count(self, variable: Tensor) -> int:
        """How many steps the variable has made, this one included."""
        state = self.state[variable]
        state["step"] = count = int(state.get("step", 0)) + 1  # torch's own Adam, whose state fits, has a tensor
        return count


class RMSProp(_Rule):
    """RMSProp with epsilon inside the root, a mean square that starts at one, and the rate inside the momentum::

        ms += (1 - alpha) * (g * g - ms)
        mg += (1 - alpha) * (g - mg)                      # only if centered; else 0
        mom = momentum * mom + lr * g / sqrt(ms - mg * mg + eps)
        w -= mom

    `weight_decay` adds `weight_decay * w` to the gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        alpha: float = 0.9,
        eps: float = 1e-10,
        momentum: float = 0.0,
        centered: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        _check_at_least_zero(lr=lr, eps=eps, momentum=momentum, weight_decay=weight_decay)
        if not 0 <= alpha <= 1:
            raise ConfigError(f"alpha is {alpha}: write a number from 0 to 1")
        settings = {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum, "centered": bool(centered)}
        super().__init__(params, {**settings, "weight_decay": weight_decay})

    def _move(self, group: dict[str, Any], variables: list[Tensor], gradients: Tensors) -> None:
        roots = self._roots(group, variables, gradients)
        rate = group["lr"]
        if not group["momentum"]:
            if isinstance(rate, Tensor):
                _foreach_sub_(variables, _times(_foreach_div(gradients, roots), rate))
            else:
                _foreach_addcdiv_(variables, gradients, roots, -rate)
            return
        moves = self._slot("momentum_buffer", variables)
        _foreach_mul_(moves, group["momentum"])
        if isinstance(rate, Tensor):
            _foreach_add_(moves, _times(_foreach_div(gradients, roots), rate))
        else:
            _foreach_addcdiv_(moves, gradients, roots, rate)
        _foreach_sub_(variables, moves)

    def _roots(self, group: dict[str, Any], variables: list[Tensor], gradients: Tensors) -> Tensors:
        squares = self._slot("square_avg", variables, 1.0)
        _foreach_mul_(squares, group["alpha"])
        _foreach_addcmul_(squares, gradients, gradients, 1 - group["alpha"])
        if group["centered"]:
            means = self._slot("grad_avg", variables)
            _foreach_lerp_(means, gradients, 1 - group["alpha"])
            roots = _foreach_addcmul(squares, means, means, -1)
            _foreach_clamp_min_(roots, 0.0)  # a variance: below zero by rounding only, and its root would be nan
            _foreach_add_(roots, group["eps"])
        else:
            roots = _foreach_add(squares, group["eps"])
        _foreach_sqrt_(roots)
        return roots


class Ftrl(_Rule):
    """FTRL-proximal, with `p = learning_rate_power`::

        n1 = n + g * g
        z += g + 2 * l2_shrinkage * w - (n1**-p - n**-p) / lr * w
        w = (clip(z, -l1, l1) - z) / ((beta + n1**-p) / lr + 2 * l2)

    `n` starts at `initial_accumulator_value`, `z` at zero. A weight is what `z` says, not where it was: weights that
    do not start at zero shrink towards it in the first steps.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        l2_shrinkage: float = 0.0,
        beta: float = 0.0,
    ) -> None:
        _check_at_least_zero(l1=l1, l2=l2, l2_shrinkage=l2_shrinkage, beta=beta)
        _check_at_least_zero(initial_accumulator_value=initial_accumulator_value)
        if not lr > 0:
            raise ConfigError(f"lr is {lr}: FTRL divides by it; write a number above 0")
        if not learning_rate_power <= 0:
            raise ConfigError(f"learning_rate_power is {learning_rate_power}: write -0.5, or 0 for a constant rate")
        settings = {"lr": lr, "learning_rate_power": learning_rate_power, "l1": l1, "l2": l2, "beta": beta}
        start = {"initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, {**settings, "l2_shrinkage": l2_shrinkage, **start})

    def _move(self, group: dict[str, Any], variables: list[Tensor], gradients: Tensors) -> None:
        rate = group["lr"]
        if not isinstance(rate, Tensor) and not rate > 0:  # a tensor's value is not looked at
            raise ConfigError(f"the learning rate has come to {rate}: FTRL divides by it; keep the schedule above 0")
        squares = self._slot("square_sum", variables, group["initial_accumulator_value"])
        linear = self._slot("linear", variables)
        before = _power(squares, -group["learning_rate_power"])
        _foreach_addcmul_(squares, gradients, gradients)
        after = _power(squares, -group["learning_rate_power"])
        _foreach_add_(linear, gradients)
        if group["l2_shrinkage"]:
            _foreach_add_(linear, variables, alpha=2 * group["l2_shrinkage"])
        if isinstance(rate, Tensor):
            _foreach_addcmul_(linear, _times(_foreach_sub(after, before), 1 / rate), variables, -1.0)
        else:
            _foreach_addcmul_(linear, _foreach_sub(after, before), variables, -1 / rate)
        _foreach_copy_(variables, _nearest(linear, group["l1"]))
        _foreach_div_(variables, _curvatures(after, rate, group["beta"] / rate + 2 * group["l2"]))


def _times(tensors: Tensors, factor: Tensor) -> Tensors:
    """In place, by one number on the device."""
    _foreach_mul_(tensors, factor)
    return tensors


def _power(tensors: Tensors, exponent: float) -> Tensors:
    return _foreach_sqrt(tensors) if exponent == 0.5 else _foreach_pow(tensors, exponent)


def _nearest(linear: Tensors, l1: float) -> Tensors:
    """-z, moved by l1 towards zero and stopped there."""
    clipped = _foreach_clamp_max(linear, l1)
    _foreach_clamp_min_(clipped, -l1)
    _foreach_sub_(clipped, linear)
    return clipped


def _curvatures(powers: Tensors, rate: Any, more: Any) -> Tensors:
    """With numbers, or tensors of one."""
    curvatures = _foreach_div(powers, rate)
    if isinstance(more, Tensor):
        for curvature in curvatures:  # torch's own, of all at once, would look at the value
            curvature.add_(more)
    else:
        _foreach_add_(curvatures, more)
    _foreach_clamp_min_(curvatures, TINY)  # no gradient yet and an accumulator that starts at zero
    return curvatures
