"""`model.json`: what an export is, for people and for those who run it."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from plait.atomic import file_digest
from plait.errors import ConfigError, DataError
from plait.version import __version__

__all__ = ["ABOUT", "LABELS", "check_facts", "check_labels", "form", "read_about", "read_labels", "write_about"]

ABOUT = "model.json"
LABELS = "labels.txt"

_FORMAT = 1
_MAX_BYTES = 64 * 2**20
"""A description is small; whoever hands us a larger one wants something else."""
_FACTS: dict[str, Any] = {"epsilon": None, "metrics": {}, "party": None, "preprocess": None, "step": None}


def check_facts(facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """The facts with those that are left out; numbers of other libraries are plain ones."""
    given = dict(facts or {})
    strange = sorted(set(given) - set(_FACTS))
    if strange:
        raise ConfigError(f"facts has {strange[0]!r}: it may have {', '.join(_FACTS)}")
    found = {name: _plain(name, given.get(name, usual)) for name, usual in _FACTS.items()}
    if not isinstance(found["metrics"], dict):
        raise ConfigError(f"facts['metrics'] is a {type(given['metrics']).__name__}: write a dict of name: number")
    return found


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, one) for one in value]
    try:
        number = value.item() if hasattr(value, "item") else float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"facts: {name} is a {type(value).__name__}: write a number, a text, a list or a dict"
        ) from None
    return number if isinstance(number, int) or math.isfinite(number) else None  # JSON has no other numbers


def check_labels(labels: Sequence[str] | None) -> list[str] | None:
    if labels is None:
        return None
    names = [] if isinstance(labels, str) else list(labels)
    wrong = [name for name in names if not _is_line(name)]
    if wrong or not names:
        shown = wrong[0] if wrong else labels
        raise ConfigError(f"labels has {shown!r}: write a list of names, each a text of one line")
    return [str(name) for name in names]  # NumPy's texts are texts, too


def _is_line(name: Any) -> bool:
    """Whether a file of lines gives it back as it is: one with an end of a line at its own end would be two."""
    return isinstance(name, str) and name.encode(errors="ignore").decode().splitlines() == [name]


def form(name: str, dtype: torch.dtype, shape: Sequence[Any]) -> dict[str, Any]:
    """An input or output; a size that is a symbol of torch's, or None, is any size."""
    return {"name": name, "dtype": str(dtype).removeprefix("torch."), "shape": [_size(size) for size in shape]}


def _size(size: Any) -> int | None:
    """A symbol may stand for one number only."""
    if size is None or isinstance(size, int):
        return size
    number: int | None = size.node.maybe_as_int()
    return number


def write_about(folder: Path, body: Mapping[str, Any]) -> None:
    """Write it last: it has the digests of all files in `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    whole = {
        "format": _FORMAT,
        "plait": __version__,
        "torch": torch.__version__,
        "created": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        **body,
        "files": {path.relative_to(folder).as_posix(): file_digest(path) for path in files},
    }
    (folder / ABOUT).write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_about(folder: Path, *, digests: bool = True) -> dict[str, Any]:
    """What `write_about` wrote, after a look at the files: are they there and, with `digests`, are they the same?"""
    path = folder / ABOUT
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path} is larger than {_MAX_BYTES} bytes: it was not written by plait")
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder} is no export, {ABOUT} cannot be read: {error}. Name a version directory") from error
    _check_about(path, about)
    for name, digest in about["files"].items():
        _check_file(folder, name, digest if digests else None)
    return dict(about)


def _check_about(path: Path, about: Any) -> None:
    kinds = {"formats": list, "inputs": list, "outputs": list, "files": dict}
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        found = about.get("format") if isinstance(about, dict) else type(about).__name__
        raise DataError(f"{path} has format {found!r}, this plait reads {_FORMAT}: export again, or use a newer plait")
    wrong = [key for key, kind in kinds.items() if not isinstance(about.get(key), kind)]
    if wrong:
        raise DataError(f"{path} has no {wrong[0]!r} as it should: export again")
    if not all(_is_form(one) for one in [*about["inputs"], *about["outputs"]]):
        raise DataError(f"{path} describes an input or output without name, dtype and shape: export again")
    if not all(isinstance(text, str) for text in [*about["formats"], *about["files"].values()]):
        raise DataError(f"{path} has formats or digests that are no texts: export again")
    if about.get("labels") not in (None, LABELS):
        raise DataError(f"{path} has its labels in another file than {LABELS}: export again")
    if about.get("party") is not None and not _is_party(about["party"], about):
        raise DataError(f"{path} has a 'party' that is not that of its inputs and outputs: export again")


def _is_form(one: Any) -> bool:
    """Whether it is what `form` gives."""
    return (
        isinstance(one, dict)
        and all(isinstance(one.get(key), str) for key in ("name", "dtype"))
        and isinstance(one.get("shape"), list)
        and all(size is None or (type(size) is int and size >= 0) for size in one["shape"])
    )


def _is_party(party: Any, about: Mapping[str, Any]) -> bool:
    """Whether it says what of these inputs and outputs travels between the parties."""
    if not isinstance(party, dict) or not all(isinstance(party.get(key), str) for key in ("role", "pair", "key")):
        return False
    receives, sends = party.get("receives"), party.get("sends")
    return (
        isinstance(receives, dict)
        and isinstance(sends, list)
        and receives.keys() <= {one["name"] for one in about["inputs"]}
        and all(isinstance(name, str) for name in [*receives.values(), *sends])
        and set(sends) <= {one["name"] for one in about["outputs"]}
    )


def _check_file(folder: Path, name: str, digest: str | None) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise DataError(f"{folder / ABOUT} names the file {name!r}, which is outside of it: export again")
    path = folder / pure
    if not path.is_file():
        raise DataError(f"{folder} lacks {name}: copy the whole directory, or export again")
    if digest is not None and file_digest(path) != digest:
        raise DataError(f"{path} is not the file that was exported: copy it again, or export again")


def read_labels(folder: Path, about: Mapping[str, Any]) -> list[str] | None:
    if about.get("labels") is None:
        return None
    try:
        return (folder / LABELS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder / LABELS} cannot be read: {error}; copy the whole directory, or export again"
        ) from error
