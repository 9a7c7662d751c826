"""The private update: each micro-batch's gradient is clipped, their sum is noised once, then optimizers move."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.engine.budget import show_epsilon
from plait.engine.releases import Living, PrivateState, described
from plait.engine.sampling import Sampling, check_rows, draws_of, sampling_of, uses_of
from plait.engine.task import MODE, TaskScope
from plait.engine.update import Flags, moved_by, optimizers_step
from plait.errors import ConfigError, DataError, FunctionError
from plait.privacy import clipping
from plait.privacy.accountant import Event, together
from plait.privacy.clipping import Adaptive
from plait.privacy.optimizers import Private, private_of
from plait.privacy.recorder import Gradients, Recorder
from plait.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["PrivateState", "PrivateTask", "are_private", "check_others", "private_task"]

Optimizers = Sequence[torch.optim.Optimizer]
log = logging.getLogger("plait")


def are_private(optimizers: Optimizers, task: str | None) -> bool:
    """Whether a task's optimizers are private: all of them, or none."""
    plain = [optimizer for optimizer in optimizers if private_of(optimizer) is None]
    if plain and len(plain) < len(optimizers):
        raise ConfigError(
            f"task {task!r} has private optimizers and a {type(plain[0]).__name__} that is not: its variables would "
            "tell what the others hide; wrap it with efl.privacy.make_private, too"
        )
    return not plain


def private_task(
    model: Model, task: str | None, optimizers: Optimizers, reached: Sequence[Tensor], shape: Sequence[int]
) -> PrivateTask:
    """Make a task's training private. `reached` are the variables that its loss moves, `shape` is the first loss's."""
    scope, settings = TaskScope(MODE.TRAIN, task), [_settings(optimizer) for optimizer in optimizers]
    state = model.private_state = model.private_state or PrivateState(settings[0])
    for one in settings:
        state.check_same(one)
    _check_model(model, task, settings)
    sample = model._now.sample  # noqa: SLF001 - a friend
    has_loss = model.strategy.has_loss(scope)
    if has_loss and len(shape) != 1:
        raise FunctionError(
            f"the loss for {scope} has shape {list(shape)}, and its optimizer is private: return one loss for each "
            "row, such as F.cross_entropy(logits, labels, reduction='none')"
        )
    rows = shape[0] if has_loss else sample.batch_size if sample is not None else None
    sampling = sampling_of(model, task, rows, settings[0].samples)
    wanted = settings[0].num_microbatches
    if wanted is not None and sampling.expected is not None:
        raise ConfigError(
            f"num_microbatches={wanted} with Poisson batches, which differ in size: leave it out, and every row is one"
        )
    if wanted is not None and rows:
        check_rows(rows, wanted, scope)
    made = state.tasks[task] = PrivateTask(model, scope, state, list(optimizers), reached, sampling)
    show_epsilon(model, task, state.ledger)
    if not all(one.noise_multiplier for one in settings):
        log.warning("noise_multiplier=0 for %s: gradients are clipped and not noised, epsilon is infinite", scope)
    return made


def check_others(model: Model, reached: Mapping[str | None, set[Tensor]]) -> None:
    """What a private task moves, no other may move that is not: it would tell of rows what the first one hides."""
    names = {variable: name for name, variable in model.trainable_variables().items()}
    for private in model.private_tasks.values():
        for task in model.loss_fns:
            if task in model.private_tasks:
                continue
            shared = reached[task] & set(private.variables) & set(moved_by(list(model.assignments[task])))
            if shared:
                raise ConfigError(
                    f"task {task!r} is not private and moves {names.get(shared.pop(), 'a variable')!r}, which the "
                    f"private {private.scope} moves, too: no epsilon holds for it; make both private, or let them "
                    "have variables of their own"
                )


def _settings(optimizer: torch.optim.Optimizer) -> Private:
    found = private_of(optimizer)
    assert found is not None  # noqa: S101 - `are_private` was asked before
    return found


