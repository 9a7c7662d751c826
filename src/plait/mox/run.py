"""`mox.run`: five functions and a command, as a Model with one task and one stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

from plait.engine.fit import FitSettings, fit
from plait.engine.hooks import SessionRunHook
from plait.engine.model import Model
from plait.engine.ready_hooks import SummarySaverHook
from plait.engine.report import log, show_log
from plait.engine.stage import LoopStage, eval_loop, train_loop
from plait.engine.strategy import Strategy
from plait.errors import ConfigError, MismatchError
from plait.export.script import asked
from plait.mox.export import Wanted, prepared, wanted
from plait.mox.flags import get_flag, selected
from plait.mox.outputs import OutputHook
from plait.mox.program import EVAL, TRAIN, Program
from plait.mox.spec import ModeKeys
from plait.variables import bank
from plait.variables.checkpoint import CheckpointDir

__all__ = ["run"]

UNSET: Final[Any] = object()
PROJECT = "mox.run"


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
        export_model: a key of `ExportKeys`; False: nothing is exported. The versions are in LOG_DIR/export.
        fetch_strategy_fn: must be None.
        save_model_steps: the same in steps.

    """
    _check(input_fn, model_fn, output_fn, run_mode, inter_mode, fetch_strategy_fn)
    _check_numbers(batch_size=1 if batch_size is None else batch_size, log_every_n_steps=log_every_n_steps)
    _check_numbers(0, max_number_of_steps=max_number_of_steps, output_every_n_steps=output_every_n_steps)
    export = wanted(export_model, log_dir)
    if (strategy := _place(run_mode)) is None:
        return
    program = Program(input_fn, model_fn, optimizer_fn, batch_size if auto_batch else None)
    model = program.build(run_mode, inter_mode, strategy)
    write = _made_ready(program, run_mode, log_dir, checkpoint_path, export)
    specs = partial(program.specs_of_replicas, run_mode)
    outputs = [] if output_fn is None else [OutputHook(specs, output_fn, output_every_n_steps)]
    procedure = _procedure(run_mode, max_number_of_steps, log_dir)
    directory = log_dir if run_mode == ModeKeys.TRAIN else None
    saving = _save_interval(save_model_secs, save_model_steps)
    _fit(model, procedure, log_every_n_steps, directory, saving, save_summary_steps, outputs)
    if write is not None and strategy.worker_id == 0:
        write()


def _place(run_mode: str) -> Strategy | None:
    """How this process takes part in the run; None: it does not. What follows is logged, for people."""
    from plait.mox.hosts import strategy_for  # noqa: PLC0415 - where nothing is run, no cluster is looked for

    strategy = strategy_for(run_mode)
    show_log(quiet=strategy is None or strategy.worker_id > 0)
    if strategy is None:
        log.info("%s is for the first worker, who has all variables: this one is done", run_mode)
    return strategy


def _made_ready(
    program: Program, run_mode: str, log_dir: str | None, checkpoint_path: str | None, export: Wanted | None
) -> Callable[[], object] | None:
    """Load variables and check the export, if there will be one; a run for its sake alone ends here."""
    model, request = program.model, asked()
    with _closed_on_error(model):
        if export is not None and _has_rows_elsewhere(model):
            raise ConfigError("a SparseEmbedding has no fixed rows that could be exported: use nn.Embedding")
        if export is not None and request is not None:
            request.take_up(model)
            request.done(prepared(program, export)())
        _load(model, run_mode, log_dir, checkpoint_path)
        return None if export is None else prepared(program, export)


@contextmanager
def _closed_on_error(model: Model) -> Iterator[None]:
    """An error ends the readers of the model's inputs, which it would keep alive."""
    try:
        yield
    except BaseException:
        for stream in model.streams.values():
            stream.close()
        raise


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
        if directory is not None and summary_steps and model.strategy.worker_id == 0:
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
    if run_mode == ModeKeys.TRAIN and output_fn is not None and get_flag("capture_steps"):
        raise ConfigError(
            "output_fn in TRAIN with capture_steps: it looks at every step's tensors, which the model_fn makes, and "
            "that is not called at captured steps; leave one of both out"
        )
    if fetch_strategy_fn is not None:
        raise ConfigError("fetch_strategy_fn is not supported: leave it out")
    _check_numbers(num_gpus=get_flag("num_gpus"))


def _check_numbers(least: int = 1, **numbers: Any) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r}: write a whole number from {least} on")


def _has_rows_elsewhere(model: Model) -> bool:
    from plait.cluster.embedding import SparseEmbedding  # noqa: PLC0415 - brings tables, which few need

    return any(isinstance(module, SparseEmbedding) for module in model.modules())


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
    if not training and _has_rows_elsewhere(model):
        raise ConfigError(
            f"{run_mode} of a model with a SparseEmbedding: its rows are not among the variables of a checkpoint; "
            "evaluate in the middle of training, with inter_mode="
        )
    include, exclude = get_flag("checkpoint_include_patterns"), get_flag("checkpoint_exclude_patterns")
    variables = model.variables()
    saved = bank.read_variables(checkpoint_path)
    found = [name for name in saved if name in variables]
    wanted = {name: name for name in found if selected(name, include, exclude)}
    if not wanted:
        raise MismatchError(
            f"nothing in {checkpoint_path} is wanted by the model: it has {', '.join(list(variables)[:5])}"
        )
    missing = [name for name in variables if name not in wanted and selected(name, include, exclude)]
    if missing and not training:
        raise MismatchError(f"{checkpoint_path} lacks variable {missing[0]!r} and {len(missing) - 1} more of the model")
    config = [{"load": wanted, "exclude": [], "path": checkpoint_path}]
    matches = bank.match(config, variables, {os.fspath(checkpoint_path): saved})
    others = [item for item in matches if item.status != "matched"]
    log.info("%d variables from %s", len(matches) - len(others), checkpoint_path)
    if others:
        log.info("%s", bank.report(others))
    try:
        bank.apply(matches, variables)
    except MismatchError as error:
        raise MismatchError(
            f"{error}\nWith other classes, leave the last layer out: mox.set_flag('checkpoint_exclude_patterns',"
            " mox.get_model_meta(name).default_logits_pattern)"
        ) from error
    model.strategy.broadcast(list(variables.values()))  # whoever holds them takes them, too
    if not training:
        model.global_step.value = bank.read_step(checkpoint_path)
