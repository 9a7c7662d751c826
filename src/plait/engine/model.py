"""`Model`: named tasks, each with its input, loss, optimizer, evaluation, metrics and hooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait.data import Sample, Stream
from plait.engine.calls import Now, UserCall, current_call
from plait.engine.functions import EvalFn, InputFn, LossFn, OptimizerFn, ProcedureFn
from plait.engine.hooks import SessionRunHook
from plait.engine.metrics import Latest, Measurement, Metric, latest, mean
from plait.engine.op import GlobalStep, Op, as_op
from plait.engine.settings import GradientConfig, SessionConfig, check_opt_config, check_sync_optimizer_config
from plait.engine.strategy import Connectable, Local, Strategy, default_strategy
from plait.engine.task import DEFAULT_MODE, MODE, TaskScope, current_task_scope
from plait.errors import FunctionError, TaskError, VariableError
from plait.optim.assign import Assignment, make_optimizer
from plait.variables.store import ROOT, VariableFrame, VariableStore, current, variable_name

if TYPE_CHECKING:
    from plait.engine.private import PrivateState, PrivateTask
    from plait.privacy.ledger import Ledger

__all__ = ["Model", "connected"]


class Model(nn.Module):
    """A model and its tasks.

    Give each task its functions, `compile()`, then `fit()` a procedure. With a single task, no call needs to name it.
    """

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.input_fns: dict[str | None, InputFn] = {}
        self.loss_fns: dict[str | None, LossFn] = {}
        self.opt_fns: dict[str | None, OptimizerFn] = {}
        self.eval_fns: dict[str | None, EvalFn] = {}
        self.losses: dict[str | None, Op] = {}
        self.inputs: dict[TaskScope, Sample] = {}
        self.train_ops: dict[str | None, list[Op]] = {}
        self.eval_ops: dict[str | None, list[Op]] = {}
        self.extra_data: dict[Any, Any] = {}
        self.global_step = GlobalStep()
        self.metric_variables_initializer = Op(self.reset_metrics, name="metric_variables_initializer")
        self.stage_mgr: Any = None
        self.strategy: Strategy = Local()
        self.config = SessionConfig()
        self.gradient = GradientConfig()
        self.opt_config = check_opt_config(None)
        self.scaler: torch.amp.GradScaler | None = None
        """Scales the loss and follows overflows, with precision="fp16" and no loss_scale."""
        self.compiled = False
        self.streams: dict[TaskScope, Stream] = {}
        self.metric_states: dict[TaskScope, dict[str, Metric]] = {}
        self.loss_counts: dict[str | None, int] = {}
        """How many losses each task's loss_fn returns."""
        self.loss_metrics: dict[str | None, Latest] = {}
        """Where each task's update leaves its loss for the log."""
        self.hooks: dict[TaskScope, list[SessionRunHook]] = {}
        self.fit_hooks: list[SessionRunHook] = []
        """Those given to `fit`, which see every run."""
        self.calls: dict[TaskScope, UserCall] = {}
        self.assignments: dict[str | None, Assignment] = {}
        self.history: list[dict[str, Any]] = []
        """What each evaluation found: stage, task, global step, metrics."""
        self.private_state: PrivateState | None = None
        """What private optimizers have in common, if there are any."""
        self.said: set[str] = set()
        """Warnings that are given once."""
        self._optimizers: dict[tuple[int, str | None], tuple[Any, torch.optim.Optimizer]] = {}
        self._groups: dict[TaskScope, Op] = {}
        self._now = Now(self)
        self._store = VariableStore(seed)
        self._store.module = self
        self.add_module(ROOT, self._store.root)

    # What a task is made of

    def input_fn(self, input_fn: InputFn, task: str | None = None) -> Model:
        """Where the task's data comes from."""
        return self._register(self.input_fns, "input_fn", input_fn, task)

    def loss_fn(self, loss_fn: LossFn, task: str | None = None) -> Model:
        """What the task minimises."""
        return self._register(self.loss_fns, "loss_fn", loss_fn, task)

    def optimizer_fn(self, optimizer_fn: OptimizerFn, task: str | None = None) -> Model:
        """Which optimizers move its variables; made with `efl.optimizer_fn`."""
        return self._register(self.opt_fns, "optimizer_fn", optimizer_fn, task)

    def eval_fn(self, eval_fn: EvalFn, task: str | None = None) -> Model:
        """How the task is evaluated."""
        return self._register(self.eval_fns, "eval_fn", eval_fn, task)

    def _register(self, table: dict[str | None, Any], what: str, function: Any, task: str | None) -> Model:
        if not callable(function):
            raise FunctionError(f"{what} of task {task!r} is a {type(function).__name__}: give a function")
        if self.compiled:
            raise TaskError(f"{what} of task {task!r} comes after compile(): give every function before")
        if task in table:
            raise TaskError(f"task {task!r} has an {what} already: give another task a name of its own")
        table[task] = function
        return self

    def add_train_op(self, train_op: Any, task: str | None = None) -> None:
        """Run an Op (`plait.op(fn, *inputs)`) or a plain callable at every training step, after the update."""
        self._add_op(self.train_ops, train_op, self._task(task))

    def add_eval_op(self, eval_op: Any, task: str | None = None) -> None:
        """Run an Op or a plain callable at every evaluation step, after `eval_fn`."""
        self._add_op(self.eval_ops, eval_op, self._task(task))

    def _add_op(self, table: dict[str | None, list[Op]], op: Any, task: str | None) -> None:
        """Inside a loss_fn or eval_fn: added at the build, already there at steps."""
        call = current_call()
        if call is None or call.building:
            table.setdefault(task, []).append(as_op(op))
            self._groups.clear()

    def add_hooks(self, hooks: Sequence[SessionRunHook], mode: MODE = DEFAULT_MODE, task: str | None = None) -> None:
        """Hooks for the runs of one task in one mode. Inside a loss_fn or eval_fn: made at the build, fed at steps."""
        for hook in hooks:
            if not isinstance(hook, SessionRunHook):
                raise FunctionError(f"add_hooks got a {type(hook).__name__}: derive it from plait.train.SessionRunHook")
        call = current_call()
        if call is not None:
            call.add_hooks(hooks)
            if not call.building:
                return
        self.hooks.setdefault(self._scope(mode, task), []).extend(hooks)

    def add_metric(self, name: str, metric: Any, mode: MODE = DEFAULT_MODE, task: str | None = None) -> None:
        """Accumulate `metric` at every step and show it in the log.

        It is what `efl.metrics.*` returns; or a tensor (shown as it is in training, averaged in evaluation); or an Op.
        """
        call = current_call()
        scope = call.scope if call is not None and mode is DEFAULT_MODE and task is None else self._scope(mode, task)
        states = self.metric_states.get(scope)
        if states is None:
            states = self.metric_states[scope] = {}
        found = states.get(name)
        if type(found) is Latest and isinstance(metric, torch.Tensor):  # the commonest case, at every step
            found.value = metric
            return
        if isinstance(metric, Op):
            state = states.setdefault(name, latest(torch.nan).create())
            table = self.eval_ops if scope.mode is MODE.EVAL else self.train_ops
            self._add_op(table, Op(state.update, [metric], name=f"metric {name}", scope=scope), scope.task)
            return
        measured = metric if isinstance(metric, Measurement) else self._measured(name, metric, scope)
        if found is None:
            if call is not None and not call.building:
                raise FunctionError(f"metric {name!r} is new after compile(): add the same metrics at every call")
            found = states[name] = measured.checked().create()
        found.update(*measured.args)

    def _measured(self, name: str, value: Any, scope: TaskScope) -> Measurement:
        if not isinstance(value, (torch.Tensor, int, float)):
            raise FunctionError(
                f"metric {name!r} is a {type(value).__name__}: give efl.metrics.mean(values) or another of "
                "efl.metrics, a number, or an Op"
            )
        if scope.mode is not MODE.EVAL:
            return latest(value)
        sample = self._now.sample
        rows = sample.batch_size if sample is not None else None
        tensor = torch.as_tensor(value, device=self._store.device)
        if tensor.dim() or rows is None:
            return mean(tensor)
        return mean(tensor, torch.full((), float(rows), device=tensor.device))  # so a short batch counts for less

    def add_extra_data(self, key: Any, value: Any) -> None:
        """Keep something of your own with the model."""
        if key in self.extra_data:
            raise TaskError(f"there is extra data under {key!r} already: choose another key")
        self.extra_data[key] = value

    def get_extra_data(self, key: Any) -> Any:
        return self.extra_data.get(key)

    # What a compiled model offers

    @property
    def training_flag(self) -> bool:
        """True inside training steps."""
        return bool(self._now.training)

    @property
    def privacy(self) -> Ledger | None:
        """What private training has cost so far; None if no optimizer is private."""
        return self.private_state.ledger if self.private_state is not None else None

    @property
    def private_tasks(self) -> dict[str | None, PrivateTask]:
        """The tasks whose optimizers are private."""
        return self.private_state.tasks if self.private_state is not None else {}

    def input(self, mode: MODE = DEFAULT_MODE, task: str | None = None) -> Sample:
        """The task's input; as a fetch, or as an input of `plait.op`, it is this step's batch."""
        found: Sample = self._part(self.inputs, self._scope(mode, task), "input")
        return found

    def loss(self, task: str | None = None) -> Op:
        found: Op = self._part(self.losses, self._task(task), "loss")
        return found

    def train_op(self, task: str | None = None) -> Op:
        """One training step: forward, backward, update, and the Ops that `add_train_op` added."""
        return self._group(TaskScope(MODE.TRAIN, self._task(task)), self.train_ops)

    def eval_op(self, task: str | None = None) -> Op:
        """One evaluation step."""
        return self._group(TaskScope(MODE.EVAL, self._task(task)), self.eval_ops)

    def metrics(self, mode: MODE = DEFAULT_MODE, task: str | None = None) -> dict[str, Op]:
        """An Op for each metric; fetching it runs the step and gives what has been accumulated."""
        scope = self._scope(mode, task)
        step = self.eval_op(scope.task) if scope.mode is MODE.EVAL else self.loss(scope.task)
        states = self.metric_states.get(scope, {})
        ours = self.loss_metrics.get(scope.task)
        return {n: _result_after(n, state, step, scope, is_loss=state is ours) for n, state in states.items()}

    def opt_to_vars(self, task: str | None = None) -> Assignment:
        """The task's optimizers: {optimizer: (variables, scope)}."""
        found: Assignment = self._part(self.assignments, self._task(task), "optimizer")
        return found

    def metric_values(self, mode: MODE = DEFAULT_MODE, task: str | None = None) -> dict[str, float]:
        """What the metrics of a task have come to, as numbers; runs nothing."""
        states = self.metric_states.get(self._scope(mode, task), {})
        return {name: float(state.result()) for name, state in states.items()}

    def reset_metrics(self, scope: TaskScope | None = None) -> None:
        """Start all metrics anew, or those of one task in one mode."""
        for states in self.metric_states.values() if scope is None else [self.metric_states.get(scope, {})]:
            for state in states.values():
                state.reset()

    def _group(self, scope: TaskScope, table: Mapping[str | None, list[Op]]) -> Op:
        found = self._groups.get(scope)
        if found is None:
            ops = self._part(table, scope.task, f"{str(scope.mode).lower()} op")
            made = ops[0] if len(ops) == 1 else Op(_first, ops, name=f"{scope}", scope=scope)
            found = self._groups[scope] = made
        return found

    def _part(self, table: Mapping[Any, Any], key: Any, what: str) -> Any:
        try:
            return table[key]
        except KeyError:
            hint = "" if self.compiled else ": call compile() first"
            raise TaskError(f"{key if isinstance(key, TaskScope) else f'task {key!r}'} has no {what}{hint}") from None

    # Tasks and scopes

    def tasks(self) -> list[str | None]:
        """The names of the tasks, in the order in which they were given."""
        named = dict.fromkeys([*self.input_fns, *self.loss_fns, *self.eval_fns, *self.opt_fns])
        return list(named)

    def _task(self, task: str | None) -> str | None:
        known = self.tasks()
        if task is None:
            task = current_task_scope().task
        if task is None and None not in known and len(known) == 1:
            return known[0]
        if known and task not in known:
            raise TaskError(_unknown_task(task, known))
        return task

    def _scope(self, mode: MODE, task: str | None) -> TaskScope:
        resolved = (current_task_scope().mode or MODE.TRAIN) if mode is DEFAULT_MODE else MODE(mode)
        return TaskScope(resolved, self._task(task))

    # Variables

    def variables(self) -> dict[str, torch.Tensor]:
        """Every parameter and saved buffer by name; a name is the path with `/`."""
        state = self.state_dict(keep_vars=True)
        named: dict[str, torch.Tensor] = {}
        for path, value in state.items():
            name = variable_name(path)
            if isinstance(value, torch.Tensor):
                if name in named:
                    raise VariableError(
                        f"two variables are called {name!r}: an assigned module and a scope share a name; rename one"
                    )
                named[name] = value
        return named

    def trainable_variables(self) -> dict[str, torch.Tensor]:
        return {variable_name(path): value for path, value in self.named_parameters() if value.requires_grad}

    def make_optimizer(self, opt: Any, variables: Sequence[torch.Tensor], scope: str | None) -> torch.optim.Optimizer:
        """The optimizer that `opt` makes over `variables`; the same `opt` and scope give the same one again."""
        key = (id(opt), scope)
        if key not in self._optimizers:
            self._optimizers[key] = (opt, make_optimizer(opt, variables))
        return self._optimizers[key][1]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Every optimizer once, in the order of tasks."""
        return list(dict.fromkeys(opt for assignment in self.assignments.values() for opt in assignment))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Variables of this model can be made (before compile) and found: `with model.scope(): plait.layer(...)`."""
        previous, current.frame = current.frame, VariableFrame(self._store)
        try:
            if self.compiled:
                yield
            else:
                with self._store.building(current_task_scope().task):
                    yield
        finally:
            current.frame = previous

    # Life

    def compile(  # type: ignore[override] # the document's compile(), not nn.Module's
        self,
        *,
        session_config: SessionConfig | Mapping[str, Any] | None = None,
        sync_optimizer_config: Mapping[str, Any] | None = None,
        opt_config: Mapping[str, Any] | None = None,
        gradient: GradientConfig | None = None,
        strategy: Strategy | Connectable | None = None,
    ) -> Model:
        """Build: run every function once on the first batch and so learn variables, metrics and hooks.

        Where the environment says that this process is one of several, they train together; `strategy` says how.
        """
        from plait.engine.build import build  # noqa: PLC0415 - the build is made of the model

        if self.compiled:
            raise TaskError("compile() was called before: a model is compiled once")
        replicas = dict(sync_optimizer_config or {}).get("replicas_to_aggregate")
        self.strategy = connected(strategy, replicas)
        self.gradient = gradient or self.gradient
        self.config = SessionConfig.of(session_config)
        self.opt_config = check_opt_config(opt_config)
        check_sync_optimizer_config(sync_optimizer_config, self.strategy.worker_num)
        build(self)
        return self

    def run_stage(self, name: str, stage_or_func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a stage or function once, whatever happens: after a restart, one that was done is skipped."""
        if self.stage_mgr is None:
            raise TaskError("run_stage() belongs inside a procedure: model.fit(procedure_fn)")
        return self.stage_mgr.stage(name, stage_or_func, 1.0, *args, **kwargs)

    def fit(
        self,
        procedure_fn: ProcedureFn,
        log_step: int = 100,
        project_name: str = "default_prj",
        *,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        save_steps: int | None = None,
        save_secs: float | None = 600,
        keep: int | None = 5,
        summary_dir: str | os.PathLike[str] | None = None,
        hooks: Sequence[SessionRunHook] = (),
        config: str | os.PathLike[str] | None = None,
    ) -> None:
        """Run a procedure to its end; with `checkpoint_dir`, a killed run goes on where its last checkpoint was.

        A checkpoint is made every `save_steps` training steps, after `save_secs` seconds, and at the end; the newest
        `keep` stay. `project_name` names the journal of stages: under another name, training starts its stages anew
        from the weights found. `config` is a TOML or JSON file that may set these.
        """
        from plait.engine.fit import FitSettings, fit  # noqa: PLC0415 - the session and stages are above the model

        settings = FitSettings(
            log_step=log_step,
            project_name=project_name,
            checkpoint_dir=checkpoint_dir,
            save_steps=save_steps,
            save_secs=save_secs,
            keep=keep,
            summary_dir=summary_dir,
            hooks=tuple(hooks),
        )
        fit(self, procedure_fn, settings, config)


def connected(given: Any, replicas: int | None = None) -> Strategy:
    """The strategy that `compile` was given, or the one that the environment describes."""
    if given is None:
        return default_strategy(replicas)
    found: Strategy = given.connect(replicas) if hasattr(given, "connect") else given
    return found


def _unknown_task(task: str | None, known: Sequence[str | None]) -> str:
    if list(known) == [None]:
        return f"there is no task {task!r}: the model's only task has no name; leave task= out"
    names = ", ".join(repr(name) for name in known)
    if task is None:
        return (
            f"the model has several tasks, {names}: say which, as in train_and_eval(..., task={known[0]!r}), or cotrain"
        )
    return f"there is no task {task!r}: the model has {names}"


def _first(*values: Any) -> Any:
    return values[0]


def _result_after(name: str, state: Metric, step: Op, scope: TaskScope, *, is_loss: bool) -> Op:
    def result(_: Any) -> torch.Tensor:
        return state.result()

    fn: Callable[..., Any] = _first if is_loss else result  # the update writes the loss down after this
    return Op(fn, [step], name=f"metric {name}", scope=scope)
