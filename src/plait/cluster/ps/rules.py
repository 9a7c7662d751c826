"""Optimizers by description: what a worker's optimizer is called, and how a server makes one like it."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plait.cluster.ps.spec import OptimizerSpec
from plait.errors import ClusterError, ConfigError
from plait.optim import rules
from plait.optim.factories import LR_SCALE, NEXT_STEP

__all__ = ["SLOTS", "Kind", "Slots", "describe", "make", "start_values"]

_START_RATE = 1e-3
"""Until the first push brings the real one."""
_LEFT_OUT = frozenset(
    # the rate, and who follows a schedule, comes with each push; how torch computes does not change what
    ("params", "lr", "initial_lr", NEXT_STEP, LR_SCALE, "foreach", "fused", "capturable", "differentiable")
)


@dataclasses.dataclass(frozen=True)
class Slots:
    """The state of a variable that has not moved yet."""

    rows: dict[str, float]
    """Tensors of the variable's shape, and the number that fills them."""
    scalars: dict[str, float]
    """Numbers of the whole variable, or table."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One optimizer that a server can apply: each element moves by its own gradient alone."""

    of: type[Optimizer]
    make: Callable[..., Optimizer]
    slots: Callable[[Mapping[str, Any]], Slots]
    foreach: bool = False
    """Torch's form for many variables at once is fewer calls and the same numbers, to the last bit."""


def _zeros(*names: str, step: bool = True, **scalars: float) -> Slots:
    return Slots(dict.fromkeys(names, 0.0), {"step": 0.0, **scalars} if step else scalars)


def _sgd_slots(options: Mapping[str, Any]) -> Slots:
    return _zeros(*(["momentum_buffer"] if options.get("momentum") else []), step=False)


def _adam_slots(options: Mapping[str, Any]) -> Slots:
    return _zeros("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else []))


def _adagrad_slots(options: Mapping[str, Any]) -> Slots:
    return Slots({"sum": float(options.get("initial_accumulator_value", 0.0))}, {"step": 0.0})


def _rms_names(options: Mapping[str, Any]) -> list[str]:
    return ["momentum_buffer"] * bool(options.get("momentum")) + ["grad_avg"] * bool(options.get("centered"))


def _rmsprop_slots(options: Mapping[str, Any]) -> Slots:
    return _zeros("square_avg", *_rms_names(options))


def _tensorflow_rmsprop_slots(options: Mapping[str, Any]) -> Slots:
    return Slots({"square_avg": 1.0, **dict.fromkeys(_rms_names(options), 0.0)}, {})


def _ftrl_slots(options: Mapping[str, Any]) -> Slots:
    return Slots({"square_sum": float(options.get("initial_accumulator_value", 0.1)), "linear": 0.0}, {})


def _sparse_adam(params: Any, lr: float, **options: Any) -> Optimizer:
    """Torch's rule for sparse gradients: epsilon-hat, as TensorFlow has it for all."""
    if options.pop("maximize", False):
        raise ValueError("maximize=True is not known to the servers' SparseAdam; turn the sign of the loss")
    return rules.Adam(params, lr=lr, **options)


KINDS: dict[str, Kind] = {
    "plait.Adam": Kind(rules.Adam, rules.Adam, _adam_slots),
    "plait.RMSProp": Kind(rules.RMSProp, rules.RMSProp, _tensorflow_rmsprop_slots),
    "plait.Ftrl": Kind(rules.Ftrl, rules.Ftrl, _ftrl_slots),
    "SGD": Kind(torch.optim.SGD, torch.optim.SGD, _sgd_slots, foreach=True),
    "Adam": Kind(torch.optim.Adam, torch.optim.Adam, _adam_slots, foreach=True),
    "AdamW": Kind(torch.optim.AdamW, torch.optim.AdamW, _adam_slots, foreach=True),
    "Adagrad": Kind(torch.optim.Adagrad, torch.optim.Adagrad, _adagrad_slots, foreach=True),
    "Adadelta": Kind(
        torch.optim.Adadelta, torch.optim.Adadelta, lambda _: _zeros("square_avg", "acc_delta"), foreach=True
    ),
    "RMSprop": Kind(torch.optim.RMSprop, torch.optim.RMSprop, _rmsprop_slots, foreach=True),
    "Adamax": Kind(torch.optim.Adamax, torch.optim.Adamax, lambda _: _zeros("exp_avg", "exp_inf")),
    "NAdam": Kind(torch.optim.NAdam, torch.optim.NAdam, lambda _: _zeros("exp_avg", "exp_avg_sq", mu_product=1.0)),
    "RAdam": Kind(torch.optim.RAdam, torch.optim.RAdam, lambda _: _zeros("exp_avg", "exp_avg_sq")),
    "SparseAdam": Kind(torch.optim.SparseAdam, _sparse_adam, lambda _: _zeros("exp_avg", "exp_avg_sq")),
}

SLOTS: dict[str, Callable[[Mapping[str, Any]], Slots]] = {name: kind.slots for name, kind in KINDS.items()}
"""For each kind, the state that a variable or a new row begins with, as a function of the optimizer's options."""


def describe(optimizer: Optimizer) -> list[OptimizerSpec]:
    """One description for each parameter group. Raises ConfigError if servers cannot apply such an optimizer."""
    found = [name for name, kind in KINDS.items() if type(optimizer) is kind.of]
    if not found:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be applied on parameter servers, which hold pieces of variables and "
            f"move each element by its own gradient: use one of {', '.join(KINDS)}"
        )
    specs = [_described(found[0], group) for group in optimizer.param_groups]
    for spec in specs:
        try:
            make(spec, [torch.zeros(1, requires_grad=True)])
        except ClusterError as error:
            raise ConfigError(f"the optimizer {found[0]} cannot be applied on parameter servers: {error}") from error
    return specs


