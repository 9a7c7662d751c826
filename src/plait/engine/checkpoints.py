"""When a run's checkpoints are made, and how a run takes up the last one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from plait.engine.op import GlobalStep
from plait.engine.report import check_finite, log
from plait.engine.state import capture, restore
from plait.errors import MismatchError
from plait.variables.checkpoint import AsyncSaver, CheckpointDir
from plait.variables.tree import snapshot
from plait.version import __version__

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["Checkpoints", "ModelState", "Restorable"]

SECONDS_BETWEEN_STAGES = 10.0
"""A stage that ends sooner after a save than this is not saved by itself: a restart repeats it, to the same bits."""


class Restorable(Protocol):
    """What can be saved as a tree of JSON values and tensors, and brought back from one."""

    global_step: GlobalStep

    def capture(self) -> dict[str, Any]: ...

    def restore(self, tree: Mapping[str, Any], project: str | None) -> bool:
        """Take the state back; False if only what was learnt, because the tree is another project's."""

    def check(self) -> None:
        """Raise if this state is not worth keeping."""


class ModelState:
    """The whole state of a run of a Model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.global_step = model.global_step

    def capture(self) -> dict[str, Any]:
        return capture(self._model)

    def restore(self, tree: Mapping[str, Any], project: str | None) -> bool:
        journal = tree.get("journal") or {}
        same = project is None or journal.get("project") == project
        restore(self._model, tree, positions=same)
        return same

    def check(self) -> None:
        check_finite(self._model)


class Checkpoints:
    """Saves a whole state between steps, in the background, and restores it."""

    def __init__(
        self,
        state: Restorable,
        directory: CheckpointDir,
        *,
        save_steps: int | None = None,
        save_secs: float | None = None,
    ) -> None:
        self._state = state
        self._directory = directory
        self._directory.version = __version__
        self._directory.check_writable()
        self._saver = AsyncSaver(directory)
        self._save_steps = save_steps
        self._save_secs = save_secs
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._changed = False

    def restore(self, project: str | None = None) -> bool:
        """Take up the newest checkpoint that is whole; False if there is none."""
        self._saver.wait()
        found = self._directory.read_latest()
        if found is None:
            return False
        info, tree = found
        try:
            same = self._state.restore(tree, project)
        except MismatchError as error:
            if tree.get("global_step") != 0:
                raise
            log.warning("nothing was trained in %s, and it is of another model: starting anew (%s)", info.path, error)
            return False
        step = self._state.global_step.value
        what = "going on" if same else f"starting project {project!r} with the weights"
        log.info("%s at global step %d, from %s", what, step, info.path)
        self._saved_step = step if same else -1
        self._saved_at = time.monotonic()
        return True

    def boundary(self) -> None:
        """Between two steps: save if it is time."""
        self._changed = True
        steps, secs = self._save_steps, self._save_secs
        if (steps is not None and self._state.global_step.value - self._saved_step >= steps) or (
            secs is not None and time.monotonic() - self._saved_at >= secs
        ):
            self.save()

    def after_stage(self) -> None:
        self._changed = True
        if time.monotonic() - self._saved_at >= SECONDS_BETWEEN_STAGES:
            self.save()

    def save(self) -> None:
        """Copy the state now; write it in the background."""
        self._state.check()
        step = self._state.global_step.value
        self._saver.save(snapshot(self._state.capture()), step=step)
        self._saved_step, self._saved_at, self._changed = step, time.monotonic(), False

    def save_first(self) -> None:
        """A run that dies early comes back to the very state in which it began."""
        if self._saved_step < 0:
            self.save()

    def save_last(self) -> None:
        """Save what is not saved yet, and wait until it is on disk."""
        if self._changed:
            self.save()
        self.wait()

    def wait(self) -> None:
        """Block until the last save is on disk."""
        self._saver.wait()

    def close(self) -> None:
        self._saver.close()
