"""When a run's checkpoints are made, and how a run takes up the last one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from plait.engine.op import GlobalStep
from plait.engine.report import check_finite, log
from plait.engine.state import capture, restore
from plait.engine.strategy import Local, Strategy
from plait.errors import MismatchError
from plait.variables.checkpoint import AsyncSaver, CheckpointDir
from plait.variables.tree import snapshot
from plait.version import __version__

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["Checkpoints", "ModelState", "Restorable"]

SECONDS_BETWEEN_STAGES = 10.0
"""A stage that ends sooner after a save than this is not saved by itself: a restart repeats it, to the same bits."""
MAX_SECONDS_BETWEEN_LOOKS = 5.0
"""How far apart workers agree, at least, on whether it is time to save."""


class Restorable(Protocol):
    """What can be saved as a tree of JSON values and tensors, and brought back from one."""

    global_step: GlobalStep

    def capture(self, directory: str | None = None) -> dict[str, Any]: ...

    def restore(self, tree: Mapping[str, Any], project: str | None, directory: str | None = None) -> bool:
        """Take the state back; False if only what was learnt, because the tree is another project's."""

    def check(self) -> None:
        """Raise if this state is not worth keeping."""


class ModelState:
    """The whole state of a run of a Model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.global_step = model.global_step
        self.strategy = model.strategy

    def capture(self, directory: str | None = None) -> dict[str, Any]:
        return capture(self._model, directory)

    def restore(self, tree: Mapping[str, Any], project: str | None, directory: str | None = None) -> bool:
        journal = tree.get("journal") or {}
        same = project is None or journal.get("project") == project
        restore(self._model, tree, positions=same, directory=directory)
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
        self._strategy: Strategy = getattr(state, "strategy", None) or Local()
        self._directory = directory
        self._directory.version = __version__
        if self._strategy.is_saver():
            self._directory.check_writable()
        self._saver = AsyncSaver(directory)
        self._save_steps = save_steps
        self._save_secs = save_secs
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._look_at = 0
        """The global step at which workers next agree on whether it is time."""
        self._changed = False

    def restore(self, project: str | None = None) -> bool:
        """Take up the newest checkpoint that is whole; False if there is none."""
        self._saver.wait()
        self._strategy.rejoin()
        found = self._newest()
        if found is None:
            self._saved_step = -1
            return False
        path, tree = found["path"], found["tree"]
        try:
            same = self._state.restore(tree, project, str(self._directory.path))
        except MismatchError as error:
            if tree.get("global_step") != 0:
                raise
            log.warning("nothing was trained in %s, and it is of another model: starting anew (%s)", path, error)
            return False
        step = self._state.global_step.value
        what = "going on" if same else f"starting project {project!r} with the weights"
        log.info("%s at global step %d, from %s", what, step, path)
        self._look_at = step
        self._saved_step = step if same else -1
        self._saved_at = time.monotonic()
        return True

    def _newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that is whole; workers in step all get the chief's."""
        strategy = self._strategy
        found = strategy.newest(self._directory) if strategy.is_saver() else None
        newest = None if found is None else {"path": str(found[0].path), "tree": found[1]}
        return cast("dict[str, Any] | None", strategy.tell(newest)) if strategy.in_step else newest

    def boundary(self) -> None:
        """Between two steps: save if it is time, and all workers are where the chief is."""
        self._changed = True
        if self._strategy.is_due(self._is_due):
            self.save()

    def _is_due(self, ahead: int = 0) -> bool:
        """Whether it is time to save, or will be so many steps further on."""
        steps, secs = self._save_steps, self._save_secs
        return (
            (steps is not None and self._state.global_step.value + ahead - self._saved_step >= steps)
            or (secs is not None and self._is_time(secs))
        ) and self._strategy.whole()

    def _is_time(self, secs: float) -> bool:
        """Whether `secs` have passed since the last save; by the chief's clock, looked at now and then."""
        if not self._strategy.in_step:
            return time.monotonic() - self._saved_at >= secs
        step = self._state.global_step.value
        if step < self._look_at:
            return False
        elapsed = max(time.monotonic() - self._saved_at, 1e-3)
        ahead = (step - max(self._saved_step, 0)) / elapsed * min(secs / 10, MAX_SECONDS_BETWEEN_LOOKS)
        due, self._look_at = self._strategy.tell([elapsed >= secs, step + max(1, int(ahead))])
        return bool(due)

    def after_stage(self) -> None:
        self._changed = True
        due = time.monotonic() - self._saved_at >= SECONDS_BETWEEN_STAGES
        due = self._strategy.tell(due) if self._strategy.in_step else due
        if self._strategy.shared and self._strategy.lead(due):
            self.save()

    def save(self) -> None:
        """Copy the state now; write it in the background. Workers in step all call this, and the chief writes."""
        self._state.check()
        step, directory, strategy = self._state.global_step.value, str(self._directory.path), self._strategy
        tree = self._state.capture(directory)
        if strategy.is_saver():
            cluster = tree.get("cluster", {})
            self._saver.save(
                snapshot(tree),
                step=step,
                ready=lambda: strategy.durable(cluster, directory),
                done=lambda path: strategy.saved(cluster, path),
            )
        self._saved_step, self._saved_at, self._changed = step, time.monotonic(), False

    def save_first(self) -> None:
        """A run that dies early comes back to the very state in which it began."""
        if self._strategy.lead(self._saved_step < 0):
            self.save()
            self._strategy.begun(self.wait)

    def save_last(self) -> None:
        """Save what is not saved yet, and wait until it is on disk."""
        if self._strategy.lead(self._changed):
            self.save()
        self.wait()

    def wait(self) -> None:
        """Block until the last save is on disk."""
        self._saver.wait()

    def close(self) -> None:
        self._saver.close()
