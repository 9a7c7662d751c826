"""`mox.run`: five functions and a command, as a Model with one task and one stage."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch

from plait.data import Sample, SequenceSource, as_source
from plait.data.batching import BatchedSource
from plait.engine.evaluation_hooks import AggregativeSessionRunHook
from plait.engine.fit import FitSettings, fit
from plait.engine.hooks import SessionRunHook
from plait.engine.model import Model
from plait.engine.ready_hooks import SummarySaverHook
from plait.engine.report import log
from plait.engine.settings import GradientConfig, SessionConfig
from plait.engine.stage import LoopStage, eval_loop, train_loop
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, FunctionError, MismatchError, VariableError
from plait.mox.flags import get_flag
from plait.mox.outputs import OutputHook
from plait.mox.replicas import JoinedSource, join, shares
from plait.mox.spec import ExportKeys, ModeKeys, ModelSpec
from plait.optim.assign import Assignment, PartialAssignment, in_scope
from plait.rng import isolated_rng
from plait.variables import bank
from plait.variables.checkpoint import CheckpointDir

__all__ = ["run"]

UNSET: Final[Any] = object()
PROJECT = "mox.run"
TRAIN, EVAL = TaskScope(MODE.TRAIN, None), TaskScope(MODE.EVAL, None)


def run(
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
    model_fn: Callable[..., Any] | None = None,
    optimizer_fn: Any = None,
    run_mode: str = "invalid",
    inter_mode: str | None = None,
    batch_size: int | None = None,
    auto_batch: bool = True,
    log_dir: str | None = None,
    max_number_of_steps: int = 0,
    checkpoint_path: str | None = None,
    log_every_n_steps: int = 10,
    output_every_n_steps: int = 0,
    save_summary_steps: int = 100,
    save_model_secs: Any = UNSET,
    export_model: Any = False,
    fetch_strategy_fn: Any = None,
    save_model_steps: Any = UNSET,
) -> None:
    """Train, evaluate or predict.

    Args:
        input_fn: `input_fn(mode)` gives the data: samples (`auto_batch`), or batches.
        output_fn: gets a list of {name: array}, one a step, every `output_every_n_steps` steps; 0: at the end.
        model_fn: `model_fn(inputs, mode)` gives a `ModelSpec` for a batch.
        optimizer_fn: gives an optimizer factory; a list of such functions for a list of losses.
        run_mode: `ModeKeys.TRAIN`, `EVAL` or `PREDICT`.
        inter_mode: the mode of evaluations in the middle of training.
        batch_size: samples in a batch.
        auto_batch: whether samples are batched here.
        log_dir: where checkpoints and summaries go; a checkpoint there is gone on from.
        max_number_of_steps: steps in all; 0: until the data ends.
        checkpoint_path: where variables come from; in TRAIN, if `log_dir` has no checkpoint.
        log_every_n_steps: how often `log_info` is logged.
        output_every_n_steps: how often `output_fn` is called.
        save_summary_steps: how often summaries are written.
        save_model_secs: how often a checkpoint is made, in seconds; wins over `save_model_steps`.
        export_model: a key of `ExportKeys`, or False.
        fetch_strategy_fn: must be None.
        save_model_steps: the same in steps.

    """
    _check(input_fn, model_fn, output_fn, run_mode, inter_mode, export_model, fetch_strategy_fn)
    _check_numbers(batch_size=1 if batch_size is None else batch_size, log_every_n_steps=log_every_n_steps)
    _check_numbers(0, max_number_of_steps=max_number_of_steps, output_every_n_steps=output_every_n_steps)
    program = Program(input_fn, model_fn, optimizer_fn, batch_size if auto_batch else None)
    model = program.build(run_mode, inter_mode)
    _load(model, run_mode, log_dir, checkpoint_path)
    if export_model:
        program.check_export(export_model)
    outputs: list[SessionRunHook] = []
    if output_fn is not None:
        outputs.append(OutputHook(lambda: program.specs_of_replicas(run_mode), output_fn, output_every_n_steps))
    saving = _save_interval(save_model_secs, save_model_steps)
    procedure = _procedure(run_mode, max_number_of_steps, log_dir)
    directory = log_dir if run_mode == ModeKeys.TRAIN else None
    _fit(model, procedure, log_every_n_steps, directory, saving, save_summary_steps, outputs)


def _fit(
    model: Model,
    procedure: Callable[[Model], None],
    log_step: int,
    directory: str | None,
    saving: tuple[float | None, int | None],
    summary_steps: int,
    hooks: Sequence[SessionRunHook],
) -> None:
    """Run the procedure; a directory gets checkpoints, and summaries whose writer ends however the run ends."""
    with ExitStack() as stack:
        if directory is not None and summary_steps:
            summaries = SummarySaverHook(save_steps=summary_steps, output_dir=directory)
            stack.callback(summaries.close)
            hooks = [*hooks, summaries]
        settings = FitSettings(
            log_step=log_step,
            project_name=PROJECT,
            checkpoint_dir=directory,
            save_secs=saving[0],
            save_steps=saving[1],
            hooks=hooks,
            hint="",  # the procedure says it, in words of this door
        )
        fit(model, procedure, settings)


def _check(
    input_fn: Any,
    model_fn: Any,
    output_fn: Any,
    run_mode: str,
    inter_mode: str | None,
    export_model: Any,
    fetch_strategy_fn: Any,
) -> None:
    modes = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
    if run_mode not in modes:
        raise ConfigError(f"run_mode={run_mode!r}: write mox.ModeKeys.TRAIN, EVAL or PREDICT")
    if inter_mode is not None and (inter_mode not in modes or run_mode != ModeKeys.TRAIN):
        raise ConfigError(
            f"inter_mode={inter_mode!r} with run_mode={run_mode!r}: it is for TRAIN, and is a mode or None"
        )
    for name, function in (("input_fn", input_fn), ("model_fn", model_fn)):
        if not callable(function):
            raise ConfigError(f"{name} is {function!r}: give a function")
    if run_mode == ModeKeys.PREDICT and output_fn is None:
        raise ConfigError("PREDICT hands what it finds to output_fn: pass output_fn=, a function of a list of dicts")
    keys = (ExportKeys.TF_SERVING, ExportKeys.ONNX, ExportKeys.TORCH)
    if export_model and export_model not in keys:
        raise ConfigError(f"export_model={export_model!r}: write one of mox.ExportKeys, {', '.join(keys)}, or False")
    if fetch_strategy_fn is not None:
        raise ConfigError("fetch_strategy_fn is not supported: leave it out")
    hosts = [host for host in get_flag("worker_hosts").split(",") if host]
    if len(hosts) > 1 or get_flag("ps_hosts"):
        raise ConfigError("several worker_hosts, and ps_hosts, need the cluster: this version has one worker")
    _check_numbers(num_gpus=get_flag("num_gpus"))


def _check_numbers(least: int = 1, **numbers: Any) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r}: write a whole number from {least} on")


def _save_interval(secs: Any, steps: Any) -> tuple[float | None, int | None]:
    """What was given; of both, the seconds; of none, ten minutes."""
    if secs is not UNSET and secs is not None:
        return float(secs), None
    return (None, int(steps)) if steps is not UNSET and steps is not None else (600.0, None)


def _procedure(run_mode: str, max_steps: int, log_dir: str | None) -> Callable[[Model], None]:
    """One stage. A source without a number of passes is read for ever, unless there is no limit of steps."""

    def procedure(model: Model) -> None:
        scope = TRAIN if run_mode == ModeKeys.TRAIN else EVAL
        across = bool(max_steps) or model.streams[scope].source.num_epochs is not None
        limits: dict[str, Any] = {"step": max_steps or None, "across_passes": across}
        make = train_loop if run_mode == ModeKeys.TRAIN else eval_loop
        stage: LoopStage = make(model, None, **limits)
        before = model.global_step.value
        model.run_stage(run_mode.lower(), stage)
        if run_mode == ModeKeys.TRAIN and before == model.global_step.value:
            why = (
                "a hook stopped it. Choose"
                if stage.stopped
                else "nothing was trained. Raise max_number_of_steps, or choose"
            )
            log.warning(
                "the training in %s has ended, at step %d with max_number_of_steps=%d: %s another log_dir",
                log_dir,
                before,
                max_steps,
                why,
            )

    return procedure


class Program:
    """The user's functions as those of a Model."""

    def __init__(
        self,
        input_fn: Any,
        model_fn: Any,
        optimizer_fn: Any,
        batch_size: int | None,
    ) -> None:
        self.model = Model()
        self.specs: dict[str, ModelSpec] = {}
        """The last ModelSpec of each mode."""
        self._input_fn = input_fn
        self._model_fn = model_fn
        self._optimizer_fn = optimizer_fn
        self._batch_size = batch_size
        self._replicas: int = get_flag("num_gpus")
        self.replica_specs: dict[str, list[ModelSpec]] = {}
        """The last ModelSpec of each replica, for each mode."""

    def build(self, run_mode: str, inter_mode: str | None) -> Model:
        """A compiled Model: the run mode and, if there is one, the inter mode."""
        model = self.model
        modes = {MODE.EVAL: inter_mode} if run_mode == ModeKeys.TRAIN else {MODE.EVAL: run_mode}
        model.input_fn(lambda _, mode: self._input(ModeKeys.TRAIN if mode is MODE.TRAIN else modes[MODE.EVAL]))
        if run_mode == ModeKeys.TRAIN:
            model.loss_fn(self._loss)
            model.optimizer_fn(self._assign)
        other = modes[MODE.EVAL]
        if other is not None:
            model.eval_fn(lambda _, sample: self._spec(other, sample) and None)
        precision = "fp16" if get_flag("use_fp16") else "fp32"
        gradient = GradientConfig(
            loss_scale=get_flag("loss_scale"),
            clip=get_flag("gradient_clip"),
            clip_type=get_flag("gradient_clip_type"),
        )
        model.compile(session_config=SessionConfig(precision=precision), gradient=gradient)
        shown = model.metric_states.get(TRAIN, {})
        if run_mode == ModeKeys.TRAIN and "loss" not in self.specs[run_mode].log_info:
            shown.pop("loss", None)  # the log shows what log_info says
        return model

    def specs_of_replicas(self, mode: str) -> list[ModelSpec]:
        """The ModelSpecs of the last step in this mode, one for each replica."""
        return self.replica_specs.get(mode) or [self.specs[mode]]

    def _loss(self, model: Model, sample: Sample) -> Any:
        del model
        loss = self._spec(ModeKeys.TRAIN, sample).loss
        return loss[0] if isinstance(loss, list) and len(loss) == 1 else loss

    def _input(self, mode: str | None) -> Any:
        if mode is None:
            return None
        data = self._input_fn(mode)
        sample = data if isinstance(data, Sample) else None
        streamed = isinstance(data, torch.utils.data.IterableDataset)
        if isinstance(data, torch.utils.data.Dataset) and hasattr(data, "__len__") and not streamed:
            data = SequenceSource(data)  # type: ignore[arg-type] # a Dataset with a length is a sequence
        source = sample.source if sample is not None else as_source(data)
        if self._batch_size is not None and source.batch_size is None:
            source = BatchedSource(source, self._batch_size)
        if self._replicas > 1:
            source = JoinedSource(source, self._replicas)
        return Sample(source, sample.columns if sample is not None else None)

    def _spec(self, mode: str, sample: Sample) -> ModelSpec:
        """Call the model_fn; its parts are checked in the first call of a mode, when hooks and metrics are made."""
        spec = self._one_spec(mode, sample) if self._replicas == 1 else self._joined_spec(mode, sample)
        self.specs[mode] = spec
        if spec.log_info:
            add_metric = self.model.add_metric
            for name, value in spec.log_info.items():
                add_metric(name, value)
        if spec.hooks:
            self.model.add_hooks(spec.hooks)
        return spec

    def _one_spec(self, mode: str, sample: Sample) -> ModelSpec:
        inputs = sample.unnamed()
        spec = self._model_fn(sample if inputs is None else inputs, mode)
        if type(spec) is not ModelSpec:
            raise FunctionError(
                f"in {mode} mode the model_fn returned {type(spec).__name__}: return mox.ModelSpec(...)"
            )
        if mode not in self.specs:
            spec.check(mode)
            _check_hooks(spec.hooks)
        return spec

    def _joined_spec(self, mode: str, sample: Sample) -> ModelSpec:
        specs, weights = [], []
        for part, weight in shares(sample, self._replicas):
            self.model._store.call_again()  # noqa: SLF001 - replicas share their variables
            specs.append(self._one_spec(mode, part))
            weights.append(weight)
        self.replica_specs[mode] = specs
        first = mode == ModeKeys.TRAIN and get_flag("log_first_clone")  # an evaluation is of all rows
        return join(specs, weights, log_first=first)

    def _assign(self, model: Model, task: str | None) -> Assignment:
        """An optimizer for each loss, over the variables of its scopes."""
        del task
        _freeze(model)
        spec = self.specs[ModeKeys.TRAIN]
        scopes = spec.scopes_of_losses()
        factories = self._factories(len(scopes))
        named = model.trainable_variables()
        if not named:
            raise VariableError(
                "there is no variable to train: use plait.layer, or let the trainable_* flags leave some"
            )
        if scopes == [None] and getattr(factories[0], "scope", None) is None:
            variables = list(named.values())
            return {model.make_optimizer(factories[0], variables, None): (variables, None)}
        assignment: Assignment = PartialAssignment()
        for number, (factory, group) in enumerate(zip(factories, scopes, strict=True)):
            wanted = _within(_within(named, group), getattr(factory, "scope", None))
            label = ",".join(group) if group is not None else None
            variables = list(wanted.values())
            assignment[model.make_optimizer(factory, variables, f"loss {number}")] = (variables, label)
        return assignment

    def _factories(self, losses: int) -> list[Any]:
        given = self._optimizer_fn
        functions = list(given) if isinstance(given, (list, tuple)) else [given]
        for function in functions:
            if not callable(function) or isinstance(function, torch.optim.Optimizer):
                raise ConfigError(
                    f"optimizer_fn is {type(function).__name__}: give a function that returns an optimizer, such as "
                    "mox.get_optimizer_fn('sgd', learning_rate=0.1)"
                )
            if not _takes_nothing(function):
                raise ConfigError(
                    f"optimizer_fn {function!r:.60} needs arguments: give a function without any, that returns an "
                    "optimizer factory, such as mox.get_optimizer_fn('sgd', learning_rate=0.1)"
                )
        factories = [function() for function in functions]
        if len(factories) not in (1, losses):
            raise ConfigError(
                f"{losses} losses, but {len(factories)} optimizers: give one for each loss, or one for all"
            )
        return factories * losses if len(factories) == 1 else factories

    def check_export(self, key: str) -> None:
        """Call the model_fn once in EXPORT mode, before the time is spent on training."""
        scope = TRAIN if TRAIN in self.model.streams else EVAL
        now = self.model._now  # noqa: SLF001 - a friend
        with self.model.scope(), torch.no_grad(), isolated_rng(self.model.seed):
            now.enter_mode(False)
            sample = self.model.streams[scope].read()
            spec = self._model_fn(sample.unnamed() or sample, ModeKeys.EXPORT)
            now.leave()
        if not isinstance(spec, ModelSpec):
            raise FunctionError(
                f"the model_fn returned {type(spec).__name__} in EXPORT mode: return mox.ModelSpec(...)"
            )
        spec.check(ModeKeys.EXPORT)
        self.model.add_extra_data("export_spec", spec.export_spec)
        log.warning("export_model=%s: the ExportSpec was checked, but this version does not write exports yet", key)


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # some functions written in C have none
        return True
    return True


