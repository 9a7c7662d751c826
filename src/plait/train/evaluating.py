"""`train_and_evaluate`: one run that trains, and evaluates the living model now and then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait.data import Sample
from plait.engine.model import Model
from plait.engine.stage import EvalStage, train_loop
from plait.errors import ConfigError
from plait.train.config import EvalSpec, TrainSpec
from plait.train.estimator import Estimator
from plait.train.inputs import FixedSource, call_named, sample_of
from plait.train.program import EVAL, TRAIN, Program
from plait.train.spec import ModeKeys

__all__ = ["train_and_evaluate"]


class _NowAndThen(EvalStage):
    """An evaluation that is left out if the last one was not long ago, and is not the last."""

    throttle = 0.0
    last = False
    began: float | None = None
    """When the evaluation before this began."""
    ran = False
    """Whether it was made in this process."""

    reopen: Callable[[], None] = staticmethod(lambda: None)
    """Each evaluation reads its input anew."""

    def start(self) -> None:
        super().start()
        if self.stream is not None and (self.stream.epoch or self.stream.position):
            self.reopen()

    def goes_on(self, state: Mapping[str, Any]) -> bool:
        del state
        return False

    def run(self, feed_dict: Mapping[Any, Any] | None = None) -> dict[str, float] | None:
        now = time.monotonic()
        due = self.last or self.began is None or now - self.began >= self.throttle
        if self.model is not None and self.model.strategy.in_step:
            due = bool(self.model.strategy.tell(due))
        if not due:
            return None
        self.began, self.ran = now, True
        return super().run(feed_dict)


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any], list[str | None]]:
    """Train, and evaluate at every checkpoint, but not more often than `throttle_secs`, and at the end.

    Nothing is rebuilt or read from disk for an evaluation. A run that was killed goes on where it was. Returns the
    metrics of the last evaluation and what the exporters gave then.
    """
    for what, value, kind in (("train_spec", train_spec, TrainSpec), ("eval_spec", eval_spec, EvalSpec)):
        if not isinstance(value, kind):
            raise ConfigError(f"{what} is a {type(value).__name__}: write plait.train.{kind.__name__}(...)")
    program = estimator.prepare_training(train_spec.input_fn)
    run = _Run(estimator, program, train_spec, eval_spec)
    with program.ended_on_error():
        data = run.data()
        if eval_spec.steps is None and isinstance(data.source, FixedSource):
            raise ConfigError("the input_fn of the EvalSpec gives one batch for ever: pass steps=")
    with program.mode(ModeKeys.EVAL, data):
        program.model.hooks[EVAL] = [*program.model.hooks[EVAL], *(eval_spec.hooks or ())]
        estimator.fit(run.procedure, train_spec.hooks, train_spec.saving_listeners)
    if run.stopped or not run.found:  # stopped by a hook: then nothing runs in that session any more
        run.found = estimator.evaluate(eval_spec.input_fn, eval_spec.steps, eval_spec.hooks, name=eval_spec.name)
    return run.found, run.export(final=True)


class _Run:
    """One call of `train_and_evaluate`."""

    def __init__(self, estimator: Estimator, program: Program, train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
        self.estimator = estimator
        self.program = program
        self.train_spec = train_spec
        self.eval_spec = eval_spec
        self.found: dict[str, Any] = {}
        self.stopped = False

    def data(self) -> Sample:
        """What the next evaluation reads."""
        named = {"mode": ModeKeys.EVAL, "params": self.estimator.params, "config": self.estimator.config}
        return sample_of(call_named(self.eval_spec.input_fn, **named))

    def procedure(self, model: Model) -> None:
        """Training up to a checkpoint, evaluation, and so on; the journal has the same stages after a restart."""
        config, limit, spec = self.estimator.config, self.train_spec.max_steps, self.eval_spec
        first = int(model.run_stage("begin", lambda _: model.global_step.value))
        passes = {scope: model.streams[scope].source.num_epochs is not None for scope in (TRAIN, EVAL)}
        learn = train_loop(model, None, seconds=config.save_checkpoints_secs, across_passes=passes[TRAIN])
        test = _NowAndThen(model.eval_op(), step=spec.steps, across_passes=passes[EVAL], scope=EVAL, model=model)
        test.throttle = spec.throttle_secs
        test.reopen = lambda: self.program.evaluate_again(self.data())
        every = config.save_checkpoints_steps
        while not test.last:
            left = [count for count in (every, None if limit is None else limit - first - learn.lstep) if count]
            learn.step = min(left) if left else None
            if limit is not None and first + learn.lstep >= limit:
                return
            model.run_stage("train", learn)
            self.stopped = learn.stopped
            if self.stopped:
                return
            test.last = learn.finish or (limit is not None and first + learn.lstep >= limit)
            test.ran = False
            metrics = model.run_stage("eval", test)
            if metrics is not None:
                self._evaluated(metrics, first + learn.lstep, fresh=test.ran, final=test.last)

    def _evaluated(self, metrics: Mapping[str, float], step: int, *, fresh: bool, final: bool) -> None:
        if not fresh:  # an earlier process made it, wrote it down and exported
            self.found = {**metrics, "global_step": step}
            return
        self.found = self.estimator.evaluated(metrics, self.eval_spec.name)
        if not final:
            self.export(final=False)

    def export(self, *, final: bool) -> list[str | None]:
        """What the exporters give for the last evaluation."""
        given = self.eval_spec.exporters
        exporters: Sequence[Any] = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
        if exporters and self.estimator.model_dir is None:
            raise ConfigError("exporters write below model_dir: give the Estimator one")
        if not exporters or self.estimator.model.strategy.worker_id > 0:
            return []
        where = os.path.join(str(self.estimator.model_dir), "export")  # noqa: PTH118 - TensorFlow hands on texts
        newest = self.estimator.latest_checkpoint()
        return [
            one.export(self.estimator, os.path.join(where, one.name), newest, self.found, final)  # noqa: PTH118
            for one in exporters
        ]
