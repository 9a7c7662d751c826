"""Settings of an Estimator: how it runs, what is trained and evaluated, where it starts from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plait.engine.hooks import SessionRunHook
from plait.engine.settings import SessionConfig, check_count
from plait.errors import ConfigError

__all__ = ["EvalSpec", "RunConfig", "TrainSpec", "VocabInfo", "WarmStartSettings"]

Path = str | os.PathLike[str]
_UNSET: Any = object()
EVERY = 600
"""Seconds between checkpoints where nothing is said."""


class RunConfig:
    """How an Estimator runs. TensorFlow's arguments; those that say where its processes are have no meaning here.

    Which worker this is, and of how many, is in the environment (`plait launch`); `train_distribute` may be a
    `plait.cluster.Distributed(...)`.
    """

    def __init__(
        self,
        model_dir: Path | None = None,
        tf_random_seed: int | None = 0,
        save_summary_steps: int | None = 100,
        save_checkpoints_steps: int | None = _UNSET,
        save_checkpoints_secs: float | None = _UNSET,
        session_config: SessionConfig | Mapping[str, Any] | None = None,
        keep_checkpoint_max: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000,
        log_step_count_steps: int | None = 100,
        train_distribute: Any = None,
    ) -> None:
        if save_checkpoints_steps is _UNSET and save_checkpoints_secs is _UNSET:
            save_checkpoints_secs = EVERY
        self.model_dir = None if model_dir is None else os.fspath(model_dir)
        self.tf_random_seed = tf_random_seed
        self.save_summary_steps = save_summary_steps
        self.save_checkpoints_steps = None if save_checkpoints_steps is _UNSET else save_checkpoints_steps
        self.save_checkpoints_secs = None if save_checkpoints_secs is _UNSET else save_checkpoints_secs
        self.session_config = session_config
        self.keep_checkpoint_max = keep_checkpoint_max or None
        """None: all; TensorFlow says that with 0, too."""
        self.log_step_count_steps = log_step_count_steps
        self.train_distribute = train_distribute
        if keep_checkpoint_every_n_hours != 10000:
            raise ConfigError("keep_checkpoint_every_n_hours is not supported: keep more with keep_checkpoint_max=")
        if None not in (self.save_checkpoints_steps, self.save_checkpoints_secs):
            raise ConfigError("give save_checkpoints_steps= or save_checkpoints_secs=, not both")
        for name in ("save_summary_steps", "save_checkpoints_steps", "keep_checkpoint_max", "log_step_count_steps"):
            if getattr(self, name):
                check_count(name, getattr(self, name))
        if self.save_checkpoints_secs is not None:
            check_count("save_checkpoints_secs", self.save_checkpoints_secs, whole=False)

    def replace(self, **kwargs: Any) -> RunConfig:
        """A copy in which these differ."""
        unknown = sorted(set(kwargs) - set(vars(self)))
        if unknown:
            raise ConfigError(f"RunConfig has no {unknown[0]!r}: it has {', '.join(vars(self))}")
        if "save_checkpoints_steps" in kwargs:
            kwargs = {"save_checkpoints_secs": None, **kwargs}
        if "save_checkpoints_secs" in kwargs:
            kwargs = {"save_checkpoints_steps": None, **kwargs}
        return RunConfig(**{**vars(self), **kwargs})


@dataclasses.dataclass(frozen=True)
class VocabInfo:
    """How a table's rows move when its vocabulary has changed: files of words, one a line, the first is row 0."""

    new_vocab: str
    new_vocab_size: int
    num_oov_buckets: int
    old_vocab: str
    old_vocab_size: int = -1
    """-1: all of the old file."""
    backup_initializer: None = None
    """Rows of new words keep the values that they begin with."""
    axis: int = 0

    def __post_init__(self) -> None:
        if self.backup_initializer is not None or self.axis not in (0, 1):
            raise ConfigError("VocabInfo: leave backup_initializer out, and write axis=0 for rows or 1 for columns")


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Where variables begin, if there is no checkpoint of one's own yet."""

    ckpt_to_initialize_from: Path
    """A checkpoint of plait or TensorFlow, a directory of them, or a file of weights."""
    vars_to_warm_start: str | Sequence[str] | None = ".*"
    """Regular expressions, matched at the beginning of names; None: only those that the two tables below name."""
    var_name_to_vocab_info: Mapping[str, VocabInfo] | None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None
    """Names in the model: names in the checkpoint, where they differ."""


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """What `train_and_evaluate` trains with."""

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    """The global step at which it ends; None: with the data."""
    hooks: Sequence[SessionRunHook] | None = None
    saving_listeners: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.max_steps is not None:
            check_count("max_steps", self.max_steps)
        _check_function("TrainSpec", self.input_fn)


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """What `train_and_evaluate` evaluates with."""

    input_fn: Callable[..., Any]
    steps: int | None = 100
    """Batches of an evaluation; None: all."""
    name: str | None = None
    hooks: Sequence[SessionRunHook] | None = None
    exporters: Any = None
    """Exporters that are asked after each evaluation: one, or a list."""
    start_delay_secs: float = 120
    """Has no meaning: evaluations are made by those who train."""
    throttle_secs: float = 600
    """An evaluation begins so many seconds after the last one, at least; the last one is always made."""

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count("steps", self.steps)
        if self.throttle_secs < 0:
            raise ConfigError(f"throttle_secs={self.throttle_secs}: write a number from 0 on")
        _check_function("EvalSpec", self.input_fn)


def _check_function(what: str, function: Any) -> None:
    if not callable(function):
        raise ConfigError(f"{what}(input_fn={function!r:.60}): give a function")
