"""A user function and what it registers: variables, placeholders and hooks at the build; fresh values at each step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from plait.engine.task import TaskScope, swap_scope
from plait.errors import FetchError, FunctionError
from plait.variables.store import VariableStore

if TYPE_CHECKING:
    from plait.engine.hooks import SessionRunHook
    from plait.engine.op import Op, Placeholder

__all__ = ["UserCall", "current_call", "feeds_of_this_run", "find_placeholder"]


class _State(threading.local):
    call: UserCall | None = None
    feeds: Mapping[Op, Any] = {}


_state = _State()


def current_call() -> UserCall | None:
    """The user function that is running, if one is."""
    return _state.call


def feeds_of_this_run(feeds: Mapping[Op, Any]) -> Mapping[Op, Any]:
    """Set what this run was fed; returns what was set before."""
    previous = _state.feeds
    _state.feeds = feeds
    return previous


def find_placeholder(tensor: torch.Tensor) -> Placeholder | None:
    """The placeholder that a tensor of the build stands for."""
    return getattr(tensor, "_plait_placeholder", None)


class UserCall:
    """Calls one function of the user's in its task scope, with the model's variables at hand.

    What is created by order of call (placeholders, hooks) is created at the build; at later calls the n-th of a kind
    is the n-th of the build.
    """

    __slots__ = ("_cursor", "_fresh", "building", "fn", "hooks", "placeholders", "scope", "store")

    def __init__(self, fn: Callable[..., Any], scope: TaskScope, store: VariableStore) -> None:
        self.fn = fn
        self.scope = scope
        self.store = store
        self.building = False
        self.placeholders: list[Placeholder] = []
        self.hooks: list[SessionRunHook] = []
        self._cursor = 0
        self._fresh: list[SessionRunHook] | None = None

    def __call__(self, *args: Any) -> Any:
        previous_call = _state.call
        previous_scope = swap_scope(self.scope)
        previous_store = self.store.enter(self.scope.task, self.building)
        _state.call = self
        self._cursor = 0
        try:
            result = self.fn(*args)
            if self._fresh is not None:
                self._pair_hooks()
        finally:
            _state.call = previous_call
            VariableStore.leave(previous_store)
            swap_scope(previous_scope)
        return result

    def placeholder(self, dtype: torch.dtype, shape: Sequence[int | None] | None, name: str | None) -> torch.Tensor:
        from plait.engine.op import Placeholder  # noqa: PLC0415 - Ops are above calls, except here

        index = self._cursor
        self._cursor += 1
        if self.building:
            made = Placeholder(dtype, shape, name or f"placeholder {index} of {self.scope}")
            self.placeholders.append(made)
            value = torch.zeros([1 if size is None else size for size in shape or ()], dtype=dtype)
            value._plait_placeholder = made  # type: ignore[attr-defined] # noqa: SLF001 - the way back from tensor
            return value
        if index >= len(self.placeholders):
            raise FunctionError(
                f"the function for {self.scope} made {index + 1} placeholders in this step but {index} at the build: "
                "make the same ones at every call"
            )
        found = self.placeholders[index]
        try:
            fed: torch.Tensor = _state.feeds[found]
        except KeyError:
            found.fn()
            raise FetchError("unreachable") from None
        return fed

    def add_hooks(self, hooks: Sequence[SessionRunHook]) -> None:
        """At the build these hooks begin to live; later they only bring this step's tensors to the living ones."""
        if self.building:
            self.hooks.extend(hooks)
            return
        if self._fresh is None:
            self._fresh = []
        self._fresh.extend(hooks)

    def _pair_hooks(self) -> None:
        fresh, self._fresh = self._fresh or [], None
        if [type(hook).__name__ for hook in fresh] != [type(hook).__name__ for hook in self.hooks]:
            raise FunctionError(
                f"the function for {self.scope} made the hooks {[type(h).__name__ for h in fresh]} in this step but "
                f"{[type(h).__name__ for h in self.hooks]} at the build: make the same ones, in the same order"
            )
        for living, new in zip(self.hooks, fresh, strict=True):
            living.rebind(new)
