"""`variable_scope`, `get_variable`, `layer` and collections: variables where they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from plait.errors import VariableError
from plait.variables.store import Reuse, VariableFrame, VariableStore, current, variable_name

__all__ = ["GraphKeys", "add_to_collection", "get_collection", "get_variable", "layer", "var_scope", "variable_scope"]

M = TypeVar("M", bound=nn.Module)


class GraphKeys:
    """Names of collections."""

    GLOBAL_VARIABLES = "variables"
    TRAINABLE_VARIABLES = "trainable_variables"
    REGULARIZATION_LOSSES = "regularization_losses"
    UPDATE_OPS = "update_ops"
    SUMMARIES = "summaries"


class variable_scope:  # noqa: N801 - TensorFlow's name
    """`with plait.variable_scope("tower"):` puts what is made inside under `tower/`.

    `reuse=True` hands out what exists and creates nothing, `plait.AUTO_REUSE` does either; inner scopes inherit both.
    """

    __slots__ = ("_frame", "_previous")

    def __init__(self, name_or_scope: str | variable_scope, reuse: Reuse = None) -> None:
        outer = current.frame
        prefix = (
            name_or_scope.name + "/" if isinstance(name_or_scope, variable_scope) else f"{outer.prefix}{name_or_scope}/"
        )
        self._frame = VariableFrame(outer.store, prefix, reuse or outer.reuse, outer.force_dtype)
        self._previous = outer

    @property
    def name(self) -> str:
        return self._frame.prefix[:-1]

    @property
    def reuse(self) -> Reuse:
        return self._frame.reuse

    def __enter__(self) -> variable_scope:
        self._previous = current.frame
        current.frame = self._frame
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current.frame = self._previous

    def reuse_variables(self) -> None:
        """From here on, hand out what exists."""
        self._frame.reuse = True


@contextmanager
def var_scope(force_dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside, variables are kept in `force_dtype`, and handed out in the type in which they are asked for."""
    outer = current.frame
    current.frame = VariableFrame(outer.store, outer.prefix, outer.reuse, force_dtype)
    try:
        yield
    finally:
        current.frame = outer


def _store() -> VariableStore:
    store = current.frame.store
    if store is None:
        raise VariableError(
            "no model is at hand: call this inside a loss_fn, eval_fn or model_fn, or in `with model.scope():`"
        )
    return store


def layer(name: str, factory: Callable[..., M], *args: Any, **kwargs: Any) -> M:
    """Get or create the module `name` in the current scope: `plait.layer("fc1", nn.Linear, 64, 128)(x)`."""
    frame = current.frame
    if frame.store is not None:
        found: M | None = frame.store.made_earlier(frame.prefix + name)
        if found is not None:
            return found
    kept = frame.force_dtype

    def create() -> M:
        made = factory(*args, **kwargs)
        return made if kept is None else made.to(kept)

    made: M = _store().get(frame.prefix + name, "layer", create, frame.reuse)
    return made


Initializer = torch.Tensor | float | Callable[[torch.Tensor], Any] | None


def get_variable(
    name: str,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    initializer: Initializer = None,
    regularizer: Callable[[torch.Tensor], torch.Tensor] | None = None,
    trainable: bool = True,
    collections: Sequence[str] | None = None,
) -> torch.Tensor:
    """Get or create one tensor in the current scope.

    `initializer` is a tensor, a number, or a function that fills a tensor in place, such as `nn.init.zeros_`;
    without one, Glorot's uniform initialisation for two and more dimensions, zeros for fewer.
    """
    store = _store()
    full = current.frame.prefix + name

    kept = current.frame.force_dtype or dtype

    def create() -> torch.Tensor:
        value = _initial(full, shape, kept, initializer).to(store.device)
        made = nn.Parameter(value, requires_grad=trainable) if value.is_floating_point() else value
        for key in collections or ():
            store.collections.setdefault(key, []).append(made)
        return made

    variable: torch.Tensor = store.get(full, "variable", create, current.frame.reuse)
    if shape is not None and list(variable.shape) != list(shape):
        raise VariableError(f"variable {full!r} has shape {list(variable.shape)}, not {list(shape)}")
    if regularizer is not None:
        store.step_collections.setdefault(GraphKeys.REGULARIZATION_LOSSES, []).append(regularizer(variable))
    return variable if kept is dtype else variable.to(dtype)


def _initial(name: str, shape: Sequence[int] | None, dtype: torch.dtype, initializer: Initializer) -> torch.Tensor:
    if isinstance(initializer, torch.Tensor):
        return initializer.detach().clone().to(dtype)
    if shape is None:
        raise VariableError(f"variable {name!r} is new and has no shape: pass shape=, or a tensor as initializer=")
    value = torch.zeros(list(shape), dtype=dtype)
    if isinstance(initializer, (int, float)):
        value.fill_(initializer)
    elif initializer is not None:
        with torch.no_grad():
            initializer(value)
    elif value.dim() > 1 and value.is_floating_point():
        nn.init.xavier_uniform_(value)
    return value


def add_to_collection(key: str, value: Any) -> None:
    """Add to a collection of this call: what a function adds at each step, `get_collection` gives in that step."""
    _store().step_collections.setdefault(key, []).append(value)


def get_collection(key: str, scope: str | None = None) -> list[Any]:
    """What was collected under `key`; variables may be narrowed to those whose name starts with `scope`."""
    store = _store()
    if key in (GraphKeys.GLOBAL_VARIABLES, GraphKeys.TRAINABLE_VARIABLES):
        named = [*store.module.named_parameters(), *store.module.named_buffers()]
        return [
            value
            for path, value in named
            if (key == GraphKeys.GLOBAL_VARIABLES or value.requires_grad)
            and variable_name(path).startswith(scope or "")
        ]
    return [*store.collections.get(key, []), *store.step_collections.get(key, [])]
