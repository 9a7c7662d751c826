"""Procedures that learn to learn: Reptile, first-order MAML, MAML; and their evaluations.

The task's input gives episodes (`plait.data.episodes.EpisodeSource`). Its `loss_fn` gets batches with the fields `x`
and `y`, its `eval_fn` batches with `x` and `query_y`: the last rows of `x` are those asked about. Modules stay in
training mode throughout, so that batch normalisation takes its statistics from the batch, as in the papers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.data import Sample
from plait.engine.calls import UserCall
from plait.engine.functions import ProcedureFn
from plait.engine.layout import lay_states
from plait.engine.op import Op, as_op
from plait.engine.settings import check_count
from plait.engine.stage import LoopStage, eval_loop, train_loop
from plait.engine.task import MODE, TaskScope
from plait.engine.update import backward_of, clear_step, update_step
from plait.errors import ConfigError, DataError, TaskError
from plait.optim.assign import Factory
from plait.rng import derive_seed, isolated_rng
from plait.variables.store import variable_name
from plait.variables.tree import snapshot

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["fomaml", "inner_adam", "maml", "maml_eval", "reptile", "reptile_eval"]

log = logging.getLogger("plait")

Batches = Callable[[int, torch.Generator], Iterator[Tensor]]
"""The rows of each inner batch, for a number of rows and a generator."""


class Task(NamedTuple):
    """One task of a batch."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor


def inner_adam(lr: float = 1e-3) -> Factory:
    """Reptile's inner optimizer: Adam without momentum. Give it to `optimizer_setter`."""
    return functools.partial(torch.optim.Adam, lr=lr, betas=(0.0, 0.999))


def reptile(
    max_step: int,
    *,
    inner_iters: int = 8,
    inner_batch: int = 10,
    meta_step: float = 1.0,
    meta_step_final: float = 0.0,
    replacement: bool = False,
    task: str | None = None,
    seed: int = 0,
) -> ProcedureFn:
    """Train for `max_step` meta-steps: learn each task of a batch from the same weights, go towards the ends' mean.

    A task is learnt from its support in `inner_iters` steps of the task's own optimizer, whose state lives on from task
    to task; the weights go `meta_step` of the way, a share that falls to `meta_step_final` in equal steps. Batches
    follow each other through the support in ever new orders; with `replacement`, each is drawn by itself.
    """
    for name, value in (("max_step", max_step), ("inner_iters", inner_iters), ("inner_batch", inner_batch)):
        check_count(name, value)
    batches = functools.partial(_inner_batches, size=inner_batch, iters=inner_iters, replacement=replacement)

    def procedure(model: Model) -> None:
        if model.strategy.worker_num > 1:
            raise ConfigError(f"reptile() runs in one process, this model has {model.strategy.worker_num} workers")
        loop = train_loop(model, task, step=max_step, across_passes=True)

        def share() -> float:
            done = loop.lstep / max_step
            return meta_step * (1 - done) + meta_step_final * done

        _train(model, "reptile", loop, _reptile_step(model, loop.scope, batches, share, seed))

    return procedure


def maml(max_step: int, *, inner_lr: float = 0.01, inner_steps: int = 5, task: str | None = None) -> ProcedureFn:
    """Train for `max_step` meta-steps: the loss on the queries after learning, as a function of the weights before.

    A task is learnt in `inner_steps` steps of plain gradient descent on its whole support; gradients are taken through
    those steps. The task's optimizer (in the paper, Adam with a rate of 0.001) moves the weights by the mean over the
    batch's tasks.
    """
    return _maml("maml", max_step, inner_lr, inner_steps, task)


def fomaml(max_step: int, *, inner_lr: float = 0.01, inner_steps: int = 5, task: str | None = None) -> ProcedureFn:
    """MAML to first order: the gradient of the queries' loss at the weights after learning, applied to those before."""
    return _maml("fomaml", max_step, inner_lr, inner_steps, task)


