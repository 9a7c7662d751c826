"""Settings: how a session computes, and what a configuration file may say."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from plait.errors import ConfigError

__all__ = [
    "RunConfig",
    "SessionConfig",
    "check_count",
    "check_opt_config",
    "check_sync_optimizer_config",
    "read_config",
]

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
CONFIG_VARIABLE = "PLAIT_CONFIG"
MAX_CONFIG_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """How steps are computed; `compile(session_config=...)` takes one, or a dict of its fields."""

    device: str = "auto"
    """Where: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ..."""
    threads: int | None = None
    """CPU threads inside one operation; None leaves PyTorch's own choice."""
    precision: str = "fp32"
    """"fp32", "tf32" (matrix products on GPUs), or autocast to "bf16" or "fp16".

    With "fp16" the loss is scaled: by `loss_scale` if that is given, else by a scale that follows the overflows.
    """
    channels_last: bool | None = None
    """Whether the weights of convolutions lie in memory as NHWC; None: on a GPU, where that is faster."""
    compile: bool = False
    """Compile the modules with `torch.compile`."""
    capture: bool = False
    """Replay each training step as one CUDA graph (see docs/gpu.md); on the CPU, the same as `compile`."""
    deterministic: bool = False
    """Refuse operations that may give other bits in another run."""

    def __post_init__(self) -> None:
        for name in ("compile", "capture", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: write True or False")
        if self.channels_last not in (None, True, False):
            raise ConfigError(f"channels_last={self.channels_last!r}: write True or False, or leave it out")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision={self.precision!r} is not known: write one of {', '.join(PRECISIONS)}")
        if self.threads is not None and (not isinstance(self.threads, int) or self.threads < 1):
            raise ConfigError(f"threads={self.threads!r}: write a whole number from 1 on, or leave it out")
        if self.device != "auto":
            try:
                torch.device(self.device)
            except RuntimeError as error:
                raise ConfigError(f"device={self.device!r} is not a device: write 'cpu' or 'cuda:0'") from error

    @classmethod
    def of(cls, given: SessionConfig | Mapping[str, Any] | None) -> SessionConfig:
        if given is None or isinstance(given, cls):
            return given or cls()
        if not isinstance(given, Mapping):
            raise ConfigError(f"session_config is a {type(given).__name__}: write plait.SessionConfig(...) or a dict")
        known = [field.name for field in dataclasses.fields(cls)]
        _check_keys("session_config", given, known)
        return cls(**given)

    def resolved_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            seen = torch.cuda.device_count()
            raise ConfigError(f"device={self.device!r}: PyTorch sees {seen} CUDA devices here; write 'cpu' or 'auto'")
        return device

    def apply(self) -> None:
        """Make the process-wide settings that were asked for."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
        elif self.resolved_device().type == "cuda":
            torch.backends.cudnn.benchmark = True  # shapes seldom change: the fastest convolution is looked for once


def check_count(name: str, value: Any, *, whole: bool = True) -> None:
    """A number above 0."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value > 0:
        raise ConfigError(f"{name}={value!r}: write a {'whole ' if whole else ''}number above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """What happens to gradients before the optimizers see them."""

    loss_scale: float = 1.0
    """The loss is multiplied by it before the backward pass, gradients are divided by it after."""
    clip: float | None = None
    """The limit; None: gradients are left alone."""
    clip_type: str = "norm"
    """"norm": the norm of all gradients together; "value": each element."""

    def __post_init__(self) -> None:
        if self.clip_type not in ("norm", "value"):
            raise ConfigError(f"gradient clip_type={self.clip_type!r}: write 'norm' or 'value'")
        if not self.loss_scale > 0 or (self.clip is not None and not self.clip > 0):
            raise ConfigError(f"loss_scale={self.loss_scale}, clip={self.clip}: write numbers above 0")


def _check_keys(what: str, given: Any, known: list[str]) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} is a {type(given).__name__}: write a dict of {', '.join(known)}")
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        raise ConfigError(f"{what} has unknown keys {', '.join(unknown)}: it takes {', '.join(known)}")


Reduce = str | Callable[[torch.Tensor], torch.Tensor]


def check_opt_config(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of differentially private optimizers, with the documented defaults; a copy, never shared."""
    _check_keys("opt_config", given or {}, ["REDUCE", "BACKEND_MODE"])
    config: dict[str, Any] = {"REDUCE": "mean", "BACKEND_MODE": "noise"} | dict(given or {})
    if config["REDUCE"] not in ("mean", "sum") and not callable(config["REDUCE"]):
        raise ConfigError(f"opt_config REDUCE={config['REDUCE']!r}: write 'mean', 'sum', or a function of the losses")
    if config["BACKEND_MODE"] not in ("noise", "unnoise"):
        raise ConfigError(f"opt_config BACKEND_MODE={config['BACKEND_MODE']!r}: write 'noise' or 'unnoise'")
    return config


def check_sync_optimizer_config(given: Mapping[str, Any] | None, worker_num: int) -> dict[str, Any]:
    """The options of synchronous training on several workers."""
    _check_keys("sync_optimizer_config", given or {}, ["replicas_to_aggregate", "total_num_replicas"])
    config = dict(given or {})
    for key, value in config.items():
        if not isinstance(value, int) or not 1 <= value <= worker_num:
            raise ConfigError(f"sync_optimizer_config {key}={value!r}: write 1 to {worker_num}, the number of workers")
    return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a configuration file says; anything else in it is for `ctx.get(...)`."""

    worker_num: int = 1
    worker_id: int = 0
    role: str = "worker"
    checkpoint_dir: str | None = None
    save_steps: int | None = None
    save_secs: float | None = 600
    keep: int | None = 5
    log_step: int | None = None
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The whole file."""

    def __post_init__(self) -> None:
        if self.role not in ("worker", "ps", "leader", "follower"):
            raise ConfigError(f"role={self.role!r}: write 'worker', 'ps', 'leader' or 'follower'")
        check_count("worker_num", self.worker_num)
        if not isinstance(self.worker_id, int) or not 0 <= self.worker_id < self.worker_num:
            raise ConfigError(f"worker_id={self.worker_id!r}: write 0 to {self.worker_num - 1}, below worker_num")
        if self.checkpoint_dir is not None and not isinstance(self.checkpoint_dir, str):
            raise ConfigError(f"checkpoint dir={self.checkpoint_dir!r}: write a path in quotes")

    def get(self, *keys: str, default: Any = None) -> Any:
        """A value of the file by its path: `get("model", "width")` or `get("model.width")`."""
        value: Any = self.values
        for part in ".".join(keys).split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value


def read_config(path: str | os.PathLike[str] | None = None) -> RunConfig:
    """Read a TOML or JSON file: the one given, or the one that `PLAIT_CONFIG` names, or none.

    Its tables `[cluster]`, `[checkpoint]` and `[fit]` hold the fields of RunConfig; other tables are the user's own.
    """
    name = os.fspath(path) if path is not None else os.environ.get(CONFIG_VARIABLE)
    if not name:
        return RunConfig()
    values = _parse(Path(name))
    fields: dict[str, Any] = {}
    for table, known in (
        ("cluster", ["worker_num", "worker_id", "role"]),
        ("checkpoint", ["dir", "save_steps", "save_secs", "keep"]),
        ("fit", ["log_step"]),
    ):
        given = values.get(table, {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"{name}: {table!r} must be a table, not {type(given).__name__}")
        _check_keys(f"{name}: [{table}]", given, known)
        fields |= {"checkpoint_dir" if key == "dir" else key: value for key, value in given.items()}
    return RunConfig(**fields, values=values)


def _parse(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: that is no configuration file")
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else _toml(text)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot read the configuration {path}: {error}. Write TOML, or JSON as *.json") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}: write tables, such as [checkpoint]")
    return values


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - only where a file is read
    else:
        import tomli as tomllib  # noqa: PLC0415 - the same, before Python 3.11
    values: dict[str, Any] = tomllib.loads(text)
    return values
