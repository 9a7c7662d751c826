"""Optimizers around optimizers: what happens to the gradients before the inner one uses them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, _foreach_add_, _foreach_div_, _foreach_mul_, _foreach_norm
from torch.optim.optimizer import Optimizer

from plait.errors import ConfigError
from plait.optim.assign import Factory
from plait.optim.rules import loss_of

__all__ = ["BatchGradients", "Lars", "WrapperFactory", "chain", "get_optimizer_wrapper_fn"]

BATCHES_DONE = "batches_done"
GRADIENT_SUM = "gradient_sum"


class _Wrapper(Optimizer):
    """Its parameter groups and state are the inner optimizer's."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @property
    def clock(self) -> Callable[[], int]:
        """Tells the step to the inner optimizer's schedule; there is none if it has no schedule."""
        inner: Any = self.inner
        clock: Callable[[], int] = inner.clock
        return clock

    @clock.setter
    def clock(self, clock: Callable[[], int]) -> None:
        inner: Any = self.inner
        inner.clock = clock

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self._share()

    def _variables(self) -> list[Tensor]:
        return [variable for group in self.param_groups for variable in group["params"]]


class Lars(_Wrapper):
    """Layer-wise adaptive rate scaling: the step of a variable is in proportion to its norm.

    Each gradient `g` of a variable `w` becomes `s * (g + weight_decay * w)` with
    `s = ratio * norm(w) / (norm(g) + weight_decay * norm(w) + epsilon)`, and `s = 1` where a norm is zero, for else
    a variable that starts at zero would stay there. As after clipping, `w.grad` holds the new gradient afterwards.
    """

    def __init__(self, inner: Optimizer, ratio: float = 0.001, weight_decay: float = 0.0, epsilon: float = 0.0) -> None:
        if not (ratio > 0 and weight_decay >= 0 and epsilon >= 0):
            raise ConfigError(
                f"lars: ratio is {ratio}, weight_decay {weight_decay}, epsilon {epsilon}; write a ratio above 0, such "
                "as 0.001, and no negative number"
            )
        super().__init__(inner)
        self.ratio, self.weight_decay, self.epsilon = ratio, weight_decay, epsilon

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = loss_of(closure)
        for variables in _alike(variable for variable in self._variables() if variable.grad is not None):
            self._scale(variables, [variable.grad for variable in variables if variable.grad is not None])
        self.inner.step()
        return loss

    def _scale(self, variables: list[Tensor], gradients: list[Tensor]) -> None:
        sizes, slopes = torch.stack(_foreach_norm(variables)), torch.stack(_foreach_norm(gradients))
        scales = self.ratio * sizes / (slopes + self.weight_decay * sizes + self.epsilon)
        scales = torch.where((sizes > 0) & (slopes > 0), scales, 1.0)
        if self.weight_decay:
            _foreach_add_(gradients, variables, alpha=self.weight_decay)
        _foreach_mul_(gradients, scales.unbind())


