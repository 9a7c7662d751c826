"""Optimizers by name, with TensorFlow 1's arguments, defaults and update rules."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from plait.errors import ConfigError
from plait.optim.rules import Adam, Ftrl, RMSProp
from plait.optim.schedules import Schedule

__all__ = ["OptimizerFactory", "checked_rate", "get_optimizer_fn", "set_schedule"]

NEXT_STEP = "schedule_step"
"""Where a parameter group keeps the step that comes next, so that a checkpoint has it."""
LR_SCALE = "lr_scale"
"""What a scheduled rate is multiplied by; who finds training on a plateau lowers it."""


def _adadelta(
    params: ParamsT, lr: float, rho: float = 0.95, epsilon: float = 1e-8, *, weight_decay: float = 0.0
) -> Optimizer:
    return torch.optim.Adadelta(params, lr=lr, rho=rho, eps=epsilon, weight_decay=weight_decay)


def _adagrad(
    params: ParamsT,
    lr: float,
    initial_accumulator_value: float = 0.1,
    *,
    epsilon: float = 0.0,
    weight_decay: float = 0.0,
) -> Optimizer:
    start = initial_accumulator_value
    if not (start > 0 or epsilon > 0):
        raise ConfigError(f"initial_accumulator_value is {start}: a gradient of 0 would be divided by 0; write 0.1")
    return torch.optim.Adagrad(params, lr=lr, initial_accumulator_value=start, eps=epsilon, weight_decay=weight_decay)


def _adam(
    params: ParamsT,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    *,
    weight_decay: float = 0.0,
) -> Optimizer:
    return Adam(params, lr=lr, betas=(beta1, beta2), eps=epsilon, weight_decay=weight_decay)


def _ftrl(
    params: ParamsT,
    lr: float,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    *,
    l2_shrinkage_regularization_strength: float = 0.0,
    beta: float | None = None,
) -> Optimizer:
    return Ftrl(
        params,
        lr=lr,
        learning_rate_power=learning_rate_power,
        initial_accumulator_value=initial_accumulator_value,
        l1=l1_regularization_strength,
        l2=l2_regularization_strength,
        l2_shrinkage=l2_shrinkage_regularization_strength,
        beta=beta or 0.0,
    )


def _momentum(
    params: ParamsT, lr: float, momentum: float, *, use_nesterov: bool = False, weight_decay: float = 0.0
) -> Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=use_nesterov, weight_decay=weight_decay)


def _rmsprop(
    params: ParamsT,
    lr: float,
    decay: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = 1e-10,
    *,
    centered: bool = False,
    weight_decay: float = 0.0,
) -> Optimizer:
    return RMSProp(
        params, lr=lr, alpha=decay, eps=epsilon, momentum=momentum, centered=centered, weight_decay=weight_decay
    )


def _sgd(params: ParamsT, lr: float, *, weight_decay: float = 0.0) -> Optimizer:
    return torch.optim.SGD(params, lr=lr, weight_decay=weight_decay)


MAKERS: dict[str, Callable[..., Optimizer]] = {
    "adadelta": _adadelta,
    "adagrad": _adagrad,
    "adam": _adam,
    "ftrl": _ftrl,
    "momentum": _momentum,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
}

SPELLINGS = {
    "alpha": "decay",
    "eps": "epsilon",
    "l1": "l1_regularization_strength",
    "l2": "l2_regularization_strength",
    "l2_shrinkage": "l2_shrinkage_regularization_strength",
    "nesterov": "use_nesterov",
}
"""Torch's spelling (and ours): TensorFlow's. Torch's `betas` are two arguments there."""