def _check_hooks(hooks: Sequence[SessionRunHook]) -> None:
    """Ask the three questions once, so that one without an answer is found before training."""
    for hook in hooks:
        if not isinstance(hook, AggregativeSessionRunHook):
            raise FunctionError(f"hook {type(hook).__name__}: derive it from mox.AggregativeSessionRunHook")
        hook.support_aggregation()
        hook.support_sync_workers()
        hook.run_inter_mode()


def _within(named: Mapping[str, torch.Tensor], scopes: str | Sequence[str] | None) -> dict[str, torch.Tensor]:
    if scopes is None:
        return dict(named)
    groups = [scopes] if isinstance(scopes, str) else list(scopes)
    for scope in groups:
        if not any(in_scope(name, scope) for name in named):
            tops = sorted({name.partition("/")[0] for name in named})
            raise VariableError(f"no trainable variable is in scope {scope!r}: the model has {', '.join(tops)}")
    return {name: value for name, value in named.items() if any(in_scope(name, scope) for scope in groups)}


def _selected(name: str, include: str, exclude: str) -> bool:
    """Patterns are regular expressions, searched for anywhere in the name, separated by commas."""
    return (not include or _matches(name, include)) and not _matches(name, exclude)


def _matches(name: str, patterns: str) -> bool:
    try:
        return any(re.search(pattern.strip(), name) for pattern in patterns.split(",") if pattern.strip())
    except re.error as error:
        raise ConfigError(f"patterns {patterns!r}: {error}; write regular expressions, separated by commas") from error