def _check_model(model: Model, task: str | None, settings: Sequence[Private]) -> None:
    if model.gradient.clip is not None:
        raise ConfigError(
            f"gradient clip={model.gradient.clip} with a private optimizer, which clips each micro-batch's gradient: "
            "leave it out"
        )
    merge, training = model.strategy.gradient_merge, [*dict.fromkeys([*model.loss_fns, *model.train_ops])]
    if merge > 1 and len(training) > 1:
        raise ConfigError(
            f"gradient_merge={merge} with a private optimizer and the tasks {', '.join(map(repr, training))}: batches "
            "of several tasks would be merged; leave it out, and give larger batches"
        )
    if model.loss_counts[task] > 1:
        raise ConfigError(f"task {task!r} has {model.loss_counts[task]} losses and is private: return their sum")
    for name in ("num_microbatches", "samples"):
        values = {getattr(one, name) for one in settings}
        if len(values) > 1:
            raise ConfigError(
                f"private optimizers of task {task!r} with {name}={sorted(values, key=str)}: write the same"
            )
    _check_strategy(model)
    for path, module in model.named_modules():
        if type(module).__name__ == "SparseEmbedding" or getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"{path} has gradients of rows only, and noise is for all rows: use an embedding with sparse=False"
            )


def _check_strategy(model: Model) -> None:
    strategy: Any = model.strategy
    settings = getattr(strategy, "settings", None) or getattr(strategy, "_settings", None)
    for name in ("local_sgd", "fully_shard"):
        if getattr(settings, name, False):
            raise ConfigError(f"{name} with a private optimizer: workers have to reduce whole gradients; leave it out")
    replicas = getattr(settings, "replicas_to_aggregate", None)
    if replicas is not None and replicas < strategy.worker_num:
        raise ConfigError(
            f"replicas_to_aggregate={replicas} of {strategy.worker_num} with a private optimizer: a gradient that "
            "comes too late takes its share of the noise with it; leave it out"
        )


class _Part:
    """One optimizer of a task: its variables, its limit, its noise."""

    __slots__ = ("clip", "living", "number", "optimizer", "share", "variables", "votes")

    def __init__(
        self, optimizer: torch.optim.Optimizer, living: Living, reached: set[Tensor], workers: int, number: int
    ) -> None:
        private = living.private
        self.optimizer, self.living, self.number = optimizer, living, number
        found = [variable for group in optimizer.param_groups for variable in group["params"]]
        self.variables = [variable for variable in dict.fromkeys(found) if variable in reached]
        self.clip: Callable[..., tuple[Any, Tensor]] = (
            clipping.per_layer if private.clipping == "per-layer" else clipping.flat
        )
        self.share = 1 / math.sqrt(workers)
        """Of the noise's deviation, this worker's."""
        self.votes: float | Tensor = 0.0
        """Of the micro-batches since the variables moved last, for a limit that follows them."""

    @property
    def limit(self) -> float:
        return self.living.limit

    def weights(self, squares: Mapping[str, Tensor], unit: float, divisor: float) -> Any:
        """What each micro-batch's gradient counts, whose norms are to be taken `unit` times."""
        found, cut = self.clip(squares, self.limit / unit)
        if self.living.adaptive is not None:
            self.votes += Adaptive.votes(cut)
        factor = unit / divisor
        if factor == 1:
            return found
        return {name: one * factor for name, one in found.items()} if isinstance(found, dict) else found * factor

    def add_noise(self, number: int, divisor: float) -> None:
        """To this worker's sums, which are divided already."""
        living = self.living
        deviation = living.multiplier * living.limit * self.share / divisor
        living.noise.add(self.gradients(), deviation, number, self.number)
        if living.adaptive is not None:
            self.votes = float(self.votes) + living.noise.draw(
                living.adaptive.vote_noise * self.share, number, self.number
            )

    def adapt(self, votes: float) -> None:
        """All workers' votes are in, noised."""
        if self.living.adaptive is not None:
            self.living.adaptive.update(votes, 0.0)

    def gradients(self) -> list[Tensor]:
        """Zeros for what this batch did not reach: that it did not is not to be seen. What is frozen has none."""
        for variable in self.variables:
            if not variable.requires_grad:
                variable.grad = None
            elif variable.grad is None:
                variable.grad = torch.zeros_like(variable)
        return [variable.grad for variable in self.variables if variable.grad is not None]


