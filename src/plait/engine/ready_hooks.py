"""Ready hooks, with TensorFlow's names and meaning."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from plait.engine.checkpoints import Checkpoints, Restorable
from plait.engine.hooks import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from plait.engine.op import GlobalStep, Op
from plait.engine.report import log
from plait.engine.session import Session
from plait.errors import ConfigError, NanLossError, UnavailableError
from plait.variables.checkpoint import CheckpointDir

__all__ = [
    "CheckpointSaverHook",
    "FeedFnHook",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "LoggingTensorHook",
    "NanTensorHook",
    "ProfilerHook",
    "SecondOrStepTimer",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
]


class SecondOrStepTimer:
    """Says when something is due: every so many steps, or every so many seconds; first at once."""

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        if (every_secs is None) == (every_steps is None):
            raise ConfigError(f"every_secs={every_secs}, every_steps={every_steps}: give exactly one of the two")
        self._secs = every_secs
        self._steps = every_steps
        self._last_step: int | None = None
        self._last_time = 0.0

    def should_trigger_for_step(self, step: int) -> bool:
        if self._last_step is None:
            return True
        if step == self._last_step:
            return False
        if self._steps is not None:
            return step >= self._last_step + self._steps
        return time.monotonic() >= self._last_time + (self._secs or 0.0)

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Note that it happened; returns the seconds and steps since the time before, None at the first time."""
        now = time.monotonic()
        since = (None, None) if self._last_step is None else (now - self._last_time, step - self._last_step)
        self._last_step, self._last_time = step, now
        return since


class _Counting(SessionRunHook):
    """A hook that needs to know the global step."""

    step: GlobalStep

    def after_create_session(self, session: Session, coord: Any) -> None:  # noqa: ARG002 - a hook's signature
        self.step = session.global_step


class StopAtStepHook(_Counting):
    """Stops after `num_steps` more steps, or at the global step `last_step`."""

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ConfigError(f"StopAtStepHook(num_steps={num_steps}, last_step={last_step}): give exactly one")
        self._num_steps = num_steps
        self._last_step = last_step

    def after_create_session(self, session: Session, coord: Any) -> None:
        super().after_create_session(session, coord)
        if self._last_step is None:
            self._last_step = self.step.value + (self._num_steps or 0)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        if self._last_step is not None and self.step.value >= self._last_step:
            run_context.request_stop()

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._num_steps is not None and state.get("last_step") is not None:
            self._last_step = int(state["last_step"])