def _freeze(model: Model) -> None:
    include, exclude = get_flag("trainable_include_patterns"), get_flag("trainable_exclude_patterns")
    for name, variable in model.trainable_variables().items():
        if not _selected(name, include, exclude):
            variable.requires_grad_(False)


def _load(model: Model, run_mode: str, log_dir: str | None, checkpoint_path: str | None) -> None:
    """Variables from `checkpoint_path`; in TRAIN, a checkpoint in `log_dir` comes first."""
    training = run_mode == ModeKeys.TRAIN
    if training and (checkpoint_path is None or (log_dir is not None and CheckpointDir(log_dir).list())):
        return
    if checkpoint_path is None and not model.variables():
        return
    if checkpoint_path is None:
        instead = "" if log_dir is None else f": write checkpoint_path={log_dir!r} instead of log_dir"
        raise ConfigError(f"{run_mode} needs checkpoint_path=, the directory of a run or a file of variables{instead}")
    include, exclude = get_flag("checkpoint_include_patterns"), get_flag("checkpoint_exclude_patterns")
    variables = model.variables()
    found = [name for name in bank.read_variables(checkpoint_path) if name in variables]
    wanted = {name: name for name in found if _selected(name, include, exclude)}
    if not wanted:
        raise MismatchError(
            f"nothing in {checkpoint_path} is wanted by the model: it has {', '.join(list(variables)[:5])}"
        )
    missing = [name for name in variables if name not in wanted and _selected(name, include, exclude)]
    if missing and not training:
        raise MismatchError(f"{checkpoint_path} lacks variable {missing[0]!r} and {len(missing) - 1} more of the model")
    matches = bank.match([{"load": wanted, "exclude": [], "path": checkpoint_path}], variables)
    log.info("%s", bank.report(matches))
    bank.apply(matches, variables)
    if not training:
        model.global_step.value = bank.read_step(checkpoint_path)
