"""Which optimizer moves which variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from plait.errors import TaskError, VariableError

__all__ = [
    "Assignment",
    "Factory",
    "PartialAssignment",
    "in_scope",
    "make_optimizer",
    "optimizer_setter",
    "scope_optimizer",
]

Factory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""A function that makes an optimizer over variables, such as `functools.partial(torch.optim.SGD, lr=0.1)`."""

Assignment = dict[torch.optim.Optimizer, tuple[list[torch.Tensor], str | None]]


class PartialAssignment(Assignment):
    """An assignment that leaves variables alone on purpose: that the loss reaches more is no mistake."""


class _Model(Protocol):
    def trainable_variables(self) -> dict[str, torch.Tensor]: ...

    def make_optimizer(
        self, opt: Factory | torch.optim.Optimizer, variables: Sequence[torch.Tensor], scope: str | None
    ) -> torch.optim.Optimizer: ...


def in_scope(name: str, scope: str) -> bool:
    scope = scope.strip("/")
    return not scope or name == scope or name.startswith(scope + "/")


def make_optimizer(opt: Any, variables: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer over `variables`: `opt` itself if it is one, else what the factory makes."""
    if isinstance(opt, torch.optim.Optimizer):
        _follow(opt)
        return opt
    if not callable(opt):
        raise TaskError(
            f"an optimizer was expected, got {type(opt).__name__}: give a factory such as "
            "functools.partial(torch.optim.SGD, lr=0.1), or a torch.optim.Optimizer"
        )
    made = opt(list(variables))
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskError(f"the optimizer factory {opt!r} returned {type(made).__name__}: return a torch.optim.Optimizer")
    return made


def _follow(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that had tensors before its variables moved to a GPU has them there."""
    for variable, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device != variable.device and value.shape == variable.shape:
                state[name] = value.to(variable.device)


def optimizer_setter(opt: Any) -> Callable[[_Model, str | None], Assignment]:
    """One optimizer for all variables. `opt` is a factory, or a `torch.optim.Optimizer` that has its parameters.

    Tasks that are given the same `opt` share one optimizer and its state.
    """

    def optimizer_fn(model: _Model, task: str | None) -> Assignment:
        del task
        variables = list(model.trainable_variables().values())
        if not variables:
            raise VariableError("there is no variable to train: assign a module to the model, or use plait.layer")
        return {model.make_optimizer(opt, variables, None): (variables, None)}

    return optimizer_fn


def scope_optimizer(scope_to_opt: Mapping[str, Any]) -> Callable[[_Model, str | None], Assignment]:
    """An optimizer for each scope: `scope_optimizer({"tower": adam, "head": sgd})`.

    A scope without a variable and a variable in two scopes are errors; so is one that the loss moves and no scope has.
    """

    def optimizer_fn(model: _Model, task: str | None) -> Assignment:
        del task
        named = model.trainable_variables()
        claimed: dict[str, str] = {}
        assignment: Assignment = {}
        for scope, opt in scope_to_opt.items():
            inside = {name: variable for name, variable in named.items() if in_scope(name, scope)}
            if not inside:
                tops = sorted({name.partition("/")[0] for name in named})
                raise VariableError(f"no trainable variable is in scope {scope!r}: the model has {', '.join(tops)}")
            for name in inside:
                if name in claimed:
                    raise VariableError(
                        f"variable {name!r} is in two scopes, {claimed[name]!r} and {scope!r}: leave one out"
                    )
                claimed[name] = scope
            variables = list(inside.values())
            made = model.make_optimizer(opt, variables, scope)
            before, _ = assignment.get(made, ([], None))  # one that has its parameters may serve several scopes
            assignment[made] = ([*before, *variables], None if before else scope)
        return assignment

    return optimizer_fn
