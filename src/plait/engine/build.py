"""The build: every user function runs once on the first batch, and the model learns what it is made of."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from plait.data import Sample, Stream
from plait.data.stream import close_all
from plait.engine.calls import UserCall
from plait.engine.capture import CapturedStep, recording_stream
from plait.engine.layout import compile_modules, lay_back_if_refused, lay_channels_last
from plait.engine.metrics import Latest
from plait.engine.op import Op
from plait.engine.private import are_private, check_others, private_task
from plait.engine.sampling import check_seed
from plait.engine.strategy import Local
from plait.engine.task import MODE, TaskScope, task_scope
from plait.engine.update import clear_when_moved, refuse_scaler, update_step
from plait.errors import ConfigError, DataError, FunctionError, TaskError, VariableError
from plait.optim.assign import PartialAssignment, make_optimizer
from plait.optim.fusing import fuse
from plait.rng import rng_state, set_rng_state
from plait.variables.graph import leaves

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["build", "current_model"]

log = logging.getLogger("plait")

_compiled: list[Model] = []


def current_model() -> Model | None:
    """The model that was compiled last."""
    return _compiled[-1] if _compiled else None


def build(model: Model) -> None:
    """Make the Ops of every task. Random state, buffers and the inputs' positions are left as they were."""
    if not model.tasks():
        raise TaskError("the model has no task: give it an input_fn and a loss_fn before compile()")
    model.config.apply()
    device = model.config.resolved_device()
    model.strategy.begin(model)  # which may choose among the GPUs
    if device.type == "cuda":
        # its random states are among those that the build leaves as they were
        torch.cuda.init()  # type: ignore[no-untyped-call] # torch leaves it unannotated
    model._store.move(device)  # noqa: SLF001 - the build is the model's own
    model.scaler = _scaler(model, device)
    try:
        with _untouched(model):
            built = {task: _build_task(model, task) for task in model.tasks()}
            model.reset_metrics()
    except BaseException:
        close_all(model.streams.values())
        raise
    model.variables()  # two of one name are noticed here
    names = {variable: name for name, variable in model.trainable_variables().items()}
    asked = model.config.channels_last
    laid = (device.type == "cuda" if asked is None else asked) and lay_channels_last(model)
    model.strategy.transform(model)
    for task in model.loss_fns:
        reached = {names[variable] for variable in built[task].reached if variable in names}
        _assign_optimizers(model, task, reached, built[task].shapes)
    check_others(model, {task: built[task].reached for task in model.loss_fns})
    if _compiles(model):
        compile_modules(model)
    if laid and asked is None:
        lay_back_if_refused(model)
    model.compiled = True
    _check_scopes(model)
    model.strategy.prepare(model)
    _compiled[:] = [model]


def _captures(model: Model) -> bool:
    return model.config.capture and model.config.resolved_device().type == "cuda"


def _compiles(model: Model) -> bool:
    """Where there are no graphs to replay, `capture` is for the compiler."""
    return model.config.compile or (model.config.capture and not _captures(model))


def _scaler(model: Model, device: torch.device) -> torch.amp.GradScaler | None:
    """What scales the loss where half precision would lose small gradients, unless the user has chosen a scale."""
    if model.config.precision != "fp16" or model.gradient.loss_scale != 1:
        return None
    return torch.amp.GradScaler(device.type)


@contextmanager
def _untouched(model: Model) -> Iterator[None]:
    state = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    now = model._now  # noqa: SLF001
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in [*buffers, *model._store.fresh_buffers]:  # noqa: SLF001
                buffer.copy_(before)
        now.leave()
        set_rng_state(state)


class _Built(NamedTuple):
    """What the first call of a loss_fn showed."""

    reached: set[torch.Tensor]
    shapes: list[list[int]]
    """Of its losses."""


def _build_task(model: Model, task: str | None) -> _Built:
    built = _Built(set(), [])
    if task in model.loss_fns:
        built = _build_loss(model, task)
    elif task in model.train_ops:
        _open_input(model, TaskScope(MODE.TRAIN, task), needed=False)
        count = Op(model.global_step.increment, name=f"step of {task!r}", now=model._now, trains=True)  # noqa: SLF001
        model.train_ops[task].append(count)
    if task in model.eval_fns:
        _build_eval(model, task)
    elif task in model.eval_ops:
        _open_input(model, TaskScope(MODE.EVAL, task), needed=False)
    return built


