"""What people see: one log line a `log_step`, progress in a terminal, a table at the end."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from plait.engine.hooks import SessionRunContext, SessionRunHook, SessionRunValues
from plait.engine.task import MODE, TaskScope
from plait.errors import NanLossError

if TYPE_CHECKING:
    from plait.engine.model import Model
    from plait.engine.session import Session

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
        if shown.value is not None:
            _check_loss(task, float(shown.result()), model.global_step.value)


def _check_loss(task: str | None, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise NanLossError(
            f"the loss of {TaskScope(MODE.TRAIN, task)} is {value}, noticed at global step "
            f"{step} (losses are looked at when they are logged or saved, and at the end): "
            "lower the learning rate, clip gradients, or look for bad input. No checkpoint was made of it"
        )


class _Values:
    """Numbers on their way from a GPU, which goes on working; those of the CPU are there."""

    __slots__ = ("_copied", "_values", "facts", "names", "tasks")

    def __init__(
        self, values: Sequence[torch.Tensor], names: list[str], tasks: list[str | None], facts: tuple[int, int, int]
    ) -> None:
        self.names, self.tasks, self.facts = names, tasks, facts
        self._values, self._copied = list(values), None
        on_gpu = [value for value in values if value.is_cuda]
        if on_gpu:
            together = torch.stack([value.to(torch.float64).reshape(()) for value in on_gpu])
            host = torch.empty(len(on_gpu), dtype=torch.float64, pin_memory=True).copy_(together, non_blocking=True)
            places = [place for place, value in enumerate(values) if value.is_cuda]
            for place, number in zip(places, host.unbind(), strict=True):
                self._values[place] = number
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it unannotated
            self._copied.record(torch.cuda.current_stream(together.device))

    def ready(self) -> bool:
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call] # same

    def numbers(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return [float(value) for value in self._values]


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
        self._waiting: _Values | None = None

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
        if self._waiting is not None and self._waiting.ready():
            self._show()
        if step == self._next:
            self._next = step + self._log_step
            self._look(step)

    def _look(self, step: int) -> None:
        """Take down what there is to show, and show it: at once, or when a GPU has come to it."""
        if self._waiting is not None:
            self._show()
        model, scope = self._model, self._scope
        seen = model.loss_metrics if scope.mode is MODE.TRAIN else {}
        losses = {task: state for task, state in seen.items() if state.value is not None}
        states = model.metric_states.get(scope, {}) if log.isEnabledFor(logging.INFO) else {}
        values = [*(state.result() for state in states.values()), *(state.result() for state in losses.values())]
        rows = (model._now.sample.batch_size if model._now.sample is not None else None) or 1  # noqa: SLF001 - a friend
        rows *= model.strategy.worker_num if model.strategy.in_step else 1
        self._waiting = _Values(values, list(states), list(losses), (step, model.global_step.value, rows))
        if self._waiting.ready():
            self._show()

    def _show(self) -> None:
        assert self._waiting is not None  # noqa: S101 - the callers have looked
        waiting, self._waiting = self._waiting, None
        step, done, rows = waiting.facts
        found = waiting.numbers()
        for task, value in zip(waiting.tasks, found[len(waiting.names) :], strict=True):
            _check_loss(task, value, done)
        now = time.perf_counter()
        rate = rows * (step + 1 - self._since) / max(now - self._then, 1e-9)
        self._then, self._since = now, step + 1
        if log.isEnabledFor(logging.INFO):
            values = dict(zip(waiting.names, found, strict=False))
            shown = done - 1 if self._scope.mode is MODE.TRAIN else done
            log.info("%s", log_line(step, max(shown, 0), rate, values, self._label))

    def end(self, session: Session) -> None:  # noqa: ARG002
        if self._waiting is not None:
            self._show()

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


def final_table(model: Model, steps: int, seconds: float, waited: float = 0.0) -> str:
    """One row for each task and mode: its metrics at the end. `steps` are those of this process.

    `waited` are the seconds of `seconds` in which computing stood still for want of a batch.
    """
    from rich.console import Console  # noqa: PLC0415 - once a run
    from rich.table import Table  # noqa: PLC0415

    title = f"global step {model.global_step.value}: {steps} steps in {seconds:.1f} s"
    if steps:
        title += f", input-bound {min(1.0, waited / max(seconds, 1e-9)):.0%}"
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