def _described(kind: str, group: Mapping[str, Any]) -> OptimizerSpec:
    takes = inspect.signature(KINDS[kind].of).parameters
    options = {}
    for key, value in group.items():
        if key in _LEFT_OUT or key not in takes:
            continue
        options[key] = _json(kind, key, value)
    return OptimizerSpec(kind=kind, options=options)


def _json(kind: str, key: str, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_json(kind, key, item) for item in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(f"option {key!r} of {kind} is a {type(value).__name__}: parameter servers take plain numbers")


def make(spec: OptimizerSpec, params: Iterable[Tensor]) -> Optimizer:
    """The optimizer that `spec` describes, over `params`. Only what KINDS lists is ever made."""
    kind = _kind(spec)
    takes = [name for name in inspect.signature(kind.of).parameters if name not in _LEFT_OUT]
    unknown = [key for key in spec.options if key not in takes]
    if unknown:
        raise ClusterError(f"the optimizer {spec.kind} has no option {unknown[0]!r:.120}: it takes {', '.join(takes)}")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.options.items()}
    for key, value in options.items():
        if not _fits(inspect.signature(kind.of).parameters[key].default, value):
            raise ClusterError(f"option {key!r} of the optimizer {spec.kind} is {value!r:.120}: send finite numbers")
    moved = list(params)
    if "foreach" in inspect.signature(kind.make).parameters:
        options["foreach"] = kind.foreach and len(moved) > 1
    try:
        return kind.make(moved, lr=_START_RATE, **options)
    except (TypeError, ValueError) as error:
        raise ClusterError(f"the optimizer {spec.kind} refuses its options {spec.options!r:.400}: {error}") from error


def _kind(spec: OptimizerSpec) -> Kind:
    if spec.kind not in KINDS:
        raise ClusterError(f"there is no optimizer {spec.kind!r:.120}: servers apply {', '.join(KINDS)}")
    return KINDS[spec.kind]


def _fits(default: Any, value: Any) -> bool:
    """Whether an option is of the kind that the optimizer takes there; torch itself finds out at the first step."""
    if isinstance(default, tuple):
        return isinstance(value, tuple) and len(value) == len(default) and all(map(_fits, default, value))
    if isinstance(default, bool):
        return isinstance(value, bool)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def start_values(spec: OptimizerSpec) -> Slots:
    """The state of a variable, or of a row, that has not moved yet."""
    return _kind(spec).slots(spec.options)