class PrivateTask:
    """The private training of one task."""

    def __init__(
        self,
        model: Model,
        scope: TaskScope,
        state: PrivateState,
        optimizers: list[torch.optim.Optimizer],
        reached: Sequence[Tensor],
        sampling: Sampling,
    ) -> None:
        strategy = model.strategy
        self.scope, self.state, self.sampling = scope, state, sampling
        self._model, self._strategy, self._step = model, strategy, model.global_step
        self._shown = model.loss_metrics[scope.task]
        self._wanted = _settings(optimizers[0]).num_microbatches
        self._merge, self._scale = strategy.gradient_merge, model.gradient.loss_scale
        self._of_mean = getattr(strategy, "peer", None) is not None
        """The other party's gradients are those of the mean over micro-batches: so are all here."""
        self._has_loss = strategy.has_loss(scope)
        mover = strategy.mover(model, scope.task, optimizers)
        self._reduces = strategy.in_step and mover is None
        self._move = mover or optimizers_step(model, optimizers)
        divided = sampling.expected is not None  # each worker draws from rows of its own
        self._alone = 1 if strategy.in_step or divided else strategy.worker_num
        """Releases that this one stands for: workers that do not wait for each other make as many each."""
        share = strategy.worker_num if strategy.in_step else 1
        numbers = [state.of(optimizer, _settings(optimizer)) for optimizer in optimizers]
        self.parts = [
            _Part(optimizer, living, set(reached), share, strategy.worker_id * 1000 + living.number)
            for optimizer, living in zip(optimizers, numbers, strict=True)
        ]
        self.variables = [variable for part in self.parts for variable in part.variables]
        noise = together(*[part.living.private.noise_multiplier for part in self.parts])
        # A row that comes or goes can turn the whole gradient of a micro-batch with others in it round.
        grouped = self._wanted is not None and self._wanted < (sampling.rows or self._wanted + 1)
        self._event = Event(noise / 2 if grouped else noise, sampling.rate)
        self._grouped = grouped
        self._largest = sampling.rows if sampling.expected is None else None
        """The rows of a batch that the event's rate is for."""
        self._facts = self._settled(optimizers)
        self._stream = model.streams[scope]
        self._uses = uses_of(self._stream)
        self._draws: str | None = None
        self._reduce = _reduced(model.opt_config["REDUCE"], scope)
        self._count = 0.0
        """Micro-batches since the variables moved last."""
        self._pass: int | None = None
        """Of the data, that the logical batch is from which is under way."""
        counted = sampling.expected or (self._wanted or sampling.rows or 1) * self._merge
        for part in self.parts:
            part.living.expect(counted * share)
        if mover is not None and share > 1 and any(part.living.adaptive is not None for part in self.parts):
            raise ConfigError("clipping='adaptive' with parameter servers, which count no votes: write 'flat'")
        self._flags = Flags(model.config.resolved_device(), more=1 + len(self.parts))
        self.recorder = Recorder(model, [part.variables for part in self.parts])
        self._checked = False
        self._frozen = [variable for variable in model.parameters() if not variable.requires_grad]
        """At the build; they are noted nowhere."""
        self._trained = [True] * len(self.variables)

    def _settled(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """What decides, beside the data and what the checkpoint holds, what a step releases; as far as it is known."""
        how, config = self._model.opt_config["REDUCE"], self._model.config
        facts: dict[str, Any] = {
            "noise": self._event.noise,
            "rate": self._event.rate,
            "merged batches": self._merge,
            "REDUCE": described(how) if callable(how) else how,
            "loss_fn": described(self._model.loss_fns[self.scope.task]),
            "BACKEND_MODE": self._model.opt_config["BACKEND_MODE"],
            "loss_scale": self._scale,
            "precision": config.precision,
            "workers": self._strategy.worker_num,
        }
        for number, (optimizer, part) in enumerate(zip(optimizers, self.parts, strict=True)):
            settings = dataclasses.asdict(part.living.private)
            for name in ("l2_norm_clip", "noise_multiplier", "num_microbatches", "clipping", "seed"):
                facts[f"{name} of optimizer {number}"] = settings[name]
            facts[f"kind of optimizer {number}"] = type(optimizer).__name__
            facts[f"variables of optimizer {number}"] = len(part.variables)
        return facts

    def facts(self) -> dict[str, Any]:
        return self._facts

    # ---- a step

    def forward(self, call: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """The loss_fn, recorded; it does not run for a batch without rows."""
        drawn = self.sampling.expected is not None

        def losses(sample: Any) -> Tensor:
            self._look_at_frozen()
            if drawn and sample.batch_size == 0:
                return torch.zeros(0)
            with self.recorder.recording():
                return call(sample)

        return losses

    def update(self, losses: Tensor) -> None:
        """What a training step does with its losses."""
        rows = self._rows(losses)
        if self._pass is None or self._step.value % self._merge == 0:
            self._begin(rows)
        elif self._pass != self._stream.epoch:
            raise DataError(
                f"gradient_merge={self._merge}: the pass over the data for {self.scope} ended in the middle of a "
                "logical batch, and rows of the next one may be in it already, and would count twice; train for a "
                f"multiple of {self._merge} steps before the input begins anew"
            )
        try:
            if rows:
                self._add(losses, rows)
            if (self._step.value + 1) % self._merge == 0:
                self._finish()
        except BaseException:  # should this batch come again, it may be in the sum already
            self._pass = None
            raise
        if rows:
            self._shown.value = losses.detach().mean() if self._has_loss else losses
        self._step.value += 1

    def mean(self, losses: Tensor) -> Tensor:
        """The loss that people see."""
        return losses.detach().mean() if losses.numel() else self._shown.result()

    def _rows(self, losses: Tensor) -> int:
        if self._has_loss:
            if losses.dim() != 1:
                raise FunctionError(
                    f"the loss for {self.scope} has shape {list(losses.shape)} in this step: return one for each row"
                )
            return losses.shape[0]
        sample = self._model._now.sample  # noqa: SLF001 - a friend
        return (sample.batch_size if sample is not None else None) or 0

    def _begin(self, rows: int) -> None:
        """A logical batch begins. The ledger hears of it before anything of it is used, or goes to another party."""
        state, task = self.state, self.scope.task
        self._count, self._pass = 0.0, self._stream.epoch  # also of a step that failed
        for part in self.parts:
            part.votes = 0.0
        if self._merge > 1:
            self._drop_gradients()
        state.uses[task] = state.uses.get(task, 0) + self._alone if self._uses is None else self._uses()
        if self._largest is not None and rows > self._largest:  # the source said otherwise
            self._event = self._event._replace(rate=min(1.0, self._event.rate * rows / self._largest))
            self._largest = rows
        if self._wanted is not None and rows > self._wanted and not self._grouped:  # the source said otherwise
            self._event, self._grouped = self._event._replace(noise=self._event.noise / 2), True
        state.ledger.release(
            self._event,
            step=state.step + self._alone,
            uses=sum(state.uses.values()),
            returned=self._strategy.returned_noise(self.scope),
            task=task or "",
            draws=self._drawn(),
        )

    def _drop_gradients(self) -> None:
        for variable in self.variables:
            variable.grad = None

    def affords(self) -> bool:
        """Whether the budget allows another step, should it use a row once more."""
        state = self.state
        return state.ledger.affords(
            self._event,
            step=state.step + self._alone,
            uses=sum(state.uses.values()) + 1,
            returned=self._strategy.returned_noise(self.scope),
            task=self.scope.task or "",
            draws=self._drawn(),
        )

    def _drawn(self) -> str:
        if self._draws is None:
            self._draws = draws_of(self._model.inputs[self.scope].source)
        return self._draws

    def _add(self, losses: Tensor, rows: int) -> None:
        """Clip each micro-batch's gradient, and add them up in the variables' gradients."""
        wanted = self._wanted
        count = rows if wanted is None else wanted
        if count != rows:
            check_rows(rows, count, self.scope)
        total = self._reduce(losses, rows, count) if self._has_loss else losses
        unit = (count if self._of_mean else 1) / self._scale
        if unit != 1 and self._has_loss:
            total = total / unit
        if not self._checked:
            self._check(losses, rows, count)
        found: Gradients = self.recorder.gradients(total, rows, count, self._strategy.received())
        self._count += count
        divisor = self._divisor() if self._folds() else 1.0
        weights = [
            part.weights(squares, unit, divisor) for part, squares in zip(self.parts, found.squares, strict=True)
        ]
        sums = found.sums(weights)
        for variables, values in zip(self.recorder.sets, sums, strict=True):
            for variable, value in zip(variables, values, strict=True):
                if value is not None:
                    variable.grad = value if variable.grad is None else variable.grad.add_(value)

    def _check(self, losses: Tensor, rows: int, count: int) -> None:
        """Once, and only where a second pass backward is no other party's business; no random state is touched."""
        if self._of_mean or rows == 1:
            return
        before = rng_state()
        self._checked = self.recorder.check(losses, count) is not False
        set_rng_state(before)

    def _look_at_frozen(self) -> None:
        """Variables may be frozen, and rest, and thawed again; one that was frozen at the build has no place here."""
        trained = [variable.requires_grad for variable in self.variables]
        if trained != self._trained:
            if self._of_mean:
                raise ConfigError(
                    f"a variable of {self.scope}, which is private and has another party, was frozen or thawed after "
                    "compile(): do it before"
                )
            self._trained, self._checked = trained, False
            self.recorder.close()
            kept = [[one for one in part.variables if one.requires_grad] for part in self.parts]
            self.recorder = Recorder(self._model, kept)
        for variable in self._frozen:
            if variable.requires_grad:
                names = {value: name for name, value in self._model.variables().items()}
                raise ConfigError(
                    f"variable {names.get(variable, '?')!r} was frozen when the model was compiled and is not any "
                    f"more, and {self.scope} is private: have it trainable at compile(), and freeze it afterwards"
                )

    def _folds(self) -> bool:
        """Whether the number to divide by is known before gradients are summed."""
        return self._merge == 1 and not self._reduces

    def _divisor(self) -> float:
        """What this worker's sum is divided by, unless workers divide theirs together."""
        sampling = self.sampling
        if sampling.expected is not None:
            return sampling.expected
        if self._strategy.worker_num > 1 and sampling.rows is not None:  # the same for all, whoever has a short batch
            return max(self._count, float((self._wanted or sampling.rows) * self._merge))
        return self._count

    @torch.no_grad()
    def _finish(self) -> None:
        """Noise, division, the other workers, and the optimizers."""
        number, divisor = self.state.step + self._alone, self._divisor()
        before = divisor if self._folds() else 1.0
        for part in self.parts:
            part.add_noise(number, before)
        if self._reduces:
            divisor, votes = self._reduce_together()
        else:
            votes = [float(part.votes) for part in self.parts]
        if not self._folds():
            torch._foreach_div_([gradient for part in self.parts for gradient in part.gradients()], divisor)
        for part, found in zip(self.parts, votes, strict=True):
            part.adapt(found)
        self._move()
        self.state.step, self._pass = number, None

    def _reduce_together(self) -> tuple[Any, list[float]]:
        """The mean of all workers' sums; returns the mean of their counts, and their votes."""
        flags, workers = self._flags, self._strategy.worker_num
        count = self._count if self.sampling.expected is None else self.sampling.expected
        votes = [float(part.votes) for part in self.parts]
        self._strategy.reduce_gradients([*self.variables, flags.sent(0.0, 0.0, count, *votes)])
        if flags.tensor.device.type == "cpu":
            count, *votes = flags.check()
            return count, [one * workers for one in votes]
        found = flags.tensor.grad
        assert found is not None  # noqa: S101 - it was just sent
        adapts = any(part.living.adaptive is not None for part in self.parts)  # else, nobody waits for the device
        return found[2], (found[3:] * workers).tolist() if adapts else votes

    def leave(self, *, stop: bool) -> None:
        """Take part in one more reduction, to say that this worker takes no more steps."""
        kept = [variable.grad if self._merge > 1 else None for variable in self.variables]
        for variable in self.variables:
            variable.grad = torch.zeros_like(variable)
        nothing = [0.0] * (1 + len(self.parts))
        self._strategy.reduce_gradients([*self.variables, self._flags.sent(1.0, float(stop), *nothing)])
        for variable, gradient in zip(self.variables, kept, strict=True):
            variable.grad = gradient

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self._count,
            "pass": self._pass,
            "rate": self._event.rate,
            "largest": self._largest,
            "uses": self.state.uses.get(self.scope.task, 0),
            "votes": [float(part.votes) for part in self.parts],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, whole: bool) -> None:
        """Unless `whole`, what is under way is dropped: it was clipped for other noise, or its data begin anew."""
        self._draws = None
        self.state.uses[self.scope.task] = int(state.get("uses", 0))
        if not whole:
            self._count, self._pass = 0.0, None
            self._drop_gradients()
            return
        self._count, self._pass, self._largest = float(state["count"]), state["pass"], state["largest"]
        self._event = self._event._replace(rate=state["rate"])
        for part, votes in zip(self.parts, state.get("votes", []), strict=False):
            part.votes = votes


def _reduced(how: Any, scope: TaskScope) -> Callable[[Tensor, int, int], Tensor]:
    """The sum, over micro-batches, of what `how` makes of the losses of each."""

    def mean(losses: Tensor, rows: int, count: int) -> Tensor:
        total = losses.sum()
        return total if count == rows else total * (count / rows)

    def plain_sum(losses: Tensor, rows: int, count: int) -> Tensor:
        del rows, count
        return losses.sum()

    def users(losses: Tensor, rows: int, count: int) -> Tensor:
        values: Tensor = torch.vmap(how)(losses.view(count, rows // count))
        if values.shape != (count,):
            raise FunctionError(
                f"opt_config REDUCE gave {list(values.shape[1:])} for the losses of one micro-batch of {scope}: return "
                "one number, such as losses.mean()"
            )
        return values.sum()

    if callable(how):
        return users
    return plain_sum if how == "sum" else mean
