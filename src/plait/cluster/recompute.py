"""Modules that keep nothing for the backward pass: it computes them again."""

from __future__ import annotations

import difflib
import functools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.errors import ConfigError
from plait.variables.store import ROOT, VariableFrame, current, variable_name

__all__ = ["recompute"]


def recompute(model: nn.Module, scopes: Sequence[str]) -> None:
    """From now on, the modules of these scopes are computed again in the backward pass, and keep only their inputs.

    A scope is the name of a module, with "/", or a pattern such as `tower/block*`. A module that it names is one unit:
    while the gradient passes through it, all of it is there. So name the parts of a network, not the whole. Where the
    name is that of a mere scope, which nobody calls, each module in it is a unit.

    Gradients, random states and buffers, such as moving statistics, come out as they would without it. A unit stays the
    same object with the same names; only its class changes, to a subclass.
    """
    named = {variable_name(path): module for path, module in model.named_modules(remove_duplicate=False)}
    named = {name: module for name, module in named.items() if name not in ("", ROOT)}
    chosen: dict[str, nn.Module] = {}
    for scope in scopes:
        pattern = scope.strip("/")
        found = [name for name in named if fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(f"recompute has {scope!r}, which is the name of no module.{_nearest(pattern, named)}")
        units = {name: unit for above in found for name, unit in _units(above, named[above])}
        if not units:
            raise ConfigError(f"recompute has {scope!r}, where there are only variables: name modules")
        chosen |= units
    for name, module in chosen.items():
        inside_another = any(name.startswith(other + "/") for other in chosen)
        if not inside_another and not isinstance(module, _Recomputed):
            cls = type(module)
            named_alike = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            module.__class__ = type(cls.__name__, (_Recomputed, cls), named_alike)


def _units(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module itself if it can be called, else those in it that can."""
    if type(module).forward is not nn.Module.forward:
        yield name, module
        return
    for child, inner in module.named_children():
        yield from _units(f"{name}/{child}", inner)


def _nearest(name: str, names: Iterable[str]) -> str:
    every = list(names)
    near = difflib.get_close_matches(name, every, n=5, cutoff=0.4) or every[:5]
    return f" Nearest: {', '.join(near)}" if near else " The model has none."


class _Recomputed(nn.Module):
    """What goes before a module's own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(super().forward, **kwargs)
        if not (self.training and torch.is_grad_enabled()):
            return forward(*args)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=functools.partial(_contexts, self),
        )


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _Before(module)


_Values = tuple[dict[str, Any], dict[str, Any]]
"""A module's table of buffers or parameters, and values for some of its names."""


class _Before:
    """What a forward pass depends on beside its inputs, as it is now; inside a `with`, it is so again.

    What the pass changes in there (moving statistics, counters) is changed in copies and forgotten: it was changed
    once already. A second backward pass through the same graph may enter again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._random = _random_state()
        self._frame = current.frame
        buffers = [inner._buffers for inner in module.modules()]  # noqa: SLF001 - nn.Module's own tables
        self._buffers: list[_Values] = [
            (table, {name: _copy(value) for name, value in table.items()}) for table in buffers
        ]
        parameters = [inner._parameters for inner in module.modules()]  # noqa: SLF001 - same
        self._replaced: list[_Values] = [(table, _not_its_own(table)) for table in parameters]
        self._outside: tuple[Any, VariableFrame, list[_Values]] | None = None

    def __enter__(self) -> None:
        tables = [
            (table, {name: table[name] for name in values}) for table, values in [*self._buffers, *self._replaced]
        ]
        self._outside = _random_state(), current.frame, tables
        for table, values in self._buffers:
            table.update({name: _copy(value) for name, value in values.items()})
        for table, values in self._replaced:
            table.update(values)
        current.frame = self._frame
        _set_random_state(self._random)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._outside is not None  # noqa: S101 - ours: `with` enters before it leaves
        state, current.frame, tables = self._outside
        self._outside = None
        for table, values in tables:
            table.update(values)
        _set_random_state(state)


def _random_state() -> tuple[Any, Any]:
    """Python's and NumPy's; torch's own are `checkpoint`'s matter."""
    return random.getstate(), np.random.get_state()  # noqa: NPY002 - the global state is meant


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002 - same


def _not_its_own(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors that only stand for parameters at the moment, as in `torch.func.functional_call`."""
    return {
        name: value for name, value in parameters.items() if value is not None and not isinstance(value, nn.Parameter)
    }


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()
