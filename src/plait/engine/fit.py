"""`Model.fit`: open a session, restore what was saved, run the procedure, keep checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from plait.data.stream import close_all
from plait.engine.budget import add_budget_hooks, said_at_the_end, stop_if_spent
from plait.engine.checkpoints import Checkpoints, ModelState
from plait.engine.functions import ProcedureFn
from plait.engine.hooks import SessionRunHook
from plait.engine.manager import StageManager
from plait.engine.monitored import MonitoredSession
from plait.engine.report import (
    LoggerHook,
    ProgressHook,
    check_finite,
    final_table,
    in_terminal,
    log,
    scope_label,
    show_log,
)
from plait.engine.session import Session
from plait.engine.settings import RunConfig, check_count, read_config
from plait.engine.stage import CotrainStage, LoopStage, Stage
from plait.engine.strategy import Local
from plait.engine.task import TaskScope
from plait.errors import ClusterError, ConfigError, RecoverableError, TaskError
from plait.variables.checkpoint import CheckpointDir

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["FitSettings", "fit"]

MAX_RECOVERIES = 10
"""How often a run is taken up again without having come a step further."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitSettings:
    """The arguments of `fit`; a configuration file overrides those that it names."""

    log_step: int = 100
    project_name: str = "default_prj"
    checkpoint_dir: str | os.PathLike[str] | None = None
    save_steps: int | None = None
    save_secs: float | None = 600
    keep: int | None = 5
    summary_dir: str | os.PathLike[str] | None = None
    hooks: Sequence[SessionRunHook] = ()
    hint: str = "Another project_name starts its stages anew from these weights"
    """What is said when a run had already ended; "": nothing."""

    def __post_init__(self) -> None:
        check_count("log_step", self.log_step)
        for name in ("save_steps", "save_secs", "keep"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), whole=name != "save_secs")

    def with_config(self, config: RunConfig) -> FitSettings:
        named = config.values.get("checkpoint", {})
        changes = {
            "checkpoint_dir" if key == "dir" else key: getattr(config, "checkpoint_dir" if key == "dir" else key)
            for key in named
        }
        if config.log_step is not None:
            changes["log_step"] = config.log_step
        return dataclasses.replace(self, **changes)


def fit(
    model: Model, procedure_fn: ProcedureFn, settings: FitSettings, config: str | os.PathLike[str] | None = None
) -> None:
    run_config = read_config(config)
    settings = settings.with_config(run_config)
    if not callable(procedure_fn):
        raise TaskError(f"fit() got a {type(procedure_fn).__name__}: give a procedure, such as procedure_fn.train()")
    if not model.compiled:
        model.compile()
    _check_workers(model, run_config)
    chief = model.strategy.worker_id == 0
    show_log(quiet=not chief)
    manager = model.stage_mgr = StageManager(
        worker_id=model.strategy.worker_id,
        worker_num=model.strategy.worker_num,
        project_name=settings.project_name,
        model=model,
        strategy=model.strategy,
        config=run_config,
    )
    model.fit_hooks = list(settings.hooks)
    begun, waited = time.monotonic(), _waited(model)
    hooks_before = {scope: list(hooks) for scope, hooks in model.hooks.items()}
    with ExitStack() as stack:
        stack.callback(close_all, model.streams.values())
        loggers = _add_loggers(model, settings.log_step)
        stack.callback(_put_back_hooks, model, hooks_before)
        manager.before_stage = functools.partial(_tell_loggers, loggers)
        add_budget_hooks(model)
        checkpoints = _open_checkpoints(model, settings)
        if model.privacy is not None:
            stack.callback(model.privacy.close)
        if checkpoints is not None:
            stack.callback(checkpoints.close)
            manager.boundary, manager.after_stage = checkpoints.boundary, checkpoints.after_stage
        _run(model, manager, procedure_fn, checkpoints, _hooks_of(model, settings))
    check_finite(model)
    if manager.resumed and not manager.ran and settings.hint:
        log.warning("what is in %s had already ended: nothing was run. %s", settings.checkpoint_dir, settings.hint)
    steps = model.global_step.value - manager.first_step
    if any(model.metric_states.values()):
        seconds = time.monotonic() - begun
        log.info("finished\n%s", final_table(model, steps, seconds, _waited(model) - waited))
    else:
        log.info("finished at global step %d: %d steps", model.global_step.value, steps)
    if model.privacy is not None:
        log.info("%s", said_at_the_end(model))


def _waited(model: Model) -> float:
    return sum(stream.idle for stream in model.streams.values())


def _check_workers(model: Model, config: RunConfig) -> None:
    if config.worker_num not in (1, model.strategy.worker_num):
        raise ConfigError(
            f"the configuration has worker_num={config.worker_num}, but this process is one of "
            f"{model.strategy.worker_num}: start them with `plait launch --workers {config.worker_num} script.py`"
        )