@dataclass(frozen=True, eq=False, repr=False)
class OptimizerFactory:
    """Makes an optimizer of one kind over the variables it is given."""

    name: str
    learning_rate: float | Schedule
    scope: str | None = None
    """The optimizer is meant for the variables below this scope; whoever calls the factory sees to it."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, params: ParamsT) -> Optimizer:
        rate = self.learning_rate
        if not callable(rate):
            return MAKERS[self.name](params, rate, **self.options)
        optimizer = MAKERS[self.name](params, checked_rate(rate(0), rate), **self.options)
        set_schedule(optimizer, rate)
        return optimizer

    def __repr__(self) -> str:
        settings = {"learning_rate": self.learning_rate, **self.options}
        if self.scope is not None:
            settings["scope"] = self.scope
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"


def get_optimizer_fn(
    name: str, learning_rate: float | Schedule, scope: str | None = None, *args: Any, **kwargs: Any
) -> Callable[[], OptimizerFactory]:
    """A function of no arguments that gives a factory for the optimizer called `name`.

    >>> get_optimizer_fn("momentum", learning_rate=0.1, momentum=0.9)()
    momentum(learning_rate=0.1, momentum=0.9)

    Args:
        name: adadelta, adagrad, adam, ftrl, momentum, rmsprop or sgd.
        learning_rate: A number, or a schedule: a function of the step.
        scope: The scope whose variables it is for; kept on the factory.
        args: TensorFlow's arguments after the learning rate, in its order.
        kwargs: Arguments by TensorFlow's names, or by torch's (`betas`, `eps`, `alpha`, `nesterov`, `weight_decay`).

    """
    if name not in MAKERS:
        raise ConfigError(f"there is no optimizer {name!r}: there are {', '.join(MAKERS)}")
    rate = learning_rate if callable(learning_rate) else checked_rate(learning_rate)
    factory = OptimizerFactory(name, rate, scope, _options(name, args, kwargs))
    try:
        factory(
            [torch.zeros(1, requires_grad=True)]
        )  # a value that is refused is refused here, not when training starts
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {name!r}: {error}") from error

    def optimizer_fn() -> OptimizerFactory:
        return OptimizerFactory(factory.name, factory.learning_rate, factory.scope, factory.options)

    return optimizer_fn


def _options(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by TensorFlow's names."""
    signature = inspect.signature(MAKERS[name])
    takes = list(signature.parameters.values())[2:]
    named = _tensorflow_names(name, kwargs)
    unknown = [key for key in named if key not in signature.parameters]
    listed = ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in takes)
    if unknown:
        others = [other for other, maker in MAKERS.items() if unknown[0] in inspect.signature(maker).parameters]
        hint = f" ({', '.join(others)} would take it)" if others else ""
        raise ConfigError(f"optimizer {name!r} has no argument {unknown[0]!r}{hint}: it takes {listed}")
    try:
        bound = signature.bind(None, None, *args, **named)
    except TypeError as error:
        raise ConfigError(f"optimizer {name!r}: {error}; it takes {listed}") from error
    return {key: value for key, value in bound.arguments.items() if key not in ("params", "lr")}


def _tensorflow_names(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(MAKERS[name]).parameters
    named: dict[str, Any] = {}
    for key, value in _without_betas(kwargs) if "beta1" in known else kwargs.items():
        spelled = SPELLINGS.get(key, key)
        its_name = spelled if spelled in known else key
        if its_name in named:
            raise ConfigError(f"optimizer {name!r} got {its_name!r} twice, once under another name: write it once")
        named[its_name] = value
    named.pop("use_locking", None)  # TensorFlow's; nothing here runs at the same time
    return named


def _without_betas(kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in kwargs.items():
        if key != "betas":
            yield key, value
        elif isinstance(value, Sequence) and len(value) == 2:
            yield from zip(("beta1", "beta2"), value, strict=True)
        else:
            raise ConfigError(f"betas is {value!r}: write two numbers, such as (0.9, 0.999)")


def checked_rate(rate: Any, source: object = None) -> float:
    """`rate` as a plain float, if it is a learning rate."""
    number = rate.item() if isinstance(rate, torch.Tensor) and rate.numel() == 1 else rate
    of = "" if source is None else f" of {source!r}"
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise ConfigError(f"the learning rate{of} is {rate!r}: give a number, or a function of the step")
    if not 0 <= float(number) < math.inf:
        raise ConfigError(f"the learning rate{of} is {rate!r}: give a number from 0 up")
    return float(number)


def set_schedule(optimizer: Optimizer, schedule: Schedule) -> None:
    """Set the learning rate from `schedule` before every step of `optimizer`.

    `optimizer.clock`, a function of no arguments, tells the step. At first it counts the optimizer's own steps, and
    the count is part of its state; who trains may set another, such as one that reads the model's global step.
    """
    clocked: Any = optimizer
    clocked.clock = lambda: int(optimizer.param_groups[0].get(NEXT_STEP, 0))
    optimizer.param_groups[0][NEXT_STEP] = 0
    for group in optimizer.param_groups:
        group[LR_SCALE] = 1.0

    def set_rate(_optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        step = int(clocked.clock())
        rate = checked_rate(schedule(step), schedule)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get(LR_SCALE, 1.0)
        optimizer.param_groups[0][NEXT_STEP] = step + 1

    optimizer.register_step_pre_hook(set_rate)
