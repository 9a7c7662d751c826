"""The ready procedures: plain functions over `model.run_stage`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.engine.functions import ProcedureFn
from plait.engine.stage import CotrainStage, LoopStage, eval_loop, train_loop
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from plait.engine.model import Model

log = logging.getLogger("plait")

__all__ = ["cotrain", "eval", "train", "train_and_eval", "train_and_evaluate"]


def train(max_step: int | None = None, *, task: str | None = None) -> ProcedureFn:
    """Train for `max_step` steps, or until the data ends: after one pass, or the `num_epochs` that its source has."""

    def procedure(model: Model) -> None:
        loop = train_loop(model, task, step=max_step, **_passes(model, MODE.TRAIN, task))
        model.run_stage("train", loop)
        if max_step is not None and loop.lstep < max_step and not loop.stopped:
            log.warning(
                "training ended at step %d of max_step=%d, with the data: give its source num_epochs= to read it again",
                loop.lstep,
                max_step,
            )

    return _with_facts(procedure, procedure="train", max_step=max_step, task=task)


def eval(max_step: int | None = None, *, task: str | None = None) -> ProcedureFn:  # noqa: A001 - the document's name
    """Evaluate for `max_step` steps, or until the data ends."""

    def procedure(model: Model) -> None:
        loop = eval_loop(model, task, step=max_step, **_passes(model, MODE.EVAL, task))
        _evaluate(model, loop)

    return _with_facts(procedure, procedure="eval", max_step=max_step, task=task)


def _passes(model: Model, mode: MODE, task: str | None) -> dict[str, Any]:
    """A source that says how many passes it has is read to its end; one that does not, once."""
    stream = model.streams.get(model._scope(mode, task))  # noqa: SLF001 - a friend
    return {"across_passes": stream is not None and stream.source.num_epochs is not None}


def train_and_eval(
    train_step: int | None = None,
    eval_step: int | None = None,
    train_interval: float | None = None,
    eval_interval: float | None = None,
    max_iter: int | None = None,
    *,
    task: str | None = None,
) -> ProcedureFn:
    """Iterate: train for `train_step` steps or `train_interval` seconds, then evaluate likewise; `max_iter` times.

    Without limits, an iteration trains for one pass over the data and evaluates for one. A source's `num_epochs`
    bounds its passes; when they are spent, the iteration in which that happens is the last.
    """

    def procedure(model: Model) -> None:
        learn = train_loop(model, task, step=train_step, seconds=train_interval)
        test = eval_loop(model, task, step=eval_step, seconds=eval_interval)
        _check_bounded("train_and_eval", max_iter, [learn])
        iteration = 0
        while max_iter is None or iteration < max_iter:
            model.run_stage("train", learn)
            if learn.stopped:
                break
            _evaluate(model, test)
            iteration += 1
            if learn.spent or test.stopped:
                break

    limits = {"train_step": train_step, "eval_step": eval_step, "max_iter": max_iter}
    intervals = {"train_interval": train_interval, "eval_interval": eval_interval}
    return _with_facts(procedure, procedure="train_and_eval", task=task, **limits, **intervals)


train_and_evaluate = train_and_eval


def cotrain(
    train_step: int | None = None,
    eval_step: int | None = None,
    max_iter: int | None = None,
    task_select_ratio: Mapping[str, float] | None = None,
    *,
    seed: int = 0,
) -> ProcedureFn:
    """Train several tasks together: each step's task is drawn by `task_select_ratio`; then evaluate each.

    An iteration trains for `train_step` steps, or until every task's pass over its data has ended.
    """

    def procedure(model: Model) -> None:
        ratio = _checked_ratio(model, task_select_ratio)
        learn = CotrainStage(model, ratio, train_step, seed)
        tests = [eval_loop(model, task, step=eval_step) for task in ratio if task in model.eval_ops]
        streams = [model.streams[TaskScope(MODE.TRAIN, task)] for task in ratio]
        if max_iter is None and any(stream.source.num_epochs is None for stream in streams):
            raise ConfigError(f"cotrain() would never end: {_UNBOUNDED}")
        iteration = 0
        while max_iter is None or iteration < max_iter:
            model.run_stage("train", learn)
            if learn.stopped:
                break
            for test in tests:
                _evaluate(model, test)
            iteration += 1
            if learn.spent or any(test.stopped for test in tests):
                break

    return _with_facts(procedure, procedure="cotrain", train_step=train_step, eval_step=eval_step, max_iter=max_iter)


def _with_facts(procedure: ProcedureFn, /, **facts: Any) -> ProcedureFn:
    """Parties of a federation compare what their procedures are."""
    procedure.facts = facts  # type: ignore[attr-defined] # a function may have attributes
    return procedure


_UNBOUNDED = "its input starts a new pass at each iteration. Pass max_iter=, or give the source num_epochs="


def _check_bounded(what: str, max_iter: int | None, loops: list[LoopStage]) -> None:
    if max_iter is None and any(loop.stream is None or loop.stream.source.num_epochs is None for loop in loops):
        raise ConfigError(f"{what}() would never end: {_UNBOUNDED}")


def _checked_ratio(model: Model, given: Mapping[str, float] | None) -> dict[str | None, float]:
    known = [task for task in model.tasks() if task in model.loss_fns]
    ratio: dict[str | None, float] = dict.fromkeys(known, 1.0) if given is None else dict(given.items())
    for task, share in ratio.items():
        if task not in known:
            raise TaskError(f"task_select_ratio names {task!r}: the tasks that train are {known}")
        if not isinstance(share, (int, float)) or not 0 < share < float("inf"):
            raise ConfigError(
                f"task_select_ratio[{task!r}] is {share!r}: write a number above 0; leave a task out for 0"
            )
    if not ratio:
        raise ConfigError("task_select_ratio is empty: name at least one task")
    return ratio


def _evaluate(model: Model, loop: LoopStage) -> None:
    model.run_stage("eval" if loop.scope.task is None else f"eval {loop.scope.task}", loop)
