"""Stages: the parts of a procedure that are done once, and survive a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from plait.engine.strategy import Local, Strategy
from plait.engine.task import MODE, TaskScope, task_scope
from plait.engine.update import LeftError
from plait.errors import OutOfRangeError, StageError
from plait.rng import derive_seed
from plait.variables import bank

if TYPE_CHECKING:
    from plait.data import Stream
    from plait.engine.model import Model

__all__ = ["CotrainStage", "EvalStage", "LoopStage", "ModelBank", "Stage", "eval_loop", "train_loop"]


log = logging.getLogger("plait")


class Stage:
    """A part of a procedure. Derive from it and write `run`; calling a stage runs it."""

    sess: Any = None
    """The session that runs this stage."""
    boundary: Callable[[], None] = staticmethod(lambda: None)
    """To be called between steps, when all state is whole: checkpoints are made here."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no run(): write one, `def run(self, ...)`")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def start(self) -> None:
        """Called before a run that is not the continuation of an interrupted one."""

    def goes_on(self, state: Mapping[str, Any]) -> bool:  # noqa: ARG002 - for subclasses
        """Whether a stage that ended in `state` has more to do now, because it was given a higher limit."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Where the stage is: JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there."""


class LoopStage(Stage):
    """Runs Ops until the data ends, or for `step` steps, or `seconds` seconds; then it suspends, and may run again.

    `finish` becomes True when the data ended or the session was told to stop. With `across_passes`, the end of a pass
    over the data is no end as long as the input has passes left.
    """

    def __init__(
        self,
        run_ops: Any = None,
        *,
        step: int | None = None,
        seconds: float | None = None,
        across_passes: bool = False,
        scope: TaskScope | None = None,
        model: Model | None = None,
    ) -> None:
        for what, value in (("step", step), ("seconds", seconds)):
            if value is not None and value <= 0:
                raise StageError(f"LoopStage({what}={value}): write a number above 0, or None for no limit")
        self.run_ops = run_ops
        self.step = step
        self.seconds = seconds
        self.across_passes = across_passes
        self.scope = scope or TaskScope(MODE.TRAIN)
        self.model = model
        self.finish = False
        self.spent = False
        """No pass over the data was left at the end of the last run."""
        self.stopped = False
        """The session had been told to stop at the end of the last run."""
        self.left = False
        """Another worker ended the last run, in the middle of a step of this one's."""
        self.lstep = 0
        """Steps in all runs together."""
        self._run_step = 0
        self._elapsed = 0.0

    @property
    def stream(self) -> Stream | None:
        return self.model.streams.get(self.scope) if self.model is not None else None

    @property
    def run_step(self) -> int:
        """Steps in this run."""
        return self._run_step

    def start(self) -> None:
        self._run_step = 0
        self._elapsed = 0.0
        self.finish = self.left = False

    def goes_on(self, state: Mapping[str, Any]) -> bool:
        return self.step is not None and int(state["run_step"]) < self.step and not state["finish"]

    def run(self, feed_dict: Mapping[Any, Any] | None = None) -> dict[str, float] | None:
        """Consume data. An evaluation returns its metrics."""
        with task_scope(self.scope.mode, self.scope.task):
            self._loop(feed_dict or {})
        self.spent = self.stream is not None and self.stream.spent
        self.stopped = self.sess.should_stop()
        if self.model is not None:
            self.model.strategy.end_loop()
            self.lstep -= _end_together(self, self.model)
        if self.model is None or self.scope.mode is not MODE.EVAL:
            return None
        merge_metrics(self.model, self.scope)
        return self.model.metric_values(MODE.EVAL, self.scope.task)

    def _together(self) -> Strategy | None:
        """The strategy, if several workers take this loop's steps together."""
        trains = self.model is not None and self.scope.mode is MODE.TRAIN
        return self.model.strategy if trains and self.model.strategy.in_step else None  # type: ignore[union-attr]

    def _leave(self, *, stop: bool, finish: bool = True) -> None:
        """End the loop; who waits for this worker in a step is told."""
        self.finish = finish
        together = self._together()
        if together is not None and self.model is not None:
            together.leave(self.model, self.scope.task, stop=stop)

    def _between_moves(self) -> bool:
        """Whether this worker has made steps that the others have not heard of."""
        model = self.model
        if model is None:
            return False
        return model.global_step.value % model.strategy.gradient_merge != 0 or not model.strategy.whole()

    def _left_by_another(self, error: LeftError) -> None:
        self.left = True
        self.finish = error.stop or self.seconds is None
        if error.stop:
            self.sess.request_stop()

    def _loop(self, feed_dict: Mapping[Any, Any]) -> None:
        session, run_ops, step, boundary, together = self.sess, self.run_ops, self.step, self.boundary, self._together()
        strategy = self.model.strategy if self.model is not None else Local()
        follows, is_over = strategy.follows, strategy.stopper(session)
        begun = time.monotonic() - self._elapsed
        while follows or step is None or self._run_step < step:
            if is_over():
                self._leave(stop=not follows)
                return
            if self.seconds is not None and not follows:
                self._elapsed = time.monotonic() - begun
                if self._elapsed >= self.seconds:
                    self._leave(stop=False, finish=False)
                    return
            try:
                session.run(run_ops, feed_dict)
            except LeftError as error:
                self._left_by_another(error)
                return
            except (OutOfRangeError, StopIteration):
                # a pass that ended where the last run was suspended is not the end of this one
                goes_on = (self.across_passes or self._run_step == 0) and self.stream is not None
                if follows or (goes_on and not self.stream.spent):  # type: ignore[union-attr] # it is there, then
                    continue
                self._leave(stop=False)
                return
            if together is not None:
                self._run_step += together.jumped()
            self._run_step += 1
            self.lstep += 1
            boundary()
        if together is not None and self._between_moves():
            self._leave(stop=False, finish=self.finish)

    def state_dict(self) -> dict[str, Any]:
        return {
            "lstep": self.lstep,
            "run_step": self._run_step,
            "elapsed": self._elapsed,
            "finish": self.finish,
            "spent": self.spent,
            "stopped": self.stopped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lstep = int(state["lstep"])
        self._run_step = int(state["run_step"])
        self._elapsed = float(state["elapsed"])
        self.finish, self.spent, self.stopped = (bool(state[key]) for key in ("finish", "spent", "stopped"))


class EvalStage(LoopStage):
    """An evaluation: starts from fresh metrics and writes down in `model.history` what it found."""

    def start(self) -> None:
        super().start()
        if self.model is not None:
            self.model.reset_metrics(self.scope)

    def run(self, feed_dict: Mapping[Any, Any] | None = None) -> dict[str, float] | None:
        found = super().run(feed_dict)
        if self.model is not None:
            step = self.model.global_step.value
            self.model.history.append({"task": self.scope.task, "global_step": step, "metrics": found})
            label = f"[{self.scope.task} eval]" if self.scope.task is not None else "[eval]"
            shown = " ".join(f"{name} {value:.4f}" for name, value in (found or {}).items())
            if shown or not self.model.strategy.follows:  # what both evaluate, the leader may have the labels of
                log.info("%s global step %d, %d batches: %s", label, step, self._run_step, shown or "no metrics")
        return found


def merge_metrics(model: Model, scope: TaskScope) -> None:
    """What the workers have measured, each on its part of the data, becomes what all have."""
    if model.strategy.worker_num == 1:
        return
    metrics = model.metric_states.get(scope, {})
    everybody = model.strategy.gather({name: metric.state_dict() for name, metric in metrics.items()})
    for name, metric in metrics.items():
        metric.merge([states[name] for states in everybody])


def _end_together(stage: LoopStage | CotrainStage, model: Model) -> int:
    """Workers in step come out of a loop with the same flags and counts; returns how many steps are not counted.

    With merged gradients, a worker may hear only at the next move that another has left: what it has done since the
    last one moved nothing, and is dropped by all.
    """
    strategy, step = model.strategy, model.global_step
    own = [stage.finish, stage.spent, stage.stopped, stage.left, step.value]
    told = strategy.gather(own) if strategy.in_step else [own]
    found = [any(one[place] for one in told) for place in range(4)]
    stage.finish, stage.spent, stage.stopped = strategy.lead(found[:3]) if strategy.shared else found[:3]
    if stage.stopped:
        stage.sess.request_stop()
    if not strategy.in_step or (not found[3] and len({int(one[4]) for one in told}) == 1):
        return 0
    for optimizer in model.optimizers():
        optimizer.zero_grad()
    ahead = step.value - min(int(one[4]) for one in told)
    step.value -= ahead
    stage._run_step -= ahead  # noqa: SLF001 - a friend
    return ahead


def train_loop(model: Model, task: str | None, **limits: Any) -> LoopStage:
    """The loop over a task's training steps."""
    scope = model._scope(MODE.TRAIN, task)  # noqa: SLF001 - a friend
    return LoopStage(model.train_op(scope.task), scope=scope, model=model, **limits)


def eval_loop(model: Model, task: str | None, **limits: Any) -> EvalStage:
    """The loop over a task's evaluation steps."""
    scope = model._scope(MODE.EVAL, task)  # noqa: SLF001 - a friend
    return EvalStage(model.eval_op(scope.task), scope=scope, model=model, **limits)


class CotrainStage(Stage):
    """Training steps of several tasks: each step's task is drawn by ratio, from draws that can be replayed.

    A task whose pass has ended is not drawn again in this run; the run ends when all have, or after `step` steps.
    """

    def __init__(self, model: Model, ratio: Mapping[str | None, float], step: int | None, seed: int) -> None:
        self.model = model
        self.scope = TaskScope(MODE.TRAIN)
        self.ratio = dict(ratio)
        self.step = step
        self.seed = seed
        self.finish = self.spent = self.stopped = self.left = False
        self._ops = {task: model.train_op(task) for task in self.ratio}
        self._draws = 0
        self._run_step = 0
        self._begun: list[str | None] = []
        """Tasks that have made a step in this run."""
        self._ended: list[str | None] = []

    def start(self) -> None:
        self._run_step = 0
        self._begun = []
        self._ended = [task for task in self.ratio if self._stream(task).spent]
        self.finish = self.left = False

    def _stream(self, task: str | None) -> Stream:
        return self.model.streams[TaskScope(MODE.TRAIN, task)]

    def run(self, feed_dict: Mapping[Any, Any] | None = None) -> None:
        self._loop(feed_dict)
        self.spent = all(self._stream(task).spent for task in self.ratio)
        self.stopped = self.sess.should_stop()
        self.model.strategy.end_loop()
        _end_together(self, self.model)

    def _loop(self, feed_dict: Mapping[Any, Any] | None) -> None:
        follows, is_over = self.model.strategy.follows, self.model.strategy.stopper(self.sess)
        while follows or self.step is None or self._run_step < self.step:
            if is_over() or (not follows and len(self._ended) == len(self.ratio)):
                if not follows:
                    self._leave()
                return
            task = self.model.strategy.choose(None if follows else self._draw())
            try:
                with task_scope(MODE.TRAIN, task):
                    self.sess.run(self._ops[task], feed_dict)
            except LeftError as error:
                self.finish = self.left = True
                if error.stop:
                    self.sess.request_stop()
                return
            except (OutOfRangeError, StopIteration):
                if not follows:
                    self._end_pass(task)
                continue
            if task not in self._begun:
                self._begun.append(task)
            self._run_step += 1
            self.boundary()

    def _end_pass(self, task: str | None) -> None:
        """A pass that ended where the last run was suspended is not the end of this one."""
        if task in self._begun or self._stream(task).spent:
            self._ended.append(task)

    def _leave(self) -> None:
        """End the loop; others are told in the step that they are in, which is the next one that has data."""
        self.finish = True
        strategy = self.model.strategy
        while strategy.in_step and self.sess.should_stop() and len(self._ended) < len(self.ratio):
            task = strategy.choose(self._draw())
            try:
                self._stream(task).read()
            except OutOfRangeError:
                self._end_pass(task)
            else:
                strategy.leave(self.model, task, stop=True)
                return

    def _draw(self) -> str | None:
        """The n-th draw is a pure function of (seed, n): only n needs to be saved."""
        tasks = [task for task in self.ratio if task not in self._ended]
        point = derive_seed(self.seed, "cotrain", self._draws) / 2**63 * sum(self.ratio[task] for task in tasks)
        self._draws += 1
        for task in tasks[:-1]:
            point -= self.ratio[task]
            if point < 0:
                return task
        return tasks[-1]

    def state_dict(self) -> dict[str, Any]:
        return {
            "draws": self._draws,
            "run_step": self._run_step,
            "begun": list(self._begun),
            "ended": list(self._ended),
            "finish": self.finish,
            "spent": self.spent,
            "stopped": self.stopped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draws = int(state["draws"])
        self._run_step = int(state["run_step"])
        self._begun, self._ended = list(state["begun"]), list(state["ended"])
        self.finish, self.spent, self.stopped = (bool(state[key]) for key in ("finish", "spent", "stopped"))


class ModelBank(Stage):
    """Loads variables from other checkpoints: `config` says from where, which, and under which names."""

    def __init__(self, is_chief: bool, config: Any = None) -> None:
        self.is_chief = is_chief
        self.config = config

    def run(self) -> None:
        """Load what matches into the session's model, and print one table of what did and what did not."""
        model = self.sess.session.model if hasattr(self.sess, "session") else self.sess.model
        if model is None:
            raise StageError("ModelBank needs a session of a compiled model: run it with model.run_stage(...)")
        variables = model.variables()
        if self.is_chief:
            matches = bank.match(self.config, variables)
            if matches:
                log.info("%s", bank.report(matches))
            bank.apply(matches, variables)
        model.strategy.broadcast(list(variables.values()))