def _open_input(model: Model, scope: TaskScope, *, needed: bool) -> Op | None:
    """Ask the input_fn for this mode's data and make the Op that reads it."""
    input_fn = model.input_fns.get(scope.task)
    if input_fn is None:
        if needed:
            raise TaskError(f"task {scope.task!r} has no input_fn: write model.input_fn(fn, task={scope.task!r})")
        return None
    assert scope.mode is not None  # noqa: S101 - scopes of the engine always have one
    with task_scope(scope.mode, scope.task):
        data = input_fn(model, scope.mode)
    if data is None:
        if needed:
            raise DataError(f"the input_fn for {scope} returned None: return a Sample, a DataLoader or an iterable")
        return None
    sample = data if isinstance(data, Sample) else Sample(data)
    device = model.config.resolved_device()
    check_seed(sample.source, model.strategy, scope)
    source = model.strategy.part(sample.source, training=scope.mode is MODE.TRAIN)
    stream = Stream(source, name=str(scope), columns=sample.columns, device=None if device.type == "cpu" else device)
    read = model.strategy.reader(stream, scope)
    op = Op(read, name=f"input for {scope}", stream=stream, scope=scope, now=model._now)  # noqa: SLF001
    sample.op = op
    model.inputs[scope] = sample
    model.streams[scope] = stream
    return op


def _user_call(model: Model, scope: TaskScope, function: Callable[..., Any]) -> UserCall:
    bound: Callable[..., Any] = functools.partial(function, model)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(model.config.precision)
    if half is not None:
        bound = _autocast(bound, model.config.resolved_device().type, half)
    call = model.calls[scope] = UserCall(bound, scope, model._store, model._now)  # noqa: SLF001
    return call


