"""Exports: what model.json says, whether the files are those that it lists, and the weights in model.pt2."""

from __future__ import annotations

import hashlib
import json
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import CheckpointError
from plait.inspection.reports import Grid, Report, cut, progress
from plait.inspection.sources import EXPORT, Entry, Tensors, tensor_grid, tensors_facts
from plait.variables.tf_table import reading

__all__ = ["export_report", "exports_report", "is_export", "newest_export", "open_export", "versions"]

_ABOUT, _ARCHIVE = "model.json", "model.pt2"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_MAX_ABOUT = 16 << 20
_MAX_CONFIG = 256 << 20
_FORMAT = 1
_WRAPPED = "module."
"""The exporter puts a module into another one, that names its inputs and outputs; its own names come behind this."""
_DTYPES = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16,
    7: torch.float32, 8: torch.float64, 9: torch.complex32, 10: torch.complex64, 11: torch.complex128, 12: torch.bool,
    13: torch.bfloat16,
}  # fmt: skip
"""torch.export's numbers for types."""


def is_export(path: Path) -> bool:
    """Whether `path` is one version of an exported model."""
    return (path / _ABOUT).is_file()


def versions(directory: Path) -> list[Path]:
    """The versions in a directory, the newest last: names in order, then numbers in order."""
    found = [path for path in directory.iterdir() if not path.name.startswith(".") and is_export(path)]
    return sorted(found, key=lambda path: (_number(path.name) is not None, _number(path.name) or 0, path.name))


def _number(version: str) -> int | None:
    """As those count who serve: what is no number is a name."""
    return int(version) if _NUMBER.fullmatch(version) else None


def newest_export(path: Path) -> Path:
    """`path` itself, if it is a version; else the newest in it."""
    return path if is_export(path) else versions(path)[-1]


def exports_report(directory: Path, *, stats: bool) -> Report:
    """All versions in a table, and the newest."""
    listed: list[dict[str, Any]] = []
    for path in versions(directory):
        about = _read_about(path)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        told = {key: about.get(key) for key in ("created", "formats", "step")}
        listed.append({"version": path.name, **told, "bytes": size})
    rows = [
        [one["version"], _word(one["created"]), _words(one["formats"]), _word(one["step"]), f"{one['bytes']:,}"]
        for one in listed
    ]
    grid = Grid(("version", "when", "formats", "step", "bytes"), rows, right=frozenset({"step", "bytes"}))
    one = export_report(newest_export(directory), stats=stats)
    facts = {"kind": "directory of exports", "path": str(directory), "versions": listed, "newest": one.facts}
    return Report(facts, [grid, *one.parts])


def export_report(path: Path, *, stats: bool) -> Report:
    """One version: what goes in and comes out, its files, and its weights where they can be read."""
    about = _read_about(path)
    with reading(path / _ABOUT):
        files = _check_files(path, about)
        parts: list[str | Grid] = [_headline(path, about), _signature(about), _file_grid(files), _notes(about)]
    facts: dict[str, Any] = {"kind": EXPORT, "path": str(path), "about": about, "files": files}
    if (path / _ARCHIVE).is_file():
        found = tensors_facts(open_export(path), stats=stats)
        facts |= found
        parts.append(tensor_grid(found))
    return Report(facts, parts)


def open_export(path: Path) -> Tensors:
    """The weights of an export that has torch's format; each is read by itself."""
    file = path / _ARCHIVE
    if not file.is_file():
        raise CheckpointError(
            f"{path} has no {_ARCHIVE}, so its weights cannot be read; export the model with formats=('torch', ...)"
        )
    with reading(file), zipfile.ZipFile(file) as archive:
        members = _members(archive)
    entries = {name: _entry(told) for name, (_, told) in sorted(members.items())}

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        with reading(file), zipfile.ZipFile(file) as opened:
            return {name: _read_member(opened, *members[name]) for name in names}

    return Tensors(EXPORT, path, entries, read)


def _read_about(path: Path) -> dict[str, Any]:
    file = path / _ABOUT
    with reading(file):
        if file.stat().st_size > _MAX_ABOUT:
            raise CheckpointError(f"has {file.stat().st_size} bytes, {_MAX_ABOUT} are allowed")
        about = json.loads(file.read_bytes())
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            told = about.get("format") if isinstance(about, dict) else cut(about)
            raise CheckpointError(f"its format is {told!r}, this plait reads format {_FORMAT} of exports")
    return about


