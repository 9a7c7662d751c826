"""A `model_fn` as the functions of a Model; evaluation and prediction are added to the model that lives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from plait.data import Sample, Stream
from plait.data.stream import close_all
from plait.engine.calls import UserCall, current_call
from plait.engine.metrics import mean
from plait.engine.model import Model
from plait.engine.op import GlobalStep, Op, default_global_step
from plait.engine.sampling import check_seed
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, FunctionError, MismatchError, TaskError, VariableError
from plait.optim.assign import Assignment, PartialAssignment, in_scope, scope_optimizer
from plait.rng import IsolatedRng, derive_seed, isolated_rng, rng_state, set_rng_state
from plait.train.config import RunConfig
from plait.train.inputs import features_and_labels
from plait.train.optimizers import TrainOp
from plait.train.spec import EstimatorSpec, ModeKeys, measurement_of
from plait.variables import bank
from plait.variables.store import current

__all__ = ["EVAL", "TRAIN", "Program", "get_global_step", "names_of"]

TRAIN, EVAL = TaskScope(MODE.TRAIN, None), TaskScope(MODE.EVAL, None)
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def get_global_step(graph: None = None) -> GlobalStep:
    """The count of training steps: of the model whose function is running; elsewhere, of sessions without a model."""
    del graph
    store = current.frame.store
    model = store.module if store is not None else None
    return model.global_step if isinstance(model, Model) else default_global_step()


class Program:
    """One living Model. It is compiled once, with the data of the first training or without any.

    Evaluation and prediction call the `model_fn` on the same variables, wherever they are at that moment.
    """

    def __init__(self, model_fn: Callable[..., Any], params: Mapping[str, Any], config: RunConfig) -> None:
        self.model = Model(seed=config.tf_random_seed or 0)
        self.specs: dict[str, EstimatorSpec] = {}
        """The last one of each mode."""
        self.trains = False
        self._model_fn = model_fn
        self._params = params
        self._config = config
        self._takes = names_of(model_fn)
        self._modes: dict[str, _Mode] = {}
        self._checkpoint: str | None = None
        self._random: IsolatedRng | None = None

    def compile(self, data: Sample | None, *, checkpoint: str | None = None) -> None:
        """Build the model; `data` is what it will train with. None: it will not, and begins as in `checkpoint`."""
        self._checkpoint = checkpoint
        model = self.model
        model.input_fn(lambda _, mode: data if mode is MODE.TRAIN else None)
        if data is not None:
            model.loss_fn(self._loss)
            model.optimizer_fn(self._assign)
            self.trains = True
        model.compile(session_config=self._config.session_config, strategy=self._config.train_distribute)

    def random(self) -> IsolatedRng:
        """The random states of training: with the same seed, dropout and samplers draw the same in every run."""
        if self._random is None:
            model = self.model
            self._random = isolated_rng(derive_seed(model.seed, "training", model.strategy.worker_id))
        return self._random

    @contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """What fails inside, before anything runs, leaves no readers behind."""
        try:
            yield
        except BaseException:
            close_all(self.model.streams.values())
            raise

    def train_with(self, data: Sample) -> None:
        """Read the next training from `data`, from its beginning."""
        model = self.model
        check_seed(data.source, model.strategy, TRAIN)
        model.streams[TRAIN].close()
        read = model.inputs[TRAIN].op
        read.stream, read.fn = _opened(model, TRAIN, data)
        data.op, model.inputs[TRAIN], model.streams[TRAIN] = read, data, read.stream

    @contextmanager
    def mode(self, mode: str, data: Sample) -> Iterator[Op]:
        """The Op of a step of EVAL or PREDICT over `data`. Inside, the model has this input, and its hooks."""
        model, known = self.model, self._modes.get(mode)
        stream, read = _opened(model, EVAL, data, whole=mode == ModeKeys.PREDICT)
        try:
            if known is None:
                known = self._modes[mode] = self._built(mode, stream, read)
            else:
                known.read.stream, known.read.fn = stream, read
            data.op = known.read
            if mode == ModeKeys.EVAL:
                model.streams[EVAL], model.inputs[EVAL], model.eval_ops[None] = stream, data, [known.op]
                model.hooks[EVAL] = list(known.call.hooks)
            yield known.op
        finally:
            stream.close()
            if mode == ModeKeys.EVAL:
                for table in (model.streams, model.inputs, model.hooks):
                    table.pop(EVAL, None)

    def evaluate_again(self, data: Sample) -> None:
        """Inside `mode` of EVAL: go on with new data, from its beginning, in the session that runs."""
        stream = self.model.streams[EVAL]
        stream.close()
        stream.source = self.model.strategy.part(data.source, training=False)
        stream.pending, stream.epoch, stream.position = None, 0, 0

    def hooks_of(self, mode: str) -> list[Any]:
        """The hooks that the spec of EVAL or PREDICT had when it was built."""
        return list(self._modes[mode].call.hooks)

    def _built(self, mode: str, stream: Stream, read: Callable[[], Sample]) -> _Mode:
        model = self.model
        before = set(model.variables())
        function = self._evaluate if mode == ModeKeys.EVAL else self._predict
        call = UserCall(_in_half(function, model), EVAL, model._store, model._now)  # noqa: SLF001 - a friend
        reading = Op(read, name=f"input for {mode}", stream=stream, scope=EVAL, now=model._now)  # noqa: SLF001
        with _untouched(model), torch.no_grad():
            model._now.enter_mode(False)  # noqa: SLF001
            call.build(reading.fn())
        new = [name for name in model.variables() if name not in before]
        if new and not self.trains:
            _load(model, new, self._checkpoint)
        elif new:
            raise FunctionError(
                f"in mode {mode!r} the model_fn makes variable {new[0]!r}, which training did not make: make the same "
                "variables in every mode"
            )
        model.reset_metrics(EVAL)
        op = Op(call, [reading], name=f"step of {mode}", scope=EVAL, now=model._now)  # noqa: SLF001
        return _Mode(call, reading, op)

    # What the Model calls

    def _loss(self, model: Model, sample: Sample) -> Any:
        spec = self._spec(ModeKeys.TRAIN, sample)
        if spec.training_hooks or spec.training_chief_hooks:
            model.add_hooks(spec.hooks(ModeKeys.TRAIN, chief=model.strategy.worker_id == 0))
        return _losses(spec)

    def _evaluate(self, sample: Sample) -> None:
        spec, model = self._spec(ModeKeys.EVAL, sample), self.model
        model.add_metric("loss", mean(spec.loss))  # each batch counts the same, as in TensorFlow
        for name, metric in (spec.eval_metric_ops or {}).items():
            model.add_metric(name, measurement_of(name, metric))
        _add_hooks(spec.evaluation_hooks)

    def _predict(self, sample: Sample) -> Any:
        spec = self._spec(ModeKeys.PREDICT, sample)
        _add_hooks(spec.prediction_hooks)
        return spec.predictions

    def _spec(self, mode: str, sample: Sample) -> EstimatorSpec:
        features, labels = features_and_labels(sample, self.model.config.resolved_device())
        return self.call(features, None if mode == ModeKeys.PREDICT else labels, mode)

    def call(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        """Call the `model_fn` with what it takes; its spec is checked in the first call of a mode."""
        named = {"labels": labels, "mode": mode, "params": self._params, "config": self._config}
        if labels is not None and self._takes is not None and "labels" not in self._takes:
            raise FunctionError("the input_fn gives labels, but the model_fn does not take `labels`: let it")
        if self._takes is not None:
            named = {name: named[name] for name in self._takes}
        spec = self._model_fn(features, **named)
        if type(spec) is not EstimatorSpec:
            raise FunctionError(
                f"in mode {mode!r} the model_fn returned {type(spec).__name__}: return plait.train.EstimatorSpec(...)"
            )
        if mode not in self.specs:
            spec.check(mode)
        self.specs[mode] = spec
        return spec

    def _assign(self, model: Model, task: str | None) -> Assignment:
        """The optimizers of the first spec, over their variables."""
        given = self.specs[ModeKeys.TRAIN].train_op
        if isinstance(given, Mapping):
            return scope_optimizer(given)(model, task)
        ops = _train_ops(given)
        named = model.trainable_variables()
        if not named:
            raise VariableError("there is no variable to train: use plait.layer or plait.get_variable in the model_fn")
        whole = all(op.var_list is None for op in ops)
        assignment: Assignment = {} if whole else PartialAssignment()
        for number, op in enumerate(ops):
            variables = _variables(op, named)
            scope = op.var_list if isinstance(op.var_list, str) else None
            assignment[model.make_optimizer(op.optimizer, variables, f"train_op {number}")] = (variables, scope)
        if len(_distinct(ops)) == 1:
            _check_once(assignment, named)
        return assignment


def _load(model: Model, names: Sequence[str], checkpoint: str | None) -> None:
    """Give variables that were just made the values of a checkpoint."""
    if checkpoint is None:
        return
    from plait.cluster.embedding import SparseEmbedding  # noqa: PLC0415 - brings tables, which few need

    if any(isinstance(module, SparseEmbedding) for module in model.modules()):
        raise ConfigError(
            "a model with a SparseEmbedding: its rows are not among the variables of a checkpoint; evaluate in the "
            "process that trains, with train_and_evaluate"
        )
    variables, saved = model.variables(), bank.read_variables(checkpoint)
    wrong = [name for name in names if name not in saved or saved[name].shape != variables[name].shape]
    if wrong:
        raise MismatchError(f"{checkpoint} has no {wrong[0]!r} of that shape: it belongs to another model")
    with torch.no_grad():
        for name in names:
            variables[name].copy_(saved[name])
    model.global_step.value = bank.read_step(checkpoint)


class _Mode:
    """What was built of EVAL or PREDICT."""

    def __init__(self, call: UserCall, read: Op, op: Op) -> None:
        self.call = call
        self.read = read
        self.op = op


def names_of(model_fn: Callable[..., Any]) -> list[str] | None:
    """Which of the four named arguments it takes; None: any."""
    if not callable(model_fn):
        raise FunctionError(f"model_fn is a {type(model_fn).__name__}: give a function")
    parameters = inspect.signature(model_fn).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return None
    if "features" not in parameters:
        raise FunctionError(f"model_fn takes {', '.join(parameters) or 'nothing'}: its first argument is `features`")
    return [name for name in ("labels", "mode", "params", "config") if name in parameters]


def _opened(
    model: Model, scope: TaskScope, data: Sample, *, whole: bool = False
) -> tuple[Stream, Callable[[], Sample]]:
    """What is read, and how; this worker's part of it, unless it is to be the whole."""
    device = model.config.resolved_device()
    source = data.source if whole else model.strategy.part(data.source, training=scope.mode is MODE.TRAIN)
    stream = Stream(source, name=str(scope), columns=data.columns, device=None if device.type == "cpu" else device)
    return stream, model.strategy.reader(stream, scope)