def _autocast(function: Callable[..., Any], device: str, dtype: torch.dtype) -> Callable[..., Any]:
    def in_half_precision(*args: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return function(*args)

    return in_half_precision


def _build_loss(model: Model, task: str | None) -> _Built:
    scope = TaskScope(MODE.TRAIN, task)
    read = _open_input(model, scope, needed=True)
    assert read is not None  # noqa: S101 - it was needed
    call = _user_call(model, scope, model.loss_fns[task])
    model._now.enter_mode(True)  # noqa: SLF001
    first = _with_rows(read.fn(), model.streams[scope])
    with torch.enable_grad(), _first_pass(model):
        loss = call.build(first)
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    for one in losses:
        _check_loss(one, scope)
    model.loss_counts[task] = len(losses)
    shown = model.loss_metrics[task] = Latest(torch.device("cpu"))
    model.metric_states.setdefault(scope, {}).setdefault("loss", shown)  # the user may have one of that name
    model.losses[task] = Op(call, [read], name=f"loss of {scope}", scope=scope, now=model._now)  # noqa: SLF001
    reached = leaves(losses) | {one for one in losses if one.grad_fn is None}
    return _Built(reached, [list(one.shape) for one in losses])


def _first_pass(model: Model) -> AbstractContextManager[None]:
    return recording_stream(model.config.resolved_device()) if _captures(model) else nullcontext()


def _with_rows(first: Sample, stream: Stream) -> Sample:
    """The first batch; where batches are drawn and it has no rows, the next that has: variables are made of it."""
    if first.batch_size == 0:
        batches = stream.source.batches(stream.epoch, stream.position)
        found = (stream.shaped(Sample.of(batch)) for batch in batches)
        first = next((sample for sample in found if sample.batch_size), first)
    return first


def _check_loss(loss: Any, scope: TaskScope) -> None:
    if not isinstance(loss, torch.Tensor):
        raise FunctionError(f"the loss_fn for {scope} returned {type(loss).__name__}: return the loss, a tensor")
    if not loss.requires_grad:
        raise FunctionError(
            f"the loss that the loss_fn for {scope} returned depends on no trainable variable: compute it from the "
            "model's modules or from plait.layer, without detach()"
        )


def _assign_optimizers(model: Model, task: str | None, reached: set[str], shapes: Sequence[Sequence[int]]) -> None:
    if task not in model.opt_fns:
        argument = "" if task is None else f", task={task!r}"
        raise TaskError(
            f"{'the model' if task is None else f'task {task!r}'} has a loss_fn but no optimizer_fn: write "
            f"model.optimizer_fn(efl.optimizer_fn.optimizer_setter(opt){argument})"
        )
    given = model.opt_fns[task](model, task)
    pairs = given.values() if isinstance(given, dict) else []
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise FunctionError(
            f"the optimizer_fn of task {task!r} returned {type(given).__name__} {given!r:.60}: return "
            "{optimizer: (vars, scope)}"
        )
    assignment = {make_optimizer(opt, pair[0]): (list(pair[0]), pair[1]) for opt, pair in given.items()}
    moved = {variable for opt in assignment for group in opt.param_groups for variable in group["params"]}
    named = model.trainable_variables()
    left = [name for name, variable in named.items() if name in reached and variable not in moved]
    if left and not isinstance(given, PartialAssignment):
        raise VariableError(
            f"variable {left[0]!r}{f' (and {len(left) - 1} more)' if left[1:] else ''} is moved by the loss of task "
            f"{task!r}, but no optimizer has it: add its scope, or freeze it with requires_grad_(False)"
        )
    if model.loss_counts[task] not in (1, len(assignment)):
        raise TaskError(
            f"task {task!r} has {model.loss_counts[task]} losses and {len(assignment)} optimizers: give one for each"
        )
    for optimizer in assignment:
        if hasattr(optimizer, "clock"):
            optimizer.clock = functools.partial(int, model.global_step)
    model.assignments[task] = assignment
    if are_private(list(assignment), task):
        update, losses = _privately(model, task, [named[name] for name in named if name in reached], shapes[0])
    else:
        _check_shapes(shapes, TaskScope(MODE.TRAIN, task))
        if isinstance(model.strategy, Local):  # others put gradients where a kernel for all would not take them
            fuse(model, assignment)
        update, losses = update_step(model, task, list(assignment), model.loss_counts[task]), model.losses[task]
    clear = clear_when_moved(model, list(assignment))
    op = Op(
        update,
        [losses],
        name=f"training of task {task!r}" if task is not None else "training",
        scope=TaskScope(MODE.TRAIN, task),
        now=model._now,  # noqa: SLF001
        first=[Op(clear, name="clear gradients")],
        trains=True,
    )
    if _captures(model):
        if task in model.private_tasks:
            log.warning("the training step of task %r is not captured: its optimizer is private", task)
        else:
            call = model.calls[TaskScope(MODE.TRAIN, task)]
            op.captured = CapturedStep(model, task, (clear, call, update), list(assignment))
    model.train_ops.setdefault(task, []).insert(0, op)


def _check_shapes(shapes: Sequence[Sequence[int]], scope: TaskScope) -> None:
    for shape in shapes:
        if shape:
            raise FunctionError(f"the loss for {scope} has shape {shape}: return one number, such as loss.mean()")


def _privately(
    model: Model, task: str | None, reached: Sequence[torch.Tensor], shape: Sequence[int]
) -> tuple[Callable[[Any], None], Op]:
    """The update of a private task, and the Op of its losses, one a row; the task's loss is their mean."""
    refuse_scaler(model, "a private optimizer")
    if _compiles(model):
        raise ConfigError(
            f"compile=True, and the optimizer of task {task!r} is private: each row's gradient is made of what "
            "modules note at their calls, which compiled ones do not make. Leave compile out"
        )
    private = private_task(model, task, list(model.assignments[task]), reached, shape)
    shown = model.losses[task]
    losses = Op(
        private.forward(shown.fn), shown.inputs, name=f"losses of {shown.scope}", scope=shown.scope, now=shown.now
    )
    model.losses[task] = Op(private.mean, [losses], name=shown.name, scope=shown.scope, now=shown.now)
    return private.update, losses


def _build_eval(model: Model, task: str | None) -> None:
    scope = TaskScope(MODE.EVAL, task)
    read = _open_input(model, scope, needed=False)
    if read is None:
        return
    call = _user_call(model, scope, model.eval_fns[task])
    model._now.enter_mode(False)  # noqa: SLF001
    with torch.no_grad():
        call.build(read.fn())
    op = Op(call, [read], name=f"evaluation of {scope}", scope=scope, now=model._now)  # noqa: SLF001
    model.eval_ops.setdefault(task, []).insert(0, op)


def _check_scopes(model: Model) -> None:
    """Hooks, metrics and Ops that were given before compile() must belong to tasks that exist."""
    known = model.tasks()
    used = {scope.task for scope in [*model.hooks, *model.metric_states]} | {*model.train_ops, *model.eval_ops}
    for task in used:
        if task not in known:
            raise TaskError(f"there is no task {task!r}: the model has {', '.join(repr(name) for name in known)}")
    for scope, call in model.calls.items():
        if call.placeholders and not model.hooks.get(scope):
            raise TaskError(
                f"the function for {scope} makes {len(call.placeholders)} placeholder(s) that nothing feeds: "
                "add a hook whose before_run returns SessionRunArgs(feed_dict={placeholder: value})"
            )
