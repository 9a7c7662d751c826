"""`Estimator`: a `model_fn` that is trained, evaluated, used and exported; a thin layer over a Model that lives."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.data import Sample
from plait.engine.checkpoints import ModelState
from plait.engine.fit import FitSettings, fit
from plait.engine.functions import ProcedureFn
from plait.engine.hooks import SessionRunHook
from plait.engine.model import Model
from plait.engine.monitored import MonitoredSession
from plait.engine.op import Op
from plait.engine.ready_hooks import SummarySaverHook, open_writer
from plait.engine.report import log, show_log
from plait.engine.session import Session
from plait.engine.settings import check_count
from plait.engine.stage import eval_loop, train_loop
from plait.engine.task import TaskScope
from plait.errors import ConfigError, FunctionError, MismatchError, OutOfRangeError
from plait.train.config import RunConfig, WarmStartSettings
from plait.train.inputs import FixedSource, call_named, sample_of
from plait.train.listeners import CheckpointSaverListener, ListenersHook
from plait.train.program import EVAL, TRAIN, Program, names_of
from plait.train.resuming import project_of, where_of
from plait.train.spec import EstimatorSpec, ModeKeys
from plait.train.warm_start import warm_start
from plait.variables import bank
from plait.variables.checkpoint import CheckpointDir

__all__ = ["Estimator"]


class Estimator:
    """Trains, evaluates, predicts and exports what a `model_fn` describes.

    There is one model: evaluations and predictions use its variables as they are, and nothing is built twice or read
    from disk for them. With a `model_dir`, training leaves checkpoints there, and goes on from those that it finds;
    without, everything is in memory.

    Args:
        model_fn: `model_fn(features, labels, mode, params, config)` gives an `EstimatorSpec`. Of the arguments after
            `features` it takes those that it wants. It is called at every step; variables come from `plait.layer`,
            `plait.get_variable` and `plait.feature_column`.
        model_dir: where checkpoints and summaries go; wins over the one of `config`.
        config: a `RunConfig`.
        params: handed to `model_fn`.
        warm_start_from: a checkpoint, or `WarmStartSettings`: where variables begin that have no checkpoint yet.

    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
    ) -> None:
        if config is not None and not isinstance(config, RunConfig):
            raise ConfigError(f"config is a {type(config).__name__}: write plait.train.RunConfig(...)")
        if params is not None and not isinstance(params, Mapping):
            raise ConfigError(f"params is a {type(params).__name__}: write a dict")
        names_of(model_fn)
        config = config or RunConfig()
        self._config = config if model_dir is None else config.replace(model_dir=os.fspath(model_dir))
        self._model_fn = model_fn
        self._params = copy.deepcopy(dict(params or {}))
        given = warm_start_from
        self._warm_start = given if given is None or isinstance(given, WarmStartSettings) else WarmStartSettings(given)
        self._program: Program | None = None

    @property
    def model_dir(self) -> str | None:
        """Where checkpoints and summaries go."""
        return self._config.model_dir

    @property
    def config(self) -> RunConfig:
        """How it runs."""
        return self._config

    @property
    def params(self) -> dict[str, Any]:
        """A copy of what the `model_fn` is handed."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., EstimatorSpec]:
        """The function that describes the model."""
        return self._model_fn

    @property
    def model(self) -> Model:
        """The living Model."""
        if self._program is None:
            raise ConfigError("there is no model yet: it is made by the first train(), evaluate() or predict()")
        return self._program.model

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> Estimator:
        """Train: `steps` more, or until the global step is `max_steps`, or until the data ends.

        A training that was killed goes on at its step and batch when the same call is made again.
        """
        if steps is not None and max_steps is not None:
            raise ConfigError(f"train(steps={steps}, max_steps={max_steps}): give one of them")
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None:
                check_count(name, value)
        if max_steps is not None and self._step() >= max_steps:
            log.info("max_steps=%d was reached before: nothing is trained", max_steps)
            return self

        def procedure(model: Model) -> None:
            first = model.run_stage("begin", lambda _: model.global_step.value)
            limit = steps if max_steps is None else max_steps - int(first)
            model.run_stage("train", train_loop(model, None, step=limit, across_passes=_several_passes(model)))

        self.prepare_training(input_fn)
        self.fit(procedure, hooks, saving_listeners)
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """The metrics over `steps` batches, or all of the data; and the global step. They are kept for TensorBoard."""
        if steps is not None:
            check_count("steps", steps)
        data = self._data(input_fn, ModeKeys.EVAL)
        if steps is None and isinstance(data.source, FixedSource):
            raise ConfigError("the input_fn gives one batch for ever: pass steps= to evaluate()")
        program = self._living("evaluate")
        with program.mode(ModeKeys.EVAL, data), _values_of(program.model, checkpoint_path):
            model = program.model
            loop = eval_loop(model, None, step=steps, across_passes=_several_passes(model, EVAL))
            with _session(model, hooks, {EVAL: model.hooks[EVAL]}) as session:
                loop.sess = session
                loop.start()
                found = loop.run() or {}
            return self.evaluated(found, name)

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """The predictions for each example, one after the other, as arrays; or for each batch.

        Of several workers, each that asks gets all of them.
        """
        data = self._data(input_fn, ModeKeys.PREDICT)
        program = self._living("predict")
        with program.mode(ModeKeys.PREDICT, data) as step, _values_of(program.model, checkpoint_path):
            everybody = [*(hooks or ()), *program.hooks_of(ModeKeys.PREDICT)]
            with _session(program.model, everybody) as session:
                for found in _steps(session, step):
                    arrays = _arrays(_chosen(found, predict_keys))
                    yield from _examples(arrays) if yield_single_examples else [arrays]

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | os.PathLike[str] | None = None,
        *,
        formats: Sequence[str] = ("torch",),
        labels: Sequence[str] | None = None,
    ) -> str:
        """Write the model as it predicts, as the next version below `export_dir_base`; returns where that is.

        `serving_input_receiver_fn` comes from `build_raw_serving_input_receiver_fn(features)`: an example of each
        feature. `formats` are those of `plait.export`.
        """
        from plait.train.exporting import export_model, received  # noqa: PLC0415 - brings the exporter

        del as_text
        if assets_extra:
            raise ConfigError("assets_extra is not supported: put files beside the export")
        receiver = received(serving_input_receiver_fn)
        program = self._living("export")
        with (
            program.mode(ModeKeys.PREDICT, sample_of((receiver.features, None))),
            _values_of(program.model, checkpoint_path),
        ):
            return str(export_model(program, receiver, export_dir_base, formats=formats, labels=labels))

    def latest_checkpoint(self) -> str | None:
        """The newest checkpoint in `model_dir`; None if there is none."""
        found = [] if self.model_dir is None else CheckpointDir(self.model_dir).list()
        return str(found[-1].path) if found else None

    def get_variable_names(self) -> list[str]:
        """The names of all variables: of the living model, or of the newest checkpoint."""
        return sorted(self._variables())

    def get_variable_value(self, name: str) -> np.ndarray[Any, Any]:
        """One variable's value; `global_step` is one, as in TensorFlow."""
        found = self._variables()
        if name == "global_step" and name not in found:
            return np.array(self._step())
        if name not in found:
            raise ConfigError(f"there is no variable {name!r}: there are {', '.join(sorted(found)[:8])}")
        value: np.ndarray[Any, Any] = found[name].detach().cpu().numpy().copy()
        return value

    def eval_dir(self, name: str | None = None) -> str | None:
        """Where the metrics of evaluations go."""
        return None if self.model_dir is None else str(Path(self.model_dir) / (f"eval_{name}" if name else "eval"))

    # For those who write a procedure of their own

    def prepare_training(self, input_fn: Callable[..., Any]) -> Program:
        """The model that trains, compiled, at the beginning of this data."""
        data = self._data(input_fn, ModeKeys.TRAIN)
        if self._program is None or not self._program.trains:  # one that only evaluated has nothing to lose
            self._program = Program(self._model_fn, self._params, self._config)
            self._program.compile(data)
            if self._warm_start is not None and self.latest_checkpoint() is None:
                with self._program.ended_on_error():
                    warm_start(self._program.model, self._warm_start)
        else:
            self._program.train_with(data)
        return self._program

    def fit(
        self,
        procedure: ProcedureFn,
        hooks: Sequence[SessionRunHook] | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> None:
        """Run a procedure over the model that `prepare_training` gave, with this Estimator's checkpoints."""
        model, config, directory = self.model, self._config, self.model_dir
        given = list(hooks or ())
        assert self._program is not None  # noqa: S101 - self.model looked
        with ExitStack() as stack:
            stack.enter_context(self._program.random())
            if directory is not None and saving_listeners:
                given.append(ListenersHook(saving_listeners, where_of(model, directory)))
            if directory is not None and config.save_summary_steps and model.strategy.worker_id == 0:
                summaries = SummarySaverHook(save_steps=config.save_summary_steps, output_dir=directory)
                stack.callback(summaries.close)
                given.append(summaries)
            settings = FitSettings(
                log_step=config.log_step_count_steps or 2**62,
                project_name="estimator" if directory is None else project_of(model, directory),
                checkpoint_dir=directory,
                save_steps=config.save_checkpoints_steps,
                save_secs=config.save_checkpoints_secs,
                keep=config.keep_checkpoint_max,
                hooks=given,
                hint="",
            )
            fit(model, procedure, settings)

    def evaluated(self, metrics: Mapping[str, float], name: str | None) -> dict[str, Any]:
        """What `evaluate` returns; it is written for TensorBoard."""
        model, where = self.model, self.eval_dir(name)
        step = model.global_step.value
        if where is not None and model.strategy.worker_id == 0:
            writer = open_writer(where, step)
            for key, value in metrics.items():
                writer.add_scalar(key, value, step)
            writer.close()
        return {**metrics, "global_step": step}

    # Inside

    def _data(self, input_fn: Callable[..., Any], mode: str) -> Sample:
        if not callable(input_fn):
            raise ConfigError(f"input_fn is a {type(input_fn).__name__}: give a function that returns the data")
        return sample_of(call_named(input_fn, mode=mode, params=self._params, config=self._config))

    def _living(self, what: str) -> Program:
        """The model; one that never trained here begins with the newest checkpoint, or where training would begin."""
        if self._program is None:
            show_log()
            self._program = Program(self._model_fn, self._params, self._config)
            newest = self.latest_checkpoint()
            self._program.compile(None, checkpoint=newest)
            if newest is None:
                log.warning("there is no trained model: %s uses the variables as they begin", what)
        return self._program

    def _step(self) -> int:
        if self._program is not None and self._program.trains:
            return self._program.model.global_step.value
        newest = self.latest_checkpoint()
        return 0 if newest is None else bank.read_step(newest)

    def _variables(self) -> Mapping[str, torch.Tensor]:
        if self._program is not None and self._program.model.variables():
            return self._program.model.variables()
        newest = self.latest_checkpoint()
        if newest is None:
            raise ConfigError("there are no variables yet: train() first")
        return bank.read_variables(newest)


def _session(
    model: Model,
    hooks: Sequence[SessionRunHook] | None,
    scoped: Mapping[TaskScope, Sequence[SessionRunHook]] | None = None,
) -> MonitoredSession:
    """A session over the model as it is: nothing is restored."""
    return MonitoredSession(
        lambda: Session(model, model.global_step, ModelState(model)), list(hooks or ()), scoped_hooks=scoped
    )


def _several_passes(model: Model, scope: TaskScope = TRAIN) -> bool:
    """A source that says how many passes it has is read to its end; one that does not, once."""
    return model.streams[scope].source.num_epochs is not None


def _steps(session: MonitoredSession, step: Op) -> Iterator[Any]:
    """What the step gives, until all passes are over, or a hook stops it."""
    stream = step.inputs[0].stream
    while not session.should_stop():
        try:
            yield session.run(step)
        except OutOfRangeError:
            if stream is None or stream.source.num_epochs is None or stream.spent:
                return


@contextmanager
def _values_of(model: Model, path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Inside, the variables are those of another checkpoint; afterwards, what they were."""
    if path is None:
        yield
        return
    if model.strategy.worker_num > 1:
        raise ConfigError("checkpoint_path= with several workers: load it in one process")
    variables, saved = model.variables(), bank.read_variables(path)
    missing = [name for name in variables if name not in saved or saved[name].shape != variables[name].shape]
    if missing:
        raise MismatchError(f"{os.fspath(path)} has no {missing[0]!r} of that shape: it belongs to another model")
    kept, step = {name: value.detach().clone() for name, value in variables.items()}, model.global_step.value
    _copy(saved, variables)
    model.global_step.value = bank.read_step(path)
    try:
        yield
    finally:
        _copy(kept, variables)
        model.global_step.value = step


def _copy(values: Mapping[str, torch.Tensor], variables: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, variable in variables.items():
            variable.copy_(values[name])


def _chosen(predictions: Any, keys: Sequence[str] | str | None) -> Any:
    if keys is None:
        return predictions
    wanted = [keys] if isinstance(keys, str) else list(keys)
    if not isinstance(predictions, Mapping) or not set(wanted) <= set(predictions):
        there = ", ".join(predictions) if isinstance(predictions, Mapping) else "one tensor, without a name"
        raise ConfigError(f"predict_keys={wanted}: the predictions are {there}")
    return {key: predictions[key] for key in wanted}


def _arrays(predictions: Any) -> Any:
    if isinstance(predictions, Mapping):
        return {key: _arrays(value) for key, value in predictions.items()}
    return predictions.detach().cpu().numpy() if isinstance(predictions, torch.Tensor) else predictions


def _examples(predictions: Any) -> Iterator[Any]:
    counts = {name: len(value) if np.ndim(value) else None for name, value in _leaves(predictions)}
    if len(set(counts.values())) != 1 or None in counts.values():
        raise FunctionError(f"predictions have different numbers of rows, {counts}: pass yield_single_examples=False")
    for row in range(next(iter(counts.values())) or 0):
        yield _row(predictions, row)


def _leaves(predictions: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays, by name; a head may be a dict in the dict."""
    if not isinstance(predictions, Mapping):
        yield name or "predictions", predictions
        return
    for key, value in predictions.items():
        yield from _leaves(value, f"{name}/{key}" if name else str(key))


def _row(predictions: Any, row: int) -> Any:
    if isinstance(predictions, Mapping):
        return {key: _row(value, row) for key, value in predictions.items()}
    return predictions[row]
