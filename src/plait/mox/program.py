"""The user's functions as those of a Model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from plait.data import Sample, SequenceSource, as_source
from plait.data.batching import BatchedSource
from plait.engine.evaluation_hooks import AggregativeSessionRunHook
from plait.engine.functions import takes
from plait.engine.hooks import SessionRunHook
from plait.engine.model import Model
from plait.engine.settings import GradientConfig, SessionConfig
from plait.engine.strategy import Strategy
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, FunctionError, VariableError
from plait.mox.flags import get_flag, selected
from plait.mox.replicas import JoinedSource, join, shares
from plait.mox.spec import ModeKeys, ModelSpec
from plait.optim.assign import Assignment, PartialAssignment, in_scope

__all__ = ["EVAL", "TRAIN", "Program"]

TRAIN, EVAL = TaskScope(MODE.TRAIN, None), TaskScope(MODE.EVAL, None)


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
        self.sources: dict[str, Any] = {}
        """What the input_fn gave for each mode, before it was put into batches."""
        self.replica_specs: dict[str, list[ModelSpec]] = {}
        """The last ModelSpec of each replica, for each mode."""

    def build(self, run_mode: str, inter_mode: str | None, strategy: Strategy | None = None) -> Model:
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
        gradient = GradientConfig(
            loss_scale=get_flag("loss_scale"),
            clip=get_flag("gradient_clip"),
            clip_type=get_flag("gradient_clip_type"),
        )
        model.compile(session_config=_session_config(), gradient=gradient, strategy=strategy)
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
        self.sources[mode] = source
        if self._batch_size is not None and source.batch_size is None:
            in_batches = getattr(source, "batched", None)  # data sets make batches in their readers
            source = in_batches(self._batch_size) if in_batches else BatchedSource(source, self._batch_size)
        if self._replicas > 1:
            source = JoinedSource(source, self._replicas)
        return Sample(source, sample.columns if sample is not None else None)

    def _spec(self, mode: str, sample: Sample) -> ModelSpec:
        """Call the model_fn; its parts are checked in the first call of a mode, when hooks and metrics are made."""
        spec = self.one_spec(mode, sample) if self._replicas == 1 else self._joined_spec(mode, sample)
        self.specs[mode] = spec
        if spec.log_info:
            add_metric = self.model.add_metric
            for name, value in spec.log_info.items():
                add_metric(name, value)
        if spec.hooks:
            self.model.add_hooks(spec.hooks)
        return spec

    def one_spec(self, mode: str, sample: Sample) -> ModelSpec:
        """Call the model_fn with a batch; what it says is checked until `specs` has this mode."""
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
            specs.append(self.one_spec(mode, part))
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
            if not takes(function, 0):
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


def _freeze(model: Model) -> None:
    include, exclude = get_flag("trainable_include_patterns"), get_flag("trainable_exclude_patterns")
    for name, variable in model.trainable_variables().items():
        if not selected(name, include, exclude):
            variable.requires_grad_(False)


def _session_config() -> SessionConfig:
    """What the flags say of how to compute."""
    return SessionConfig(
        device=get_flag("device"),
        precision="fp16" if get_flag("use_fp16") else get_flag("precision"),
        compile=get_flag("compile_modules"),
        capture=get_flag("capture_steps"),
    )