def _alike(variables: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """The variables in groups of one device and dtype, whose norms fit into one tensor."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for variable in variables:
        groups.setdefault((variable.device, variable.dtype), []).append(variable)
    return groups.values()


class BatchGradients(_Wrapper):
    """Gradient accumulation: every `num_batches`-th step moves the variables, by the mean of the gradients until then.

    `sync_on_apply` says that workers need to agree on gradients in that step only; the mean is the same either way.
    """

    def __init__(self, inner: Optimizer, num_batches: int, sync_on_apply: bool = True) -> None:
        if not isinstance(num_batches, int) or num_batches < 1:
            raise ConfigError(f"batch_gradients: num_batches is {num_batches!r}; write a whole number from 1 up")
        if any(isinstance(wrapped, BatchGradients) for wrapped in chain(inner)):
            raise ConfigError("batch_gradients stands twice: write it once, with the product of both num_batches")
        super().__init__(inner)
        self.num_batches, self.sync_on_apply = num_batches, sync_on_apply
        self._done = 0
        self._sums: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = loss_of(closure)
        if self._done + 1 < self.num_batches:
            self._keep()
            self._done += 1
        else:
            self._take_means()
            self._done = 0
            self.inner.step()
        return loss

    def _keep(self) -> None:
        sums, gradients = [], []
        for variable in self._variables():
            if variable.grad is None:
                continue
            if variable in self._sums:
                sums.append(self._sums[variable])
                gradients.append(variable.grad)
            else:
                self._sums[variable] = variable.grad.clone()
        if sums:
            _foreach_add_(sums, gradients)

    def _take_means(self) -> None:
        for variable, total in self._sums.items():
            variable.grad = total if variable.grad is None else variable.grad.add_(total)
        self._sums = {}
        gradients = [variable.grad for variable in self._variables() if variable.grad is not None]
        if gradients and self.num_batches > 1:
            _foreach_div_(gradients, self.num_batches)

    def state_dict(self) -> dict[str, Any]:
        tree = self.inner.state_dict()
        state = {number: dict(values) for number, values in tree["state"].items()}
        for number, variable in enumerate(self._variables()):
            if variable in self._sums:
                state.setdefault(number, {})[GRADIENT_SUM] = self._sums[variable]
        groups = [dict(group) for group in tree["param_groups"]]
        groups[0][BATCHES_DONE] = self._done
        return {**tree, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = [dict(group) for group in state_dict["param_groups"]]
        done = int(groups[0].pop(BATCHES_DONE, 0))
        state = {number: dict(values) for number, values in state_dict["state"].items()}
        sums = {number: values.pop(GRADIENT_SUM, None) for number, values in state.items()}
        kept = {number: values for number, values in state.items() if values}  # rules tell by it that they are new
        super().load_state_dict({**state_dict, "state": kept, "param_groups": groups})
        variables = self._variables()
        self._done = done
        self._sums = {
            variables[number]: torch.empty_like(variables[number], requires_grad=False).copy_(total)
            for number, total in sums.items()
            if total is not None
        }


def chain(optimizer: Optimizer) -> Iterable[Optimizer]:
    """The optimizer, and those inside of it."""
    yield optimizer
    while isinstance(optimizer, _Wrapper):
        optimizer = optimizer.inner
        yield optimizer


WRAPPERS: dict[str, Callable[..., Optimizer]] = {"batch_gradients": BatchGradients, "lars": Lars}


@dataclass(frozen=True, eq=False, repr=False)
class WrapperFactory:
    """Makes an optimizer with the inner factory, and a wrapper around it."""

    name: str
    inner: Factory
    options: dict[str, Any]

    @property
    def scope(self) -> str | None:
        """The inner factory's."""
        return getattr(self.inner, "scope", None)

    def __call__(self, params: Iterable[Tensor]) -> Optimizer:
        return WRAPPERS[self.name](self.inner(list(params)), **self.options)

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"{self.name}({self.inner!r}{options})"


def get_optimizer_wrapper_fn(
    name: str, optimizer: Optimizer | Factory, *args: Any, **kwargs: Any
) -> Callable[[], Optimizer | WrapperFactory]:
    """A function of no arguments that gives `optimizer` (or a factory of one) wrapped.

    `"lars"` takes `ratio=0.001, weight_decay=0.0, epsilon=0.0`; `"batch_gradients"` takes
    `num_batches, sync_on_apply=True`. Wrappers can be wrapped.
    """
    if name not in WRAPPERS:
        raise ConfigError(f"there is no optimizer wrapper {name!r}: there are {', '.join(WRAPPERS)}")
    options = _options(name, args, kwargs)
    _check_inner(name, optimizer)
    WRAPPERS[name](torch.optim.SGD([torch.zeros(1, requires_grad=True)]), **options)  # refuses bad values here

    def optimizer_fn() -> Optimizer | WrapperFactory:
        if isinstance(optimizer, Optimizer):
            return WRAPPERS[name](optimizer, **options)
        return WrapperFactory(name, optimizer, options)

    return optimizer_fn


def _options(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(WRAPPERS[name])
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        takes = list(signature.parameters.values())[1:]
        listed = ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in takes)
        raise ConfigError(f"optimizer wrapper {name!r}: {error}; it takes {listed}") from error
    return {key: value for key, value in bound.arguments.items() if key != "inner"}


def _check_inner(name: str, optimizer: Any) -> None:
    """An optimizer or a factory; above all not the function that gives a factory."""
    if isinstance(optimizer, Optimizer):
        return
    try:
        inspect.signature(optimizer).bind([])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer wrapper {name!r} wraps an optimizer or a factory, got {optimizer!r:.80}: write "
            f"get_optimizer_wrapper_fn({name!r}, get_optimizer_fn(...)(), ...) with the () after get_optimizer_fn(...)"
        ) from error
