"""An export, checked and ready to run."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from plait.errors import ConfigError, DataError
from plait.export.describe import read_about, read_labels
from plait.export.formats import FORMATS, Arrays, Run, check_installed
from plait.export.publish import is_number

__all__ = ["Loaded", "load", "versions"]


class Loaded:
    """A version that can be run. Threads may share it."""

    def __init__(self, about: dict[str, Any], labels: list[str] | None, run: Run) -> None:
        self.about = about
        """What `model.json` says."""
        self.labels = labels
        self._run = run

    def run(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
        """All outputs by name. Numbers of another kind are converted where that loses no more than digits."""
        names = [one["name"] for one in self.about["inputs"]]
        if inputs.keys() != set(names):
            raise DataError(f"the inputs are {', '.join(map(str, inputs)) or 'none'}: give {', '.join(names)}")
        given = {one["name"]: _fitting(one, inputs[one["name"]]) for one in self.about["inputs"]}
        _check_rows(self.about["inputs"], given)
        return self._run(given)


def _fitting(form: Mapping[str, Any], value: Any) -> np.ndarray[Any, Any]:
    array, wanted = np.asarray(value), np.dtype(form["dtype"])
    if array.dtype != wanted:
        if not np.can_cast(array.dtype, wanted, "same_kind"):
            raise DataError(f"input {form['name']!r} is {array.dtype}: give {wanted}")
        array = _cast(form["name"], array, wanted)
    shape = form["shape"]
    fixed = [got if want is None else want for want, got in itertools.zip_longest(shape, array.shape)]
    if len(shape) != array.ndim or fixed != list(array.shape):
        shown = "x".join("n" if size is None else str(size) for size in shape) or "a single number"
        raise DataError(f"input {form['name']!r} has the shape {'x'.join(map(str, array.shape)) or '()'}: give {shown}")
    # torch warns of arrays that may not be written, and neither library takes reversed ones
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()


def _cast(name: str, array: np.ndarray[Any, Any], wanted: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Digits may be lost, not more: a number that the type cannot hold would be another one, or infinite."""
    with np.errstate(over="ignore"):
        cast = array.astype(wanted)
    kept = np.isfinite(cast) | ~np.isfinite(array) if wanted.kind == "f" else cast == array
    if not kept.all():
        raise DataError(f"input {name!r} has numbers that {wanted} cannot hold: give {wanted}")
    return cast


def _check_rows(forms: list[dict[str, Any]], given: Arrays) -> None:
    rows = {one["name"]: given[one["name"]].shape[0] for one in forms if one["shape"] and one["shape"][0] is None}
    if len(set(rows.values())) > 1:
        shown = ", ".join(f"{name} has {count}" for name, count in rows.items())
        raise DataError(f"the inputs have different numbers of rows, {shown}: give each the same")
    if 0 in rows.values():
        raise DataError("the inputs have no rows: give at least one")


def load(
    version_directory: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - what everybody calls it
    threads: int | None = None,
) -> Loaded:
    """Check the files of a version and open one of its formats: ONNX if it has it and onnxruntime is here.

    `threads` is how many one call may use. For the format "torch" it holds for all of PyTorch in this process.
    """
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ConfigError(f"threads is {threads!r}: write a whole number from 1 up, or None")
    folder = Path(version_directory)
    about = read_about(folder)
    chosen = _chosen(folder, about, format)
    check_installed(chosen, FORMATS[chosen].runs_with)
    return Loaded(about, read_labels(folder, about), FORMATS[chosen].open_run(folder, about, threads))


def _chosen(folder: Path, about: Mapping[str, Any], wanted: str | None) -> str:
    there: list[str] = [name for name in about["formats"] if name in FORMATS]
    if wanted is not None:
        if wanted not in there:
            raise ConfigError(f"{folder} has no format {wanted!r} that can be run here: it has {', '.join(there)}")
        return wanted
    if not there:
        raise DataError(f"{folder} has only formats that this plait does not know: {', '.join(about['formats'])}")
    fast_first = sorted(there, key=lambda name: name != "onnx")
    ready = [name for name in fast_first if all(map(importlib.util.find_spec, FORMATS[name].runs_with))]
    return (ready or fast_first)[0]


def versions(directory: str | os.PathLike[str]) -> list[str]:
    """The versions that are whole: names by the alphabet, then numbers in order, so that the last one is the newest."""
    try:
        entries = [entry for entry in Path(directory).iterdir() if not entry.name.startswith(".") and entry.is_dir()]
    except OSError as error:
        raise DataError(f"{directory} cannot be read: {error}; name a directory of exports") from error
    whole = [entry.name for entry in entries if _is_whole(entry)]
    return sorted(whole, key=lambda name: (is_number(name), int(name) if is_number(name) else 0, name))


def _is_whole(folder: Path) -> bool:
    try:
        read_about(folder, digests=False)
    except DataError:
        return False
    return True
