"""A user function and what it registers: variables, placeholders and hooks at the build; fresh values at each step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait.data import Sample
from plait.engine.task import Frame, TaskScope, local
from plait.errors import FetchError, FunctionError
from plait.variables.store import VariableFrame, VariableStore, current

if TYPE_CHECKING:
    from plait.engine.hooks import SessionRunHook
    from plait.engine.op import Op, Placeholder

__all__ = ["Now", "UserCall", "current_call", "feeds_of_this_run", "find_placeholder"]


class _Feeds(threading.local):
    now: Mapping[Op, Any] = {}


_feeds = _Feeds()


def current_call() -> UserCall | None:
    """The user function that is running, if one is."""
    call: UserCall | None = local.frame.call
    return call


def feeds_of_this_run(feeds: Mapping[Op, Any]) -> Mapping[Op, Any]:
    """Set what this run was fed; returns what was set before."""
    previous = _feeds.now
    _feeds.now = feeds
    return previous


def find_placeholder(tensor: torch.Tensor) -> Placeholder | None:
    """The placeholder that a tensor inside a function stands for."""
    return getattr(tensor, "_plait_placeholder", None)


def _standing_for(placeholder: Placeholder, tensor: torch.Tensor) -> torch.Tensor:
    tensor._plait_placeholder = placeholder  # type: ignore[attr-defined] # noqa: SLF001 - the way back from a tensor
    return tensor


class Now:
    """What changes from step to step; kept out of the Model, whose attributes are slow to set."""

    __slots__ = ("_modes", "_module", "sample", "training")

    def __init__(self, module: nn.Module) -> None:
        self.training: bool | None = None
        """Whether this step trains."""
        self.sample: Sample | None = None
        """This step's batch."""
        self._module = module
        self._modes: list[tuple[nn.Module, bool]] = []

    def enter_mode(self, training: bool) -> None:
        """Set the modules' mode; they come back from evaluation as they were."""
        if training is self.training:
            return
        self.training = training
        if training:
            for module, was_training in self._modes:
                module.training = was_training
            self._modes = []
        else:
            self._modes = [(module, module.training) for module in self._module.modules()]
            for module, _ in self._modes:
                module.training = False

    def leave(self) -> None:
        """No step runs any more: the modules are as they were, and nothing trains."""
        if self.training is False:
            self.enter_mode(True)
        self.training = self.sample = None

    def left_in_evaluation(self) -> list[str]:
        """The modules that the user has set to evaluate, as in `model.norm.eval()`, by their paths."""
        before = dict(self._modes)
        return [path for path, module in self._module.named_modules() if not before.get(module, module.training)]

    def load_modes(self, evaluating: list[str]) -> None:
        self.leave()
        for path, module in self._module.named_modules():
            module.training = path not in evaluating


class UserCall:
    """Calls one function of the user's with a batch, in its task scope, with the model's variables at hand.

    What is created by order of call (placeholders, hooks) is created at the build; at later calls the n-th of a kind
    is the n-th of the build.
    """

    __slots__ = (
        "_cursor",
        "_frame",
        "_fresh",
        "_variables",
        "building",
        "fn",
        "fresh_hooks",
        "hooks",
        "now",
        "placeholders",
        "scope",
        "store",
    )

    def __init__(self, fn: Callable[[Any], Any], scope: TaskScope, store: VariableStore, now: Now) -> None:
        self.fn = fn
        self.scope = scope
        self.store = store
        self.now = now
        self.building = False
        self.placeholders: list[Placeholder] = []
        self.hooks: list[SessionRunHook] = []
        self.fresh_hooks: list[SessionRunHook] = []
        """Those that the last call made, whose tensors the living ones have now."""
        self._cursor = 0
        self._fresh: list[SessionRunHook] | None = None
        """Hooks that this call made; None where the build made none, so that a step looks no further."""
        self._frame = Frame(scope, self)
        self._variables = VariableFrame(store)

    def __call__(self, sample: Any) -> Any:
        frame, variables = local.frame, current.frame
        local.frame, current.frame = self._frame, self._variables
        self.now.sample = sample
        self._cursor = 0
        store = self.store
        if store.step_collections:
            store.step_collections = {}  # what a function collects, it collects anew
        try:
            result = self.fn(sample)
            if self._fresh is not None:
                self._pair_hooks()
        except BaseException:
            if self._fresh is not None:
                self._fresh = []  # the call may be repeated, and makes them again
            raise
        finally:
            local.frame, current.frame = frame, variables
        return result

    def begin_again(self) -> None:
        """Inside a call: forget what it has made, since the function is called once more."""
        self._cursor = 0
        self.store.step_collections = {}
        if self._fresh is not None:
            self._fresh = []

    def build(self, sample: Any) -> Any:
        """The first call, in which things are made."""
        self.building = True
        try:
            with self.store.building(self.scope.task):
                return self(sample)
        finally:
            self.building = False
            self._fresh = [] if self.hooks else None

    def placeholder(self, dtype: torch.dtype, shape: Sequence[int | None] | None, name: str | None) -> torch.Tensor:
        from plait.engine.op import Placeholder  # noqa: PLC0415 - Ops are above calls, except here

        index = self._cursor
        self._cursor += 1
        if self.building:
            made = Placeholder(dtype, shape, name or f"placeholder {index} of {self.scope}")
            self.placeholders.append(made)
            sizes = [1 if size is None else size for size in shape or ()]
            return _standing_for(made, torch.zeros(sizes, dtype=dtype, device=self.store.device))
        if index >= len(self.placeholders):
            raise FunctionError(
                f"the function for {self.scope} made {index + 1} placeholders in this step but {index} at the build: "
                "make the same ones at every call"
            )
        found = self.placeholders[index]
        try:
            fed: torch.Tensor = _feeds.now[found]
        except KeyError:
            found.fn()
            raise FetchError("unreachable") from None
        return _standing_for(found, fed.to(self.store.device).view_as(fed))  # a new tensor: two may be fed the same

    def add_hooks(self, hooks: Sequence[SessionRunHook]) -> None:
        """At the build these hooks begin to live; later they only bring this step's tensors to the living ones."""
        if self.building:
            self.hooks.extend(hooks)
            return
        if self._fresh is None:
            self._fresh = []
        self._fresh.extend(hooks)

    def _pair_hooks(self) -> None:
        fresh, self._fresh = self._fresh or [], [] if self.hooks else None
        if [type(hook).__name__ for hook in fresh] != [type(hook).__name__ for hook in self.hooks]:
            raise FunctionError(
                f"the function for {self.scope} made the hooks {[type(h).__name__ for h in fresh]} in this step but "
                f"{[type(h).__name__ for h in self.hooks]} at the build: make the same ones, in the same order"
            )
        self.fresh_hooks = fresh
        self.rebind_hooks(fresh)

    def rebind_hooks(self, fresh: Sequence[SessionRunHook]) -> None:
        for living, new in zip(self.hooks, fresh, strict=True):
            living.rebind(new)