class LoggingTensorHook(SessionRunHook):
    """Logs values every `every_n_iter` runs or `every_n_secs` seconds, and at the end if asked.

    `tensors` is a dict or list of Ops. Made inside a loss_fn, it may hold that step's tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Sequence[Any],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        named = (
            tensors if isinstance(tensors, Mapping) else {getattr(t, "name", str(i)): t for i, t in enumerate(tensors)}
        )
        self.tensors = dict(named)
        self._timer = None
        if every_n_iter is not None or every_n_secs is not None:
            self._timer = SecondOrStepTimer(every_n_secs, every_n_iter)
        elif not at_end:
            raise ConfigError("LoggingTensorHook needs every_n_iter, every_n_secs or at_end=True")
        self._at_end = at_end
        self._formatter = formatter
        self._iteration = 0
        self._due = False

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:  # noqa: ARG002
        self._due = self._timer is not None and self._timer.should_trigger_for_step(self._iteration)
        return SessionRunArgs(_ops(self.tensors)) if self._due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        if self._timer is not None and self._due:
            elapsed, _ = self._timer.update_last_triggered_step(self._iteration)
            self._log({**self.tensors, **(run_values.results or {})}, elapsed)
        self._iteration += 1

    def end(self, session: Session) -> None:
        if self._at_end:
            self._log({**self.tensors, **session.run(_ops(self.tensors))}, None)

    def _log(self, values: dict[str, Any], elapsed: float | None) -> None:
        if self._formatter is not None:
            log.info("%s", self._formatter(values))
            return
        shown = ", ".join(f"{name} = {_shown(value)}" for name, value in values.items())
        log.info("%s%s", shown, "" if elapsed is None else f" ({elapsed:.3f} sec)")


def _ops(tensors: Mapping[str, Any]) -> dict[str, Op]:
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Op)}


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"tensor of shape {list(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class StepCounterHook(_Counting):
    """Logs how many global steps pass in a second."""

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: Any = None,
    ) -> None:
        self._timer = SecondOrStepTimer(every_n_secs, every_n_steps if every_n_secs is None else None)
        self._output_dir = output_dir
        self._writer = summary_writer

    def after_create_session(self, session: Session, coord: Any) -> None:
        super().after_create_session(session, coord)
        if self._writer is None and self._output_dir is not None:
            self._writer = open_writer(self._output_dir, self.step.value)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        step = self.step.value
        if self._timer.should_trigger_for_step(step):
            elapsed, steps = self._timer.update_last_triggered_step(step)
            if elapsed is not None and steps is not None:
                rate = steps / max(elapsed, 1e-9)
                log.info("global_step/sec: %g", rate)
                if self._writer is not None:
                    self._writer.add_scalar("global_step/sec", rate, step)

    def end(self, session: Session) -> None:  # noqa: ARG002
        if self._writer is not None and self._output_dir is not None:
            self._writer.close()


class CheckpointSaverHook(SessionRunHook):
    """Saves at the start, every `save_steps` steps or `save_secs` seconds, and at the end.

    `saver` is what is saved: `plait.train.Saver({...})` or a Model's state; without one, the session's Model.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Restorable | None = None,
        checkpoint_basename: str = "model.ckpt",
        scaffold: None = None,
        listeners: None = None,
        save_graph_def: bool = True,
        *,
        keep: int | None = 5,
    ) -> None:
        del checkpoint_basename, save_graph_def  # checkpoints have names of their own, and there is no graph
        _refuse("CheckpointSaverHook", "scaffold", scaffold, "give what is to be saved in saver=")
        _refuse("CheckpointSaverHook", "listeners", listeners, "write a SessionRunHook with after_run")
        if (save_secs is None) == (save_steps is None):
            raise ConfigError(f"CheckpointSaverHook(save_secs={save_secs}, save_steps={save_steps}): give exactly one")
        self._dir = checkpoint_dir
        self._secs = save_secs
        self._steps = save_steps
        self._saver = saver
        self._keep = keep
        self._checkpoints: Checkpoints | None = None

    def after_create_session(self, session: Session, coord: Any) -> None:  # noqa: ARG002
        if self._checkpoints is None:
            saver = self._saver or session.state
            if saver is None:
                raise ConfigError("CheckpointSaverHook has nothing to save: pass saver=, or use a session of a Model")
            directory = CheckpointDir(self._dir, keep=self._keep)
            self._checkpoints = Checkpoints(saver, directory, save_steps=self._steps, save_secs=self._secs)
            self._checkpoints.save()

    def wait(self) -> None:
        """Block until the last save is on disk."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        if self._checkpoints is not None:
            self._checkpoints.boundary()

    def end(self, session: Session) -> None:  # noqa: ARG002
        if self._checkpoints is not None:
            self._checkpoints.save_last()
            self._checkpoints.close()


def _refuse(hook: str, name: str, value: object, instead: str) -> None:
    """TensorFlow's argument is there, so that calls by position or name work; a value for it would have no effect."""
    if value is not None:
        raise ConfigError(f"{hook}({name}={value!r}): plait has none; {instead}")


class SummarySaverHook(_Counting):
    """Writes scalars for TensorBoard: `summary_op` (Ops by name), or the metrics of the session's Model."""

    may_stop = False

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: Any = None,
        scaffold: None = None,
        summary_op: Mapping[str, Op] | None = None,
    ) -> None:
        _refuse("SummarySaverHook", "scaffold", scaffold, "give the Ops by name in summary_op=")
        if output_dir is None and summary_writer is None:
            raise ConfigError("SummarySaverHook needs output_dir= or summary_writer=")
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._output_dir = output_dir
        self._writer = summary_writer
        self._ops = dict(summary_op or {})

    def after_create_session(self, session: Session, coord: Any) -> None:
        super().after_create_session(session, coord)
        if self._writer is None and self._output_dir is not None:
            self._writer = open_writer(self._output_dir, self.step.value)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:  # noqa: ARG002
        due = self._ops and self._timer.should_trigger_for_step(self.step.value + 1)
        return SessionRunArgs(self._ops) if due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        step = self.step.value
        asked_too_late = self._ops and run_values.results is None  # the seconds were over during the run
        if asked_too_late or not self._timer.should_trigger_for_step(step):
            return
        self._timer.update_last_triggered_step(step)
        values = run_values.results if self._ops else _metrics_of(run_context.session)
        for name, value in (values or {}).items():
            self._writer.add_scalar(name, float(value), step)

    def end(self, session: Session) -> None:  # noqa: ARG002
        self.close()

    def close(self) -> None:
        """End the writer and its thread, if they are this hook's own; also for runs that failed."""
        if self._output_dir is not None and self._writer is not None:
            self._writer.close()


