"""What people see: one log line a `log_step`, progress in a terminal, a table at the end."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.engine.hooks import SessionRunContext, SessionRunHook, SessionRunValues
from plait.engine.task import MODE, TaskScope
from plait.errors import NanLossError

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["LoggerHook", "check_finite", "final_table", "log", "log_line"]

log = logging.getLogger("plait")


_moving: list[Any] = []
"""The progress line that is being shown, if one is."""


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg] # it takes one only from Python 3.11 on
    """Writes to what `sys.stderr` is at that moment; a progress line makes room, and comes back below."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        for progress in _moving:
            progress.stop()
        super().emit(record)
        for progress in _moving:
            progress.start()


def show_log(*, quiet: bool = False) -> None:
    """Let plait's log be seen: where the program has set logging to go, or else on stderr as `INFO:plait:...`.

    `quiet` is for workers whose lines would repeat the chief's: only their warnings are seen.
    """
    if log.level == logging.NOTSET:
        log.setLevel(logging.WARNING if quiet else logging.INFO)
    if not log.handlers and not logging.getLogger().handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
        log.addHandler(handler)


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
    for task, shown in model.loss_metrics.items():
        value = 0.0 if shown.value is None else float(shown.result())
        if not math.isfinite(value):
            raise NanLossError(
                f"the loss of {TaskScope(MODE.TRAIN, task)} is {value}, noticed at global step "
                f"{model.global_step.value} (losses are looked at when they are logged or saved, and at the end): "
                "lower the learning rate, clip gradients, or look for bad input. No checkpoint was made of it"
            )


class LoggerHook(SessionRunHook):
    """Logs a task's metrics every `log_step` steps of it, and stops at a loss that is not a number."""

    may_stop = False  # it raises, which is another thing

    def __init__(self, model: Model, scope: TaskScope, log_step: int, label: str = "") -> None:
        self._model = model
        self._scope = scope
        self._log_step = max(1, log_step)
        self._label = label
        self._step = 0
        self._next = 0
        self._then = time.perf_counter()
        self._paused: float | None = None
        self._since = 0

    def stage_begins(self, scope: TaskScope | None) -> None:
        """Let the clock run in stages of this task and mode only; None: a stage that may run anything."""
        now = time.perf_counter()
        runs = scope is None or (scope.mode is self._scope.mode and scope.task in (None, self._scope.task))
        if runs and self._paused is not None:
            self._then += now - self._paused
            self._paused = None
        elif not runs and self._paused is None:
            self._paused = now

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
        rows *= model.strategy.worker_num if model.strategy.in_step else 1
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
        self._then, self._since = time.perf_counter(), self._step


class ProgressHook(SessionRunHook):
    """A moving line in a terminal: steps so far and their rate."""

    may_stop = False

    def __init__(self, model: Model) -> None:
        self._model = model
        self._shown = 0.0
        self._progress: Any = None
        self._bar: Any = None

    def begin(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - only in a terminal
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, transient=True, redirect_stderr=False)
        self._bar = self._progress.add_task("starting", total=None)
        self._progress.start()
        _moving.append(self._progress)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        now = time.monotonic()
        if now - self._shown > 0.1:
            self._shown = now
            self._progress.update(self._bar, description=f"global step {self._model.global_step.value}")

    def stop(self) -> None:
        if self._progress in _moving:
            _moving.remove(self._progress)
            self._progress.stop()


def in_terminal() -> bool:
    return sys.stderr.isatty()


def final_table(model: Model, steps: int, seconds: float) -> str:
    """One row for each task and mode: its metrics at the end. `steps` are those of this process."""
    from rich.console import Console  # noqa: PLC0415 - once a run
    from rich.table import Table  # noqa: PLC0415

    title = f"global step {model.global_step.value}: {steps} steps in {seconds:.1f} s"
    table = Table()
    table.add_column("task")
    table.add_column("mode")
    table.add_column("metrics")
    for scope, states in model.metric_states.items():
        values = {name: float(state.result()) for name, state in states.items()}
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items() if not math.isnan(value)) or "-"
        table.add_row(scope.task or "-", str(scope.mode).lower(), shown)
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return f"{title}\n{captured.get().rstrip()}"
