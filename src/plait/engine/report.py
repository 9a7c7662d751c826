"""What people see: one log line a `log_step`, progress in a terminal, a table at the end."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.engine.hooks import SessionRunContext, SessionRunHook, SessionRunValues
from plait.engine.metrics import Latest
from plait.engine.task import MODE, TaskScope
from plait.errors import NanLossError

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["LoggerHook", "check_finite", "final_table", "log", "log_line"]

log = logging.getLogger("plait")


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg] # it takes one only from Python 3.11 on
    """Writes to what `sys.stderr` is at that moment: a progress line puts itself there, to keep below the log."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show_log() -> None:
    """Send plait's log to stderr as `INFO:plait:...`, unless the program has set logging up itself."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
        log.addHandler(handler)
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)


def log_line(step: int, global_step: int, rate: float, values: Mapping[str, float], label: str = "") -> str:
    r"""The documented line: fields separated by tabs, steps counted from 0, three decimals.

    >>> log_line(10, 10, 42.0868, {"loss": 3.4512}).split("\t")
    ['step: 10(global step: 10)', 'sample/sec: 42.087', 'loss: 3.451']
    """
    fields = [f"{label}step: {step}(global step: {global_step})", f"sample/sec: {rate:.3f}"]
    return "\t".join([*fields, *(f"{name}: {value:.3f}" for name, value in values.items())])


def scope_label(scope: TaskScope) -> str:
    """What stands before a line that is not plain training: `[eval] `, `[click] `, `[click eval] `."""
    words = [scope.task] if scope.task is not None else []
    if scope.mode is MODE.EVAL:
        words.append("eval")
    return f"[{' '.join(words)}] " if words else ""


def check_finite(model: Model) -> None:
    """Raise if the last loss of a task is not a number. Reads one value a task: not for every step."""
    for scope, states in model.metric_states.items():
        if scope.mode is MODE.TRAIN and scope.task in model.losses:
            state, stream = states.get("loss", model.loss_metrics[scope.task]), model.streams[scope]
            # a run that only looks at the loss moves the stream, and leaves the metric empty
            seen = state.value is not None if isinstance(state, Latest) else bool(stream.position or stream.epoch)
            value = float(state.result())
            if seen and not math.isfinite(value):
                raise NanLossError(
                    f"the loss of {scope} is {value} at global step {model.global_step.value}: lower the learning "
                    "rate, clip gradients or look for bad input; the last checkpoint is from before"
                )


class LoggerHook(SessionRunHook):
    """Logs a task's metrics every `log_step` steps of it, and stops at a loss that is not a number."""

    def __init__(self, model: Model, scope: TaskScope, log_step: int, label: str = "") -> None:
        self._model = model
        self._scope = scope
        self._log_step = max(1, log_step)
        self._label = label
        self._step = 0
        self._next = 0
        self._then = time.perf_counter()
        self._since = 0

    def restart_clock(self) -> None:
        """Called when a stage begins: what happened between stages does not count for the rate."""
        self._then = time.perf_counter()
        self._since = self._step

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        step = self._step
        self._step = step + 1
        if step == self._next:
            self._show(step)

    def _show(self, step: int) -> None:
        self._next = step + self._log_step
        model = self._model
        if self._scope.mode is MODE.TRAIN:
            check_finite(model)
        now = time.perf_counter()
        rows = (model._now.sample.batch_size if model._now.sample is not None else None) or 1  # noqa: SLF001 - a friend
        rate = rows * (step + 1 - self._since) / max(now - self._then, 1e-9)
        self._then, self._since = now, step + 1
        if log.isEnabledFor(logging.INFO):
            values = model.metric_values(self._scope.mode or MODE.TRAIN, self._scope.task)
            done = model.global_step.value
            shown = done - 1 if self._scope.mode is MODE.TRAIN else done
            log.info("%s", log_line(step, max(shown, 0), rate, values, self._label))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._next = int(state["step"]), int(state["next"])


class ProgressHook(SessionRunHook):
    """A moving line in a terminal: steps so far and their rate."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._shown = 0.0
        self._progress: Any = None
        self._bar: Any = None

    def begin(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - only in a terminal
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar = self._progress.add_task("starting", total=None)
        self._progress.start()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        now = time.monotonic()
        if now - self._shown > 0.1:
            self._shown = now
            self._progress.update(self._bar, description=f"global step {self._model.global_step.value}")

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def in_terminal() -> bool:
    return sys.stderr.isatty()


def final_table(model: Model, seconds: float) -> str:
    """One row for each task and mode: its metrics at the end."""
    from rich.console import Console  # noqa: PLC0415 - once a run
    from rich.table import Table  # noqa: PLC0415

    table = Table(title=f"{model.global_step.value} steps in {seconds:.1f} s")
    table.add_column("task")
    table.add_column("mode")
    table.add_column("metrics")
    for scope, states in model.metric_states.items():
        shown = "  ".join(f"{name} {float(state.result()):.4f}" for name, state in states.items())
        table.add_row(scope.task or "-", str(scope.mode).lower(), shown)
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