def reptile_eval(
    max_step: int | None = None,
    *,
    inner_iters: int = 50,
    inner_batch: int = 5,
    replacement: bool = False,
    transductive: bool = False,
    task: str | None = None,
    seed: int = 0,
) -> ProcedureFn:
    """Evaluate on `max_step` tasks, or one pass: learn each from its support as in `reptile`, then ask; forget it all.

    A query is seen together with the support, one at a time; with `transductive`, all queries are seen together, so
    that batch normalisation learns from them.
    """
    check_count("inner_iters", inner_iters)
    check_count("inner_batch", inner_batch)
    batches = functools.partial(_inner_batches, size=inner_batch, iters=inner_iters, replacement=replacement)

    def procedure(model: Model) -> None:
        loop = eval_loop(model, task, step=max_step, across_passes=max_step is not None)
        learn = _learner(model, TaskScope(MODE.TRAIN, loop.scope.task))

        def adapt(one: Task) -> None:
            learn(one, batches(len(one.support_y), _generator(model, loop.scope, 0, seed)))

        _evaluate(model, loop, adapt, transductive=transductive, seed=seed)

    return procedure


def maml_eval(
    max_step: int | None = None,
    *,
    inner_lr: float = 0.01,
    inner_steps: int = 10,
    transductive: bool = False,
    task: str | None = None,
    seed: int = 0,
) -> ProcedureFn:
    """Evaluate on `max_step` tasks, or one pass: learn each by descent on its support, then ask; forget it all.

    `transductive` is that of `reptile_eval`; the figures of MAML's paper are with it.
    """
    _check_descent(inner_lr, inner_steps)

    def procedure(model: Model) -> None:
        loop = eval_loop(model, task, step=max_step, across_passes=max_step is not None)
        model.loss(loop.scope.task)  # which says so if there is none
        call = model.calls[TaskScope(MODE.TRAIN, loop.scope.task)]
        variables = list(model.trainable_variables().values())

        def adapt(one: Task) -> None:
            for _ in range(inner_steps):
                loss = call(_sample(one.support_x, one.support_y))
                gradients = torch.autograd.grad(loss, variables, allow_unused=True)
                with torch.no_grad():
                    for variable, gradient in zip(variables, gradients, strict=True):
                        if gradient is not None:
                            variable.sub_(inner_lr * gradient)

        _evaluate(model, loop, adapt, transductive=transductive, seed=seed)

    return procedure


# Training


def _train(model: Model, name: str, loop: LoopStage, step: Callable[[Sample], None]) -> None:
    loop.run_ops = _as_op(model, loop.scope, step, model.train_ops[loop.scope.task][1:])
    model.run_stage(name, loop)
    if loop.step is not None and loop.lstep < loop.step and not loop.stopped:
        log.warning(
            "%s ended at step %d of max_step=%d, with the data: give its source more num_epochs=, or none",
            name,
            loop.lstep,
            loop.step,
        )


def _as_op(model: Model, scope: TaskScope, step: Callable[[Sample], None], after: Sequence[Op]) -> Op:
    """A step over a batch of episodes, and what the user has added to the task's steps."""

    def whole(sample: Sample) -> None:
        step(sample)
        model._now.sample = sample  # noqa: SLF001 - a friend; its rows are what the log counts

    read = as_op(model.inputs[scope])
    one = Op(whole, [read], name=f"episodes for {scope}", scope=scope, now=model._now, trains=True)  # noqa: SLF001
    return Op(_nothing, [one, *after], name=f"{scope}", scope=scope) if after else one


def _nothing(*values: Any) -> None:
    """What a training step gives, as `train_op` does."""


def _learner(model: Model, scope: TaskScope) -> Callable[[Task, Iterator[Tensor]], None]:
    """Learn a task from its support with the task's own update, which is not counted as a step of the model."""
    optimizers = list(model.opt_to_vars(scope.task))
    clear, call = clear_step(optimizers), model.calls[scope]
    update = update_step(model, scope.task, optimizers, model.loss_counts[scope.task])
    steps = model.global_step

    def learn(one: Task, batches: Iterator[Tensor]) -> None:
        begun = steps.value
        for rows in batches:
            there = rows.to(one.support_y.device)
            clear()
            update(call(_sample(one.support_x.index_select(0, there), one.support_y.index_select(0, there))))
            steps.value = begun

    return learn


