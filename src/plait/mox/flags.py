"""Flags: settings of a run that may also come from the command line of the user's script."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import logging
import re
import sys
from typing import Any

from plait.errors import ConfigError

__all__ = ["get_flag", "get_help", "reset_flags", "selected", "set_flag"]


TRUTH = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


@dataclasses.dataclass(frozen=True)
class _Flag:
    default: Any
    help: str

    def following(self, argument: str) -> str:
        """The text of a flag that was written without `=`, before `argument`."""
        if isinstance(self.default, bool):
            return argument if argument.lower() in TRUTH else "true"
        return "" if argument.startswith("--") else argument

    def parse(self, text: str) -> Any:
        if isinstance(self.default, bool):
            if text.lower() not in TRUTH:
                raise ValueError("write true or false")
            return TRUTH[text.lower()]
        return type(self.default)(text) if self.default is not None else float(text)


FLAGS = {
    "capture_steps": _Flag(False, "on a GPU, replay each training step as one graph"),
    "checkpoint_exclude_patterns": _Flag("", "variables not loaded from checkpoint_path: patterns by comma"),
    "checkpoint_include_patterns": _Flag("", "variables loaded from checkpoint_path; empty: all"),
    "compile_modules": _Flag(False, "compile the network with torch.compile"),
    "device": _Flag("auto", "where: 'auto' (a GPU if there is one), 'cpu', 'cuda:1'"),
    "gradient_clip": _Flag(None, "limit for gradients; none: they are left alone"),
    "gradient_clip_type": _Flag("norm", "'norm': the norm of all gradients together; 'value': each element"),
    "job_name": _Flag("worker", "'worker' or 'ps'"),
    "log_first_clone": _Flag(True, "log the first replica only, not the mean of all"),
    "loss_scale": _Flag(1.0, "the loss is multiplied by it, gradients are divided by it"),
    "num_gpus": _Flag(1, "replicas in this process"),
    "precision": _Flag("fp32", "'fp32', 'tf32', 'bf16' or 'fp16'"),
    "ps_hosts": _Flag("", "host:port of the parameter servers, by comma"),
    "sync_replicas": _Flag(True, "workers move the variables together"),
    "task_index": _Flag(0, "number of this process among those of its job"),
    "trainable_exclude_patterns": _Flag("", "variables that are not trained: regular expressions, by comma"),
    "trainable_include_patterns": _Flag("", "variables that are trained; empty: all"),
    "use_fp16": _Flag(False, "compute in half precision where it is safe; the same as precision='fp16'"),
    "worker_hosts": _Flag("", "host:port of the workers, by comma; empty: one worker"),
}

_set: dict[str, Any] = {}


def get_flag(name: str | None = None, *, flag_name: str | None = None) -> Any:
    """The value of a flag: set by `set_flag`, or given on the command line, or its default.

    >>> get_flag("num_gpus")
    1
    """
    wanted = _known(name if name is not None else flag_name)
    if wanted in _set:
        return _set[wanted]
    return _from_command_line().get(wanted, FLAGS[wanted].default)


def set_flag(name: str, value: Any) -> None:
    """Set a flag; before `run`, and outside the user functions."""
    flag = FLAGS[_known(name)]
    wanted = float if flag.default is None else type(flag.default)
    fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int)) or value is flag.default
    if not fits or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"flag {name}={value!r}: write {_article(wanted)} ({flag.help})")
    _set[name] = float(value) if wanted is float and value is not None else value


def _article(kind: type) -> str:
    return f"{'an' if kind is int else 'a'} {kind.__name__}"


def reset_flags() -> None:
    """Forget what `set_flag` set."""
    _set.clear()


def get_help() -> str:
    """All flags with their defaults and meaning."""
    width = max(map(len, FLAGS))
    return "\n".join(f"--{name:<{width}}  {flag.help} (default: {flag.default!r})" for name, flag in FLAGS.items())


def _known(name: str | None) -> str:
    if name not in FLAGS:
        raise ConfigError(f"there is no flag {name!r}: the flags are {', '.join(FLAGS)}")
    return str(name)


@functools.cache
def _warn_of_slip(name: str) -> None:
    """Once for each: an argument of the script's own may look like a flag."""
    near = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.9)
    if near:
        logging.getLogger("plait").warning("--%s is not a flag; --%s is: was that meant?", name, near[0])


def _from_command_line() -> dict[str, Any]:
    """The flags among the script's arguments; what is not a flag is the script's own, and stays."""
    values: dict[str, Any] = {}
    given = itertools.takewhile(lambda argument: argument != "--", sys.argv[1:])
    for argument, after in itertools.pairwise([*given, ""]):
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            continue
        if name not in FLAGS:
            _warn_of_slip(name)
            continue
        flag = FLAGS[name]
        if not equals:
            text = flag.following(after)
        try:
            values[name] = flag.parse(text)
        except ValueError as error:
            raise ConfigError(f"--{name}={text}: {error} ({flag.help})") from error
    return values


def selected(name: str, include: str, exclude: str) -> bool:
    """Patterns are regular expressions, searched for anywhere in the name, separated by commas."""
    return (not include or _matches(name, include)) and not _matches(name, exclude)


def _matches(name: str, patterns: str) -> bool:
    try:
        return any(re.search(pattern.strip(), name) for pattern in patterns.split(",") if pattern.strip())
    except re.error as error:
        raise ConfigError(f"patterns {patterns!r}: {error}; write regular expressions, separated by commas") from error