def _add_hooks(hooks: Sequence[Any] | None) -> None:
    call = current_call()
    if hooks and call is not None:
        call.add_hooks(hooks)


def _in_half(function: Callable[[Any], Any], model: Model) -> Callable[[Any], Any]:
    half = _HALF.get(model.config.precision)
    if half is None:
        return function

    def in_half(sample: Any) -> Any:
        with torch.autocast(model.config.resolved_device().type, dtype=half):
            return function(sample)

    return in_half


@contextmanager
def _untouched(model: Model) -> Iterator[None]:
    """A build leaves random states and buffers as they were."""
    state = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        model._now.leave()  # noqa: SLF001 - a friend
        set_rng_state(state)


def _train_ops(given: Any) -> list[TrainOp]:
    """A `train_op` as a list of what `minimize` gives; a factory moves all variables by the spec's loss."""
    if type(given) is TrainOp:
        return [given]
    if isinstance(given, (list, tuple)) and given and all(type(one) is TrainOp for one in given):
        return list(given)
    if callable(given) and not isinstance(given, torch.optim.Optimizer):
        return [TrainOp(given, None)]  # type: ignore[arg-type] # the loss is the spec's
    raise FunctionError(
        f"train_op is {type(given).__name__} {given!r:.60}: give what plait.train.AdamOptimizer(0.001).minimize(loss) "
        "returns, a list of such, a function that makes an optimizer of a list of variables, or {scope: function}"
    )


