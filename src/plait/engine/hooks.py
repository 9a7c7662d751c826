"""What a hook is, and when each of its methods is called.

::

    for hook in hooks: hook.begin()                               # once
    session = create()
    for hook in hooks: hook.after_create_session(session, None)   # again after each recovery
    while not session.should_stop():
        for hook in hooks: hook.before_run(context)               # may add fetches and feeds
        values = session.run(all the fetches, all the feeds)      # end of data: leave the loop
        for hook in hooks: hook.after_run(context, values)        # may call context.request_stop()
    for hook in hooks: hook.end(session)                          # at a normal end; end of data is one

Which hooks override `before_run` and `after_run` is found out once. What falls due at the same step happens in one
order: train, log, evaluate, best and early stop, checkpoint, export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from plait.engine.session import Session

__all__ = ["SessionRunArgs", "SessionRunContext", "SessionRunHook", "SessionRunValues", "overrides"]


class SessionRunArgs(NamedTuple):
    """What a run is asked for: Ops in any nesting, and values for placeholders."""

    fetches: Any = None
    feed_dict: Mapping[Any, Any] | None = None
    options: Any = None


class SessionRunValues(NamedTuple):
    """What `before_run` asked for, as values, in the same nesting."""

    results: Any = None
    options: Any = None
    run_metadata: Any = None


class SessionRunContext:
    """What a hook sees of the run: what the caller asked for, the session, and a way to stop the loop."""

    __slots__ = ("_feed_dict", "_fetches", "session", "stop_requested")

    def __init__(self, fetches: Any, feed_dict: Mapping[Any, Any] | None, session: Session) -> None:
        self._fetches = fetches
        self._feed_dict = feed_dict
        self.session = session
        self.stop_requested = False

    @property
    def original_args(self) -> SessionRunArgs:
        """What the caller of `run` asked for."""
        return SessionRunArgs(self._fetches, self._feed_dict)

    def request_stop(self) -> None:
        """Make `should_stop()` True after this run."""
        self.stop_requested = True


class SessionRunHook:
    """The base of hooks; override what you need."""

    may_stop = True
    """False: it never asks to stop, or a step later will do. Parties of a federation can then tell of steps ahead."""

    def begin(self) -> None:
        """Called once, before the session exists."""

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Called when a session has been created, and again after each recovery."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each run; what is returned is added to its fetches and feeds."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each run that ended well."""

    def end(self, session: Session) -> None:
        """Called at a normal end, while the session is still open."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this hook: JSON values and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def rebind(self, fresh: SessionRunHook) -> None:
        """Take this step's tensors from a hook that a user function made again in this step."""
        for name, value in vars(fresh).items():
            if _holds_tensors(value):
                setattr(self, name, value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


def overrides(hook: SessionRunHook, method: str) -> bool:
    return getattr(type(hook), method) is not getattr(SessionRunHook, method)