def _metrics_of(session: Session) -> dict[str, float]:
    model: Any = session.model
    if model is None:
        return {}
    return {
        "/".join(filter(None, (str(scope.mode).lower(), scope.task, name))): float(metric.result())
        for scope, states in model.metric_states.items()
        for name, metric in states.items()
    }


def open_writer(directory: str | os.PathLike[str], step: int) -> Any:
    """A TensorBoard writer; what an interrupted run wrote after `step` is hidden."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - heavy

    try:
        return SummaryWriter(os.fspath(directory), purge_step=step)
    except OSError as error:
        raise ConfigError(f"summaries cannot be written to {directory}: {error}; name another directory") from error


class NanTensorHook(SessionRunHook):
    """Looks at a loss after every run, and ends training when it is not a number."""

    def __init__(self, loss_tensor: Op, fail_on_nan_loss: bool = True) -> None:
        self._loss = loss_tensor
        self._fail = fail_on_nan_loss

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:  # noqa: ARG002
        return SessionRunArgs(self._loss)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if math.isfinite(float(run_values.results)):
            return
        text = f"{self._loss.name} is {float(run_values.results)}"
        if self._fail:
            raise NanLossError(f"{text}: lower the learning rate, clip gradients or look for bad input")
        log.warning("%s: stopping", text)
        run_context.request_stop()


class FeedFnHook(SessionRunHook):
    """Feeds every run what `feed_fn()` returns: {placeholder: value}."""

    def __init__(self, feed_fn: Callable[[], Mapping[Any, Any]]) -> None:
        self._feed_fn = feed_fn

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:  # noqa: ARG002
        return SessionRunArgs(None, self._feed_fn())


class FinalOpsHook(SessionRunHook):
    """Runs Ops at the end; `final_ops_values` holds their values afterwards."""

    def __init__(self, final_ops: Any, final_ops_feed_dict: Mapping[Any, Any] | None = None) -> None:
        self._ops = final_ops
        self._feeds = final_ops_feed_dict
        self.final_ops_values: Any = None

    def end(self, session: Session) -> None:
        if self._ops is not None:
            self.final_ops_values = session.run(self._ops, self._feeds)


class GlobalStepWaiterHook(_Counting):
    """Lets a worker start only when the others have brought the global step to `wait_until_step`."""

    def __init__(self, wait_until_step: int, *, timeout: float = 7200, interval: float = 0.5) -> None:
        self._wait_until = wait_until_step
        self._timeout = timeout
        self._interval = interval
        self._waited = False
        self._begun: float | None = None

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:  # noqa: ARG002
        if self._waited:
            return None
        said = time.monotonic()
        self._begun = begun = self._begun or said  # a session that was made anew waits no longer
        while self.step.value < self._wait_until:
            now = time.monotonic()
            where = f"for global step {self._wait_until} since {now - begun:.0f} s, it is {self.step.value}"
            if now - begun > self._timeout:
                raise UnavailableError(f"waited {where}: no other worker trains? Lower wait_until_step")
            if now - said > 10:
                said = now
                log.info("waiting %s", where)
            time.sleep(self._interval)
        self._waited = True
        return None


class ProfilerHook(_Counting):
    """Profiles one run every so often and writes it as a Chrome trace, `timeline-<step>.json`."""

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] = "",
        show_dataflow: bool = True,
        show_memory: bool = False,
    ) -> None:
        self._timer = SecondOrStepTimer(save_secs, save_steps)
        self._output_dir = Path(output_dir)
        self._shapes = show_dataflow
        self._memory = show_memory
        self._profile: Any = None

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:  # noqa: ARG002
        self._discard()
        if self._timer.should_trigger_for_step(self.step.value + 1):
            self._profile = torch.profiler.profile(
                record_shapes=self._shapes, profile_memory=self._memory, acc_events=True
            )
            self._profile.start()
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            step = self.step.value
            self._timer.update_last_triggered_step(step)
            self._output_dir.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._output_dir / f"timeline-{step}.json"))

    def end(self, session: Session) -> None:  # noqa: ARG002
        self._discard()

    def _discard(self) -> None:
        """Stop the profile of a run that did not end well: the data was over, or the session made anew."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