def _reptile_step(
    model: Model, scope: TaskScope, batches: Batches, share: Callable[[], float], seed: int
) -> Callable[[Sample], None]:
    learn = _learner(model, scope)
    variables = list(model.trainable_variables().values())

    @torch.no_grad()
    def set_all(values: Sequence[Tensor]) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.copy_(value)

    def step(sample: Sample) -> None:
        tasks = _tasks(sample)
        start = [variable.detach().clone() for variable in variables]
        ways = [torch.zeros_like(value) for value in start]
        for number, one in enumerate(tasks):
            try:
                learn(one, batches(len(one.support_y), _generator(model, scope, number, seed)))
                for way, variable, old in zip(ways, variables, start, strict=True):
                    way.add_(variable.detach() - old)  # so that what no task moves stays as it is, to the bit
            finally:
                set_all(start)
        part = share() / len(tasks)
        set_all([old + part * way for old, way in zip(start, ways, strict=True)])
        model.global_step.increment()

    return step


def _maml(name: str, max_step: int, inner_lr: float, inner_steps: int, task: str | None) -> ProcedureFn:
    check_count("max_step", max_step)
    _check_descent(inner_lr, inner_steps)

    def procedure(model: Model) -> None:
        loop = train_loop(model, task, step=max_step, across_passes=True)
        if model.loss_counts[loop.scope.task] > 1:
            raise TaskError(f"{name}() follows one loss, the loss_fn returns several: add them up")
        loss_of = _loss_after(model, loop.scope, inner_lr, inner_steps, second_order=name == "maml")
        _train(model, name, loop, _maml_step(model, loop.scope, loss_of))

    return procedure


def _maml_step(model: Model, scope: TaskScope, loss_of: Callable[[Task], Tensor]) -> Callable[[Sample], None]:
    """Gradients of each task's loss in turn, so that one task's graph is in memory; the last one's with the update."""
    optimizers = list(model.opt_to_vars(scope.task))
    clear, update = clear_step(optimizers), update_step(model, scope.task, optimizers, 1)
    backward, shown = backward_of(model), model.loss_metrics[scope.task]

    def step(sample: Sample) -> None:
        *others, last = _tasks(sample)
        if not len(last.query_y):
            raise DataError(
                "MAML learns from queries, and the episodes have none; write EpisodeSource(..., queries=15)"
            )
        clear()
        share = 1 / (len(others) + 1)
        total = torch.zeros((), device=last.query_y.device)
        for one in others:
            loss = loss_of(one) * share
            backward(loss)
            total += loss.detach()
        loss = loss_of(last) * share
        update(loss)
        shown.value = total + loss.detach()

    return step


def _loss_after(
    model: Model, scope: TaskScope, inner_lr: float, inner_steps: int, *, second_order: bool
) -> Callable[[Task], Tensor]:
    """The loss on a task's queries after learning its support, as a function of the model's variables."""
    call = _with_weights(model, model.calls[scope])
    first = {path: value for path, value in model.named_parameters() if value.requires_grad}

    def loss_after(one: Task) -> Tensor:
        weights: dict[str, Tensor] = dict(first)
        for _ in range(inner_steps):
            loss = call(weights, _sample(one.support_x, one.support_y))
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=second_order, allow_unused=True)
            pairs = zip(weights.items(), gradients, strict=True)
            weights = {path: old if change is None else old - inner_lr * change for (path, old), change in pairs}
        return call(weights, _sample(one.query_x, one.query_y))

    return loss_after


class _Called(nn.Module):
    """A user function as the forward pass of a module that has the model's variables."""

    def __init__(self, model: Model, call: UserCall) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, sample: Sample) -> Any:
        return self.call(sample)


def _with_weights(model: Model, call: UserCall) -> Callable[[dict[str, Tensor], Sample], Tensor]:
    """Call a user function with other tensors in the places of the model's variables."""
    module = _Called(model, call)
    store = model._store  # noqa: SLF001 - a friend; what get_variable hands out is not looked up in modules

    def called(weights: dict[str, Tensor], sample: Sample) -> Tensor:
        inside = {f"model.{path}": value for path, value in weights.items()}
        with store.replaced({variable_name(path): value for path, value in weights.items()}):
            loss: Tensor = torch.func.functional_call(module, inside, (sample,))
        return loss

    return called