def _check_files(path: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = about.get("files") or {}
    if not isinstance(listed, dict):
        raise CheckpointError(f"`files` is {cut(listed)}, not names and digests")
    return [{"name": name, **_check_file(path, name, digest)} for name, digest in sorted(listed.items())]


def _check_file(path: Path, name: str, digest: Any) -> dict[str, Any]:
    file = path / name
    if not file.resolve().is_relative_to(path.resolve()):
        return {"bytes": 0, "state": "lies outside the export, and is not looked at"}
    if not file.is_file():
        return {"bytes": 0, "state": "is missing"}
    size = file.stat().st_size
    found = hashlib.sha256()
    with file.open("rb") as stream, progress(f"checking {name}", size) as advance:
        while chunk := stream.read(1 << 20):
            found.update(chunk)
            advance(len(chunk))
    wanted = digest.get("sha256") if isinstance(digest, dict) else digest
    return {"bytes": size, "state": "valid" if found.hexdigest() == wanted else "was altered"}


def _headline(path: Path, about: Mapping[str, Any]) -> str:
    made = f"made {_word(about.get('created'))} by plait {_word(about.get('plait'))}, torch {_word(about.get('torch'))}"
    step = "" if about.get("step") is None else f", step {_word(about.get('step'))}"
    return f"{path.parent.name}/{path.name}: an export{step}, {_words(about.get('formats'))}, {made}"


def _signature(about: Mapping[str, Any]) -> Grid:
    rows = []
    for way in ("inputs", "outputs"):
        for one in about.get(way) or []:
            sides = ["any" if side is None else str(side) for side in one["shape"]]
            rows.append([way.removesuffix("s"), str(one["name"]), str(one["dtype"]), f"[{', '.join(sides)}]"])
    return Grid(("is", "name", "dtype", "shape"), rows)


def _file_grid(files: Sequence[Mapping[str, Any]]) -> Grid:
    rows = [[one["name"], f"{one['bytes']:,}", one["state"]] for one in files]
    total = sum(one["bytes"] for one in files)
    return Grid(("file", "bytes", "state"), rows, total=[f"total: {len(rows)}", f"{total:,}", ""])


def _notes(about: Mapping[str, Any]) -> Grid:
    """What is known of the model itself, where it is known."""
    keys = ("metrics", "epsilon", "labels", "preprocess", "checked")
    rows = [[key, cut(about[key])] for key in keys if about.get(key) not in (None, {})]
    return Grid(("about", "says"), rows)


def _members(archive: zipfile.ZipFile) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """By name of a weight: where it lies in the archive, and what is told of it."""
    ends = "data/weights/model_weights_config.json"
    config = next((info for info in archive.infolist() if info.filename.endswith(ends)), None)
    if config is None:
        return {}
    if config.file_size > _MAX_CONFIG:
        raise CheckpointError(f"{config.filename} has {config.file_size} bytes, {_MAX_CONFIG} are allowed")
    folder = config.filename.removesuffix("model_weights_config.json")
    weights = json.loads(archive.read(config))["config"]
    wrapped = all(name.startswith(_WRAPPED) for name in weights)
    names = {name: name.removeprefix(_WRAPPED) if wrapped else name for name in weights}
    return {names[name]: (folder + told["path_name"], told) for name, told in weights.items()}


def _entry(told: Mapping[str, Any]) -> Entry:
    meta = told["tensor_meta"]
    shape = _whole_numbers(meta["sizes"])
    dtype = _DTYPES.get(meta["dtype"])
    if dtype is None or told.get("use_pickle"):
        return Entry(f"type {meta['dtype']}" if dtype is None else _name(dtype), shape, 0, readable=False)
    return Entry(_name(dtype), shape, math.prod(shape) * dtype.itemsize)


def _read_member(archive: zipfile.ZipFile, member: str, told: Mapping[str, Any]) -> Tensor:
    meta = told["tensor_meta"]
    shape, strides = _whole_numbers(meta["sizes"]), _whole_numbers(meta["strides"])
    dtype = _DTYPES[meta["dtype"]]
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(archive.read(member)), dtype=dtype)
    return flat.as_strided(shape, strides, meta["storage_offset"]["as_int"])


def _whole_numbers(found: Sequence[Mapping[str, int]]) -> tuple[int, ...]:
    return tuple(one["as_int"] for one in found)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _word(value: Any) -> str:
    return "-" if value is None else str(value)


def _words(values: Any) -> str:
    return ", ".join(map(str, values)) if isinstance(values, list) else _word(values)
