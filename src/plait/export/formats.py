"""The formats of an export: what each needs, and who writes and runs it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.errors import ConfigError

if TYPE_CHECKING:
    from plait.export.program import Program

__all__ = ["FORMATS", "Arrays", "Format", "Run", "check_formats", "check_installed"]

Arrays = dict[str, "np.ndarray[Any, Any]"]
Run = Callable[[Mapping[str, "np.ndarray[Any, Any]"]], Arrays]
"""Gives the outputs for inputs of the right names, dtypes and shapes. Threads may call it at the same time."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A file, or several, that a module can be written to. The module has `write` and `open_run`."""

    module: str
    needs: tuple[str, ...] = ()
    """Packages to write it."""
    runs_with: tuple[str, ...] = ()
    """Packages to run it."""
    extra: str = "export"
    """What installs them."""
    checks: bool = False
    """Whether there are modules that it cannot carry; its module then has `check`, too."""

    def check(self, program: Program) -> None:
        if self.checks:
            importlib.import_module(self.module).check(program)

    def write(self, program: Program, folder: Path) -> None:
        importlib.import_module(self.module).write(program, folder)

    def open_run(self, folder: Path, about: Mapping[str, Any], threads: int | None) -> Run:
        """`threads`: how many one call may use; None leaves it to the library."""
        run: Run = importlib.import_module(self.module).open_run(folder, about, threads)
        return run


FORMATS = {
    "torch": Format(module="plait.export.program"),
    "onnx": Format(module="plait.export.onnx", needs=("onnx", "onnxscript", "onnxruntime"), runs_with=("onnxruntime",)),
    "tf": Format(
        module="plait.export.savedmodel", needs=("tensorflow",), runs_with=("tensorflow",), extra="tf", checks=True
    ),
}


def check_formats(formats: Sequence[str]) -> list[str]:
    """The formats, each once. An error here, before any work, is better than one after the training."""
    if isinstance(formats, str) or not formats:
        raise ConfigError(f"formats is {formats!r}: write a list of some of {', '.join(FORMATS)}")
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"there is no format {name!r}: there are {', '.join(FORMATS)}")
        check_installed(name, FORMATS[name].needs)
    return list(dict.fromkeys(formats))


def check_installed(name: str, packages: Sequence[str]) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        extra = FORMATS[name].extra
        raise ConfigError(f"format {name!r} needs {missing[0]}, which is not installed: pip install 'plait[{extra}]'")