# Evaluation


def _evaluate(model: Model, loop: LoopStage, adapt: Callable[[Task], None], *, transductive: bool, seed: int) -> None:
    scope = loop.scope
    ask = model.calls[scope]
    train_scope = TaskScope(MODE.TRAIN, scope.task)

    def step(sample: Sample) -> None:
        tasks = _tasks(sample)
        if len(tasks) > 1:
            raise DataError(f"a batch has {len(tasks)} tasks; an evaluation takes one: write EpisodeSource(tasks=None)")
        one = tasks[0]
        if not len(one.query_y):
            raise DataError("the episodes have no queries to ask about; write EpisodeSource(..., queries=1)")
        with _forgotten(model, train_scope), isolated_rng(_seed(model, scope, seed, "random")):
            adapt(one)
            with torch.no_grad():
                for x, labels in _questions(one, transductive=transductive):
                    ask(Sample.of({"x": x, "query_y": labels}))

    loop.run_ops = _as_op(model, scope, step, model.eval_ops[scope.task][1:])
    model.run_stage("eval" if scope.task is None else f"eval {scope.task}", loop)


def _questions(one: Task, *, transductive: bool) -> Iterator[tuple[Tensor, Tensor]]:
    if transductive:
        yield one.query_x, one.query_y
        return
    for row in range(len(one.query_y)):
        asked = slice(row, row + 1)
        yield torch.cat([one.support_x, one.query_x[asked]]), one.query_y[asked]


@contextmanager
def _forgotten(model: Model, scope: TaskScope) -> Iterator[None]:
    """Afterwards variables, buffers, optimizers and training metrics are as they were."""
    tensors = [(tensor, tensor.detach().clone()) for tensor in [*model.parameters(), *model.buffers()]]
    optimizers = list(model.opt_to_vars(scope.task))
    states = [snapshot(optimizer.state_dict()) for optimizer in optimizers]
    metrics = [(metric, metric.state_dict()) for metric in model.metric_states[scope].values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)
        clear_step(optimizers)()
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
            lay_states(optimizer)
        for metric, then in metrics:
            metric.load_state_dict(then)


# Tasks and their batches


def _tasks(sample: Sample) -> list[Task]:
    """The tasks of a batch: the parts of several have a leading dimension."""
    missing = [name for name in Task._fields if name not in sample]
    if missing:
        raise DataError(
            f"a batch of episodes has no field {missing[0]!r}, there are {', '.join(map(repr, sample.keys()))}; return "
            "a plait.data.episodes.EpisodeSource from the input_fn"
        )
    parts = [sample[name] for name in Task._fields]
    if parts[1].dim() == 1:
        return [Task(*parts)]
    return [Task(*(part[number] for part in parts)) for number in range(len(parts[1]))]


def _sample(x: Tensor, y: Tensor) -> Sample:
    return Sample.of({"x": x, "y": y})


def _seed(model: Model, scope: TaskScope, seed: int, *parts: int | str) -> int:
    """A pure function of the place in the data, so that nothing has to be saved."""
    stream = model.streams[scope]
    return derive_seed(seed, "few-shot", str(scope.mode), stream.epoch, stream.position, *parts)


def _generator(model: Model, scope: TaskScope, number: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(model, scope, seed, "batches", number))


def _inner_batches(
    count: int, generator: torch.Generator, *, size: int, iters: int, replacement: bool
) -> Iterator[Tensor]:
    """Row numbers, `size` at a time. A batch has no row twice, unless one pass ends and another begins inside it."""
    if replacement:
        for _ in range(iters):
            yield torch.randperm(count, generator=generator)[:size]
        return
    passes = -(-size * iters // count)
    rows = torch.cat([torch.randperm(count, generator=generator) for _ in range(passes)])
    for begin in range(0, size * iters, size):
        yield rows[begin : begin + size]


def _check_descent(inner_lr: float, inner_steps: int) -> None:
    check_count("inner_lr", inner_lr, whole=False)
    check_count("inner_steps", inner_steps)