def _distinct(ops: Sequence[TrainOp]) -> list[Any]:
    return list({id(op.loss): op.loss for op in ops}.values())


def _losses(spec: EstimatorSpec) -> Any:
    """What is differentiated: the loss that `minimize` was given; one for each optimizer, where they differ."""
    given = spec.train_op
    if type(given) is TrainOp:
        return given.loss
    if type(given) is list or type(given) is tuple:
        losses = _distinct(_train_ops(given))
        return losses[0] if len(losses) == 1 else [op.loss for op in given]
    return spec.loss


def _variables(op: TrainOp, named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    if op.var_list is None:
        return list(named.values())
    if isinstance(op.var_list, str):
        found = [value for name, value in named.items() if in_scope(name, op.var_list)]
        what = f"no trainable variable is in scope {op.var_list!r}"
    else:
        wanted = {id(one) for one in op.var_list}
        found = [value for value in named.values() if id(value) in wanted]
        what = "var_list has no trainable variable of the model"
    if not found:
        tops = sorted({name.partition("/")[0] for name in named})
        raise VariableError(f"{what}: the model has {', '.join(tops)}")
    return found


def _check_once(assignment: Assignment, named: Mapping[str, torch.Tensor]) -> None:
    seen: set[int] = set()
    for variables, _ in assignment.values():
        for variable in variables:
            if id(variable) in seen:
                name = next(name for name, value in named.items() if value is variable)
                raise TaskError(f"variable {name!r} is moved by two optimizers: give each its own var_list=")
            seen.add(id(variable))
