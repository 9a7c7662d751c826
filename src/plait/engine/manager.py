"""The stage manager and its journal: which stages are done, which is running, and where."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from plait.engine.settings import RunConfig
from plait.engine.stage import Stage
from plait.engine.strategy import Local, Strategy
from plait.errors import OutOfRangeError, StageError

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["StageContext", "StageManager"]


class StageContext:
    """What `def my_stage(sess, ctx)` gets as `ctx`: who this worker is, the configuration, and sums over workers."""

    def __init__(self, strategy: Strategy, config: RunConfig, model: Model | None) -> None:
        self._strategy = strategy
        self._config = config
        self._model = model
        self.worker_id = strategy.worker_id
        self.worker_num = strategy.worker_num

    def is_chief(self) -> bool:
        return self.worker_id == 0

    def get(self, *keys: str, default: Any = None) -> Any:
        """A value of the configuration file: `ctx.get("model", "width")`."""
        return self._config.get(*keys, default=default)

    def scope(self) -> AbstractContextManager[None]:
        """Variables of the model can be made and found inside `with ctx.scope():`."""
        if self._model is None:
            raise StageError("ctx.scope() needs a model: run this stage with model.run_stage(...)")
        return self._model.scope()

    def sum(self, value: Any) -> Any:
        return self._strategy.reduce(value, "sum")

    def mean(self, value: Any) -> Any:
        return self._strategy.reduce(value, "mean")

    def min(self, value: Any) -> Any:
        return self._strategy.reduce(value, "min")

    def max(self, value: Any) -> Any:
        return self._strategy.reduce(value, "max")

    def concat(self, value: Any) -> Any:
        return self._strategy.reduce(value, "concat")


class _FunctionStage(Stage):
    """A function as a stage. No checkpoint is made inside it, so after a restart it runs again as a whole."""

    def __init__(self, function: Callable[..., Any], context: StageContext) -> None:
        self.function = function
        self.context = context

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call it as (sess, ctx, ...) if its second parameter is `ctx` or it needs one more, else as (sess, ...).

        The end of the data ends the function, as it ends a loop, and nothing else.
        """
        if _takes_context(self.function, self.sess, *args, **kwargs):
            args = (self.context, *args)
        try:
            return self.function(self.sess, *args, **kwargs)
        except (OutOfRangeError, StopIteration):
            return None


def _takes_context(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return False
    if list(signature.parameters)[1:2] in (["ctx"], ["context"]):
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return True
    return False


def as_recorded(result: Any) -> Any:
    """A stage's result as the journal gives it back after a restart: JSON has lists, no tuples."""
    if isinstance(result, (list, tuple)):
        return [as_recorded(item) for item in result]
    if isinstance(result, dict):
        return {key: as_recorded(item) for key, item in result.items()}
    return result


class StageManager:
    """Runs the stages of a procedure, each once, also across restarts.

    A stage is known by its place in the procedure and its name. The journal is part of every checkpoint: a stage
    counts as done when a checkpoint that says so is on disk.
    """

    def __init__(
        self,
        root_scope: Any = "",
        device: str = "cpu",
        worker_id: int = 0,
        worker_num: int = 1,
        project_name: str = "default_prj",
        name: str = "stage_manager",
        *,
        model: Model | None = None,
        strategy: Strategy | None = None,
        config: RunConfig | None = None,
    ) -> None:
        del root_scope, device  # the journal lives in the checkpoint, not in variables on a device
        self.worker_id = worker_id
        self.worker_num = worker_num
        self.project_name = project_name
        self.name = name
        self.done: list[list[Any]] = []
        """[name, result, where the stage stood at its end], for each stage that ended."""
        self.before_stage: Callable[[Stage], None] = lambda stage: None  # noqa: ARG005 - its shape
        self.after_stage: Callable[[], None] = lambda: None
        self.boundary: Callable[[], None] = lambda: None
        self.resumed = 0
        """How many stages an earlier process had done."""
        self.ran = 0
        """How many were run in this one."""
        self.first_step = 0
        """The global step at which this process began."""
        self._model = model
        self._strategy = strategy or Local()
        self._context = StageContext(self._strategy, config or RunConfig(), model)
        self._sess: Any = None
        self._index = 0
        self._running: tuple[str, Stage] | None = None
        self._interrupted: Mapping[str, Any] | None = None
        self._stopped = False

    def init_arg(self, sess: Any) -> None:
        """Begin the procedure (again): the next `stage` call is its first."""
        self._sess = sess
        self._index = 0
        self._running = None
        if self._stopped:
            sess.request_stop()

    def set_monitored_sess(self, sess: Any) -> None:
        self._sess = sess

    def stage(self, name: str, func: Any, interval: float, *args: Any, **kwargs: Any) -> Any:
        """Run a stage and return its result; one that is in the journal is skipped, and its result returned."""
        if self._running is not None:
            raise StageError(f"stage {name!r} starts inside stage {self._running[0]!r}: stages follow each other")
        if not isinstance(func, Stage) and not callable(func):
            raise StageError(f"stage {name!r} is a {type(func).__name__}: give a function or an efl.Stage")
        index, self._index = self._index, self._index + 1
        stage = func if isinstance(func, Stage) else _FunctionStage(func, self._context)
        if index == len(self.done) - 1 and self.done[index][0] == name and stage.goes_on(self.done[index][2]):
            self._interrupted = {"name": name, "state": self.done.pop()[2]}
        if index < len(self.done):
            return self._skip(index, name, stage)
        self.ran += 1
        self._place(index, name, stage)
        self._running = (name, stage)
        self._strategy.begin_stage(name, stage)
        self.before_stage(stage)
        try:
            result = as_recorded(stage(*args, **kwargs))
            if self._model is not None:
                self._strategy.settle(self._model)
            self._strategy.barrier(name, interval)
        finally:
            self._running = None
        self.done.append([name, result, stage.state_dict()])
        self.after_stage()
        return result

    def _skip(self, index: int, name: str, stage: Stage) -> Any:
        recorded, result, state = self.done[index]
        self._check_name(index, name, recorded)
        stage.load_state_dict(state)
        return result

    def _place(self, index: int, name: str, stage: Stage) -> None:
        """Give the stage its session, and start it: from its beginning, or where it was interrupted."""
        stage.sess = self._sess
        if not isinstance(stage, _FunctionStage):
            stage.boundary = self.boundary
        interrupted, self._interrupted = self._interrupted, None
        if interrupted is None:
            stage.start()
        else:
            self._check_name(index, name, interrupted["name"])
            stage.load_state_dict(interrupted["state"])

    def _check_name(self, index: int, name: str, recorded: str) -> None:
        if name != recorded:
            raise StageError(
                f"stage {index} of project {self.project_name!r} is {recorded!r} in the checkpoint and {name!r} in "
                "this procedure: the procedure has changed; use another project_name to start its stages anew"
            )

    def state_dict(self) -> dict[str, Any]:
        running = None
        if self._running is not None:
            running = {"name": self._running[0], "state": self._running[1].state_dict()}
        stopped = self._sess is not None and self._sess.should_stop()
        return {
            "project": self.project_name,
            "done": [list(entry) for entry in self.done],
            "running": running,
            "stopped": stopped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["project"] != self.project_name:
            return
        self.done = [list(entry) for entry in state["done"]]
        self.resumed = len(self.done)
        self._interrupted = state["running"]
        self._stopped = bool(state["stopped"])
