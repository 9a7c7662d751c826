"""Hooks that evaluate in the middle of training, and act on what they find."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from plait.engine.hooks import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues, overrides
from plait.engine.monitored import MonitoredSession
from plait.engine.report import log
from plait.engine.session import Session
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, OutOfRangeError
from plait.rng import derive_seed, isolated_rng

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = [
    "AggregativeSessionRunHook",
    "EarlyStoppingHook",
    "FeedSessionRunHook",
    "LogEvaluationMetricHook",
    "PlateauLREarlyStoppingHook",
]

TRAIN, EVAL = TaskScope(MODE.TRAIN, None), TaskScope(MODE.EVAL, None)


class AggregativeSessionRunHook(SessionRunHook):
    """A hook that says how it behaves with several replicas, several workers, and in the inter mode.

    The three questions have to be answered by every subclass.
    """

    def support_aggregation(self) -> bool:
        """Whether one hook serves all replicas and sees their values together, or each replica has its own."""
        raise NotImplementedError(_unanswered(self, "support_aggregation"))

    def support_sync_workers(self) -> bool:
        """Whether a stop that this hook asks for on one worker stops all of them."""
        raise NotImplementedError(_unanswered(self, "support_sync_workers"))

    def run_inter_mode(self) -> bool:
        """Whether the hook is also run around the steps of the inter mode."""
        raise NotImplementedError(_unanswered(self, "run_inter_mode"))


def _unanswered(hook: AggregativeSessionRunHook, question: str) -> str:
    return f"{type(hook).__name__} does not answer {question}(): write `def {question}(self): return False`, or True"


class _InterStep(SessionRunHook):
    """A hook around the steps of the inter mode only: the session of the training has begun it, and will end it."""

    def __init__(self, hook: SessionRunHook) -> None:
        self._hook = hook

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return self._hook.before_run(run_context)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._hook.after_run(run_context, run_values)


class FeedSessionRunHook(AggregativeSessionRunHook):
    """Feeds every run the same values: {placeholder: value}."""

    def __init__(self, feed_dict: Mapping[Any, Any]) -> None:
        self._feed_dict = dict(feed_dict)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:  # noqa: ARG002 - a hook's signature
        return SessionRunArgs(None, self._feed_dict)

    def rebind(self, fresh: SessionRunHook) -> None:
        """The placeholders of the build stand for those of every step; keep them, take the new values."""
        if isinstance(fresh, FeedSessionRunHook):
            self._feed_dict = dict(zip(self._feed_dict, fresh._feed_dict.values(), strict=True))  # noqa: SLF001

    def support_aggregation(self) -> bool:
        return False

    def support_sync_workers(self) -> bool:
        return False

    def run_inter_mode(self) -> bool:
        return False


class LogEvaluationMetricHook(AggregativeSessionRunHook):
    """Evaluates every so many passes over the training data, and logs what it finds.

    `monitor_info` are numbers by name. The model_fn makes the hook in both modes: the one of the training mode runs
    the evaluation, the one of the inter mode collects its numbers.
    """

    def __init__(
        self,
        monitor_info: Mapping[str, torch.Tensor],
        batch_size: int,
        samples_in_train: int,
        samples_in_eval: int,
        evaluate_every_n_epochs: float = 1,
        prefix: str = "[Evaluation]",
    ) -> None:
        sizes = {"batch_size": batch_size, "samples_in_train": samples_in_train, "samples_in_eval": samples_in_eval}
        for name, value in {**sizes, "evaluate_every_n_epochs": evaluate_every_n_epochs}.items():
            if not value > 0:
                raise ConfigError(f"{type(self).__name__}({name}={value}): write a number above 0")
        if not monitor_info:
            raise ConfigError(f"{type(self).__name__}: monitor_info is empty; write {{'accuracy': accuracy}}")
        for name, number in monitor_info.items():
            if isinstance(number, torch.Tensor) and number.dim():
                shape = list(number.shape)
                raise ConfigError(f"monitor_info[{name!r}] has shape {shape}: watch numbers, such as x.mean()")
        self.monitor_info = dict(monitor_info)
        self.prefix = prefix
        steps_in_epoch = math.ceil(samples_in_train / batch_size)
        self._every = max(1, round(steps_in_epoch * evaluate_every_n_epochs))
        self._eval_steps = math.ceil(samples_in_eval / batch_size)
        self._done = 0
        self._trains = False
        """Whether this is the hook of the training mode."""
        self._collected: list[tuple[int, dict[str, torch.Tensor]]] | None = None
        """Rows and numbers of each step of an evaluation; None outside of one."""
        self._inter: MonitoredSession | None = None

    def support_aggregation(self) -> bool:
        return True

    def support_sync_workers(self) -> bool:
        return True

    def run_inter_mode(self) -> bool:
        return True

    def rebind(self, fresh: SessionRunHook) -> None:
        if isinstance(fresh, LogEvaluationMetricHook):
            self.monitor_info = fresh.monitor_info

    def after_create_session(self, session: Session, coord: Any) -> None:  # noqa: ARG002 - a hook's signature
        self._inter = None
        self._trains = any(hook is self for hook in session.model.hooks.get(TRAIN, ()))
        if self._trains:
            self._twin(session.model)  # what is missing is missed before the first step

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:  # noqa: ARG002
        if not self._trains:
            self._collect(run_context.session.model)
            return
        self._done += 1
        strategy = run_context.session.model.strategy
        every = max(1, self._every // strategy.worker_num) if strategy.in_step else self._every
        if self._done % every == 0:
            found = self._evaluate(run_context.session)
            shown = " ".join(f"{name}: {value:.3f}" for name, value in found.items())
            log.info("%s step: %d %s", self.prefix, self._done - 1, shown or "no data is left to evaluate on")
            self.act(found, run_context)

    def _collect(self, model: Model) -> None:
        if self._collected is not None:
            sample = model._now.sample  # noqa: SLF001 - a friend
            rows = (sample.batch_size if sample is not None else None) or 1
            numbers = {name: torch.as_tensor(value).detach() for name, value in self.monitor_info.items()}
            self._collected.append((rows, numbers))

    def act(self, found: Mapping[str, float], run_context: SessionRunContext) -> None:
        """What to do about an evaluation; this hook only logs it."""

    def _evaluate(self, session: Session) -> dict[str, float]:
        """Run the steps of the inter mode, with the hooks that take part in it; training notices nothing."""
        model: Model = session.model
        twin = self._twin(model)
        collected = twin._collected = []  # noqa: SLF001 - of the same kind
        model.reset_metrics(EVAL)
        if self._inter is None:
            self._inter = MonitoredSession(lambda: session, _inter_hooks(model), recover=False)
        with isolated_rng(derive_seed(model.seed, "evaluation", self._done)):
            self._run_steps(model, self._inter)
        twin._collected = None  # noqa: SLF001
        if model.strategy.in_step:  # each has evaluated its part; what all have found decides for all
            parts = model.strategy.gather([[rows, numbers] for rows, numbers in collected])
            collected = [(int(rows), numbers) for part in parts for rows, numbers in part]
        return _means(collected)

    def _run_steps(self, model: Model, session: MonitoredSession) -> None:
        steps = 0
        strategy, wanted = model.strategy, self._eval_steps
        if strategy.in_step:  # as many as there are of this worker among them: its part may be one shorter
            wanted = len(range(strategy.worker_id, wanted, strategy.worker_num))
        while steps < wanted:
            try:
                session.run(model.eval_op())
                steps += 1
            except (OutOfRangeError, StopIteration):
                if model.streams[EVAL].spent:
                    return

    def _twin(self, model: Model) -> LogEvaluationMetricHook:
        """The hook that the model_fn made in the inter mode where it made this one in the training mode."""
        if EVAL not in model.streams:
            raise ConfigError(
                f"{type(self).__name__} evaluates in the middle of training: pass inter_mode=mox.ModeKeys.EVAL to run"
            )
        mine = [hook for hook in model.hooks[TRAIN] if type(hook).__name__ == type(self).__name__]
        others = [hook for hook in model.hooks.get(EVAL, []) if type(hook).__name__ == type(self).__name__]
        index = next(number for number, hook in enumerate(mine) if hook is self)
        if index >= len(others):
            raise ConfigError(
                f"the model_fn makes a {type(self).__name__} in TRAIN but not in the inter mode: make both"
            )
        return cast("LogEvaluationMetricHook", others[index])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done = int(state["done"])


def _inter_hooks(model: Model) -> list[SessionRunHook]:
    hooks = [hook for hook in model.hooks.get(EVAL, []) if _joins(hook)]
    if model.calls[EVAL].placeholders and not any(overrides(hook, "before_run") for hook in hooks):
        raise ConfigError(
            "the model_fn makes placeholders in the inter mode, but no hook feeds them there: let the hook that does "
            "answer run_inter_mode() with True"
        )
    return [_InterStep(hook) for hook in hooks]


def _joins(hook: SessionRunHook) -> bool:
    return isinstance(hook, AggregativeSessionRunHook) and hook.run_inter_mode()


def _means(collected: list[tuple[int, dict[str, torch.Tensor]]]) -> dict[str, float]:
    """The means over rows: a short batch counts for less."""
    if not collected:
        return {}
    rows = torch.tensor([float(count) for count, _ in collected], dtype=torch.float64)
    names = collected[0][1]
    columns = {name: torch.stack([numbers[name].double().cpu() for _, numbers in collected]) for name in names}
    return {name: float((column * rows).sum() / rows.sum()) for name, column in columns.items()}


_UP = ("acc", "auc", "top", "precision", "recall", "f1", "iou", "map", "psnr", "score", "bleu")
_DOWN = ("loss", "err", "mse", "mae", "perplexity", "entropy")


def _direction(monitor: str, given: str) -> int:
    """1 if a higher value is better, -1 if a lower one is."""
    if given in ("max", "min"):
        return 1 if given == "max" else -1
    name = monitor.lower()
    down, up = any(word in name for word in _DOWN), any(word in name for word in _UP)
    if given != "auto" or up == down:
        raise ConfigError(f"is a higher or a lower {monitor!r} better? Pass direction='max' or direction='min'")
    return -1 if down else 1


class EarlyStoppingHook(LogEvaluationMetricHook):
    """Stops training when `monitor` has not got better by `min_delta` in `patience` evaluations in a row."""

    def __init__(
        self,
        monitor_info: Mapping[str, torch.Tensor],
        monitor: str,
        batch_size: int,
        samples_in_train: int,
        samples_in_eval: int,
        evaluate_every_n_epochs: float = 1,
        min_delta: float = 0.0,
        patience: int = 0,
        prefix: str = "[EarlyStopping]",
        direction: str = "auto",
    ) -> None:
        super().__init__(monitor_info, batch_size, samples_in_train, samples_in_eval, evaluate_every_n_epochs, prefix)
        if monitor not in self.monitor_info:
            raise ConfigError(f"monitor={monitor!r} is not in monitor_info, which has {', '.join(self.monitor_info)}")
        self._monitor = monitor
        self._min_delta = abs(min_delta)
        self._patience = patience
        self._sign = _direction(monitor, direction)
        self._best: float | None = None
        self._waited = 0

    def act(self, found: Mapping[str, float], run_context: SessionRunContext) -> None:
        value = found.get(self._monitor)
        if value is None:
            return
        first = self._best is None and not math.isnan(value)
        if first or (self._best is not None and self._sign * (value - self._best) > self._min_delta):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= max(1, self._patience):
            self._waited = 0
            self.give_up(run_context)

    def give_up(self, run_context: SessionRunContext) -> None:
        """What happens when patience is at its end."""
        best = math.nan if self._best is None else self._best
        why = f"{self._monitor} has not got better than {best:.4g} in {max(1, self._patience)} evaluations"
        log.info("%s stopping after step %d: %s", self.prefix, self._done - 1, why)
        run_context.request_stop()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._best, self._waited = state["best"], int(state["waited"])


class PlateauLREarlyStoppingHook(EarlyStoppingHook):
    """Lowers the learning rate by `factor` at each plateau, and stops training at plateau number `max_plateaus`."""

    def __init__(
        self,
        monitor_info: Mapping[str, torch.Tensor],
        monitor: str,
        batch_size: int,
        samples_in_train: int,
        samples_in_eval: int,
        evaluate_every_n_epochs: float = 1,
        min_delta: float = 0.0,
        patience: int = 0,
        prefix: str = "[PlateauLREarlyStopping]",
        direction: str = "auto",
        factor: float = 0.1,
        max_plateaus: int = 3,
    ) -> None:
        super().__init__(
            monitor_info,
            monitor,
            batch_size,
            samples_in_train,
            samples_in_eval,
            evaluate_every_n_epochs,
            min_delta,
            patience,
            prefix,
            direction,
        )
        if not 0 < factor < 1 or max_plateaus < 1:
            raise ConfigError(f"factor={factor}, max_plateaus={max_plateaus}: write 0 < factor < 1 and 1 or more")
        self._factor = factor
        self._max_plateaus = max_plateaus
        self._plateaus = 0

    def give_up(self, run_context: SessionRunContext) -> None:
        self._plateaus += 1
        if self._plateaus >= self._max_plateaus:
            super().give_up(run_context)
            return
        for optimizer in run_context.session.model.optimizers():
            scale_learning_rate(optimizer, self._factor)
        log.info("%s plateau %d: learning rate times %g", self.prefix, self._plateaus, self._factor)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "plateaus": self._plateaus}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._plateaus = int(state["plateaus"])


def scale_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Lower an optimizer's rate; one that follows a schedule goes on following it, scaled."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
        group["lr_scale"] = group.get("lr_scale", 1.0) * factor
