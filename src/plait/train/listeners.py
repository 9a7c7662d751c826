"""`CheckpointSaverListener`: who is told when a checkpoint is made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from plait.engine.hooks import SessionRunContext, SessionRunHook, SessionRunValues
from plait.engine.session import Session
from plait.variables.checkpoint import CheckpointDir

__all__ = ["CheckpointSaverListener", "ListenersHook"]


class CheckpointSaverListener:
    """Told before and after each checkpoint; derive from it and write what you need."""

    def begin(self) -> None:
        """Training begins."""

    def before_save(self, session: Session, global_step_value: int) -> None:
        """The state of this step is about to be copied."""

    def after_save(self, session: Session, global_step_value: int) -> bool | None:
        """It is on disk; True ends the training."""

    def end(self, session: Session, global_step_value: int) -> None:
        """Training has ended."""


class ListenersHook(SessionRunHook):
    """Tells listeners of checkpoints. A checkpoint asks every hook for its state: then one is being made."""

    def __init__(self, listeners: Sequence[CheckpointSaverListener], directory: str | os.PathLike[str]) -> None:
        self._listeners = list(listeners)
        self._directory = CheckpointDir(directory)
        self._session: Session | None = None
        self._due: list[int] = []
        """Steps whose checkpoints are being written."""

    def begin(self) -> None:
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Session, coord: Any) -> None:  # noqa: ARG002
        self._session = session

    def state_dict(self) -> dict[str, Any]:
        if self._session is not None:
            step = self._session.global_step.value
            for listener in self._listeners:
                listener.before_save(self._session, step)
            self._due.append(step)
        return {}

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        if self._due and self._tell(run_context.session, {info.step for info in self._directory.list()}):
            run_context.request_stop()

    def end(self, session: Session) -> None:
        self._tell(session, set(self._due))  # all that was begun has been waited for
        for listener in self._listeners:
            listener.end(session, session.global_step.value)

    def _tell(self, session: Session, saved: set[int]) -> bool:
        done = [step for step in self._due if step in saved]
        self._due = [step for step in self._due if step not in saved]
        answers = [listener.after_save(session, step) for step in done for listener in self._listeners]
        return any(answer is True for answer in answers)