def _run(
    model: Model,
    manager: StageManager,
    procedure_fn: ProcedureFn,
    checkpoints: Checkpoints | None,
    hooks: Sequence[SessionRunHook],
) -> None:
    """The procedure inside a session; a recoverable error takes up the last checkpoint and goes on from there."""

    def create() -> Session:
        if checkpoints is not None:
            _restore(checkpoints, manager.project_name)
        return Session(model, model.global_step, ModelState(model))

    recover_in_place = checkpoints is None and isinstance(model.strategy, Local)
    progress = [hook for hook in hooks if isinstance(hook, ProgressHook)]
    try:
        with MonitoredSession(create, hooks, scoped_hooks=model.hooks, recover=recover_in_place) as session:
            manager.set_monitored_sess(session)
            manager.first_step = model.global_step.value
            stop_if_spent(model, session)
            if checkpoints is None:
                manager.init_arg(session)
                _check_procedure(procedure_fn(model))
                model.strategy.finish()
            else:
                _keep_running(model, manager, procedure_fn, session, checkpoints)
    except RecoverableError as error:
        if checkpoints is not None or recover_in_place:
            raise
        raise ClusterError(f"{error}; without checkpoint_dir= there is nothing to go on from") from error
    finally:
        for hook in progress:
            hook.stop()


def _restore(checkpoints: Checkpoints, project: str) -> None:
    """Others may be lost while this worker comes back with them."""
    for tries in range(1, MAX_RECOVERIES + 1):
        try:
            checkpoints.restore(project)
        except RecoverableError as error:
            if tries == MAX_RECOVERIES:
                raise
            log.warning("%s: %s; taking the last checkpoint up again", type(error).__name__, error)
        else:
            return


def _check_procedure(result: object) -> None:
    """`fit(procedure_fn.train)` calls what makes a procedure, and gets one back: nothing was run."""
    if callable(result):
        raise TaskError("the procedure returned a function: call it first, as in fit(efl.procedure_fn.train())")


def _open_checkpoints(model: Model, settings: FitSettings) -> Checkpoints | None:
    if settings.checkpoint_dir is None:
        return None
    strategy, where = model.strategy, Path(settings.checkpoint_dir)
    if strategy.worker_id > 0 and not strategy.in_step:  # each goes its own way, and comes back to it
        where /= f"worker-{strategy.worker_id}"
    directory = CheckpointDir(where, keep=settings.keep)
    made = Checkpoints(ModelState(model), directory, save_steps=settings.save_steps, save_secs=settings.save_secs)
    if model.privacy is not None and strategy.is_saver():
        model.privacy.keep(where)
    return made


def _keep_running(
    model: Model, manager: StageManager, procedure_fn: ProcedureFn, session: MonitoredSession, checkpoints: Checkpoints
) -> None:
    reached, tries = -1, 0
    while True:
        try:
            if tries:
                session.recreate()
            manager.init_arg(session)
            checkpoints.save_first()
            _check_procedure(procedure_fn(model))
            checkpoints.save_last()
            model.strategy.finish()
        except RecoverableError as error:
            tries = 1 if model.global_step.value > reached else tries + 1
            reached = max(reached, model.global_step.value)
            if tries > MAX_RECOVERIES:
                raise
            log.warning("%s: %s; going on from the last checkpoint", type(error).__name__, error)
        else:
            return


def _add_loggers(model: Model, log_step: int) -> list[LoggerHook]:
    alone = len(model.streams) == 1
    loggers = [LoggerHook(model, scope, log_step, label="" if alone else scope_label(scope)) for scope in model.streams]
    for scope, logger in zip(model.streams, loggers, strict=True):
        model.hooks.setdefault(scope, []).insert(0, logger)  # a step is logged before a hook evaluates or stops
    return loggers


def _tell_loggers(loggers: Sequence[LoggerHook], stage: Stage) -> None:
    """Time counts for the rates of what a stage runs."""
    scope = stage.scope if isinstance(stage, (LoopStage, CotrainStage)) else None
    for logger in loggers:
        logger.stage_begins(scope)


def _put_back_hooks(model: Model, before: dict[TaskScope, list[SessionRunHook]]) -> None:
    model.hooks.clear()
    model.hooks.update(before)


def _hooks_of(model: Model, settings: FitSettings) -> list[SessionRunHook]:
    hooks = list(settings.hooks)
    if settings.summary_dir is not None and model.strategy.worker_id == 0:
        from plait.engine.ready_hooks import SummarySaverHook  # noqa: PLC0415 - brings TensorBoard's writer

        hooks.append(SummarySaverHook(save_steps=settings.log_step, output_dir=settings.summary_dir))
    if in_terminal():
        hooks.append(ProgressHook(model))
    return hooks
