"""Which task, and whether it trains or evaluates: `MODE`, `TaskScope` and the current one."""

from __future__ import annotations

import threading
from enum import Enum
from types import TracebackType
from typing import Any, Final, NamedTuple, cast

__all__ = ["DEFAULT_MODE", "MODE", "Frame", "TaskScope", "current_task_scope", "local", "task_scope"]


class MODE(str, Enum):
    """What a call is about: training or evaluation."""

    TRAIN = "TRAIN"
    EVAL = "EVAL"

    def __str__(self) -> str:
        return self.value


class _CurrentMode(str):
    """The default of `mode=` arguments: equal to `MODE.TRAIN`, as documented, yet known by identity.

    So a call that says nothing gets the current scope's mode, and one that says TRAIN gets TRAIN.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(MODE.TRAIN)

    __hash__ = str.__hash__


DEFAULT_MODE: Final[MODE] = cast("MODE", _CurrentMode(MODE.TRAIN.value))


class TaskScope(NamedTuple):
    """One task in one mode; `None` stands for what the surroundings say."""

    mode: MODE | None = None
    task: str | None = None

    def __str__(self) -> str:
        return f"{self.mode or MODE.TRAIN}{f' of task {self.task!r}' if self.task is not None else ''}"


class Frame:
    """What surrounds the code that runs: the current scope, and the user function, if one is being called."""

    __slots__ = ("call", "scope")

    def __init__(self, scope: TaskScope, call: Any = None) -> None:
        self.scope = scope
        self.call = call


class _Local(threading.local):
    frame = Frame(TaskScope())


local = _Local()


def current_task_scope() -> TaskScope:
    """The scope that calls without a mode or task fall back to.

    >>> with task_scope(MODE.EVAL, "click"):
    ...     current_task_scope().task
    'click'
    """
    return local.frame.scope


class task_scope:  # noqa: N801 - a function in the document; a class so that `with` restores the scope
    """Set the current scope. As a statement it stays set; as `with task_scope(...):` it lasts for the block."""

    __slots__ = ("_previous", "scope")

    def __init__(self, mode: MODE | None = None, task: str | None = None) -> None:
        self._previous = local.frame
        self.scope = TaskScope(None if mode is None else MODE(mode), task)
        local.frame = Frame(self.scope, self._previous.call)

    def __enter__(self) -> TaskScope:
        return self.scope

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        local.frame = self._previous
