"""What `plait inspect` does: find out what a path is, and report on it or on how two differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from plait.errors import CheckpointError, ConfigError
from plait.inspection.checkpoints import checkpoint_report, directory_report, newest, open_checkpoint
from plait.inspection.comparison import comparison_report
from plait.inspection.exports import export_report, exports_report, is_export, newest_export, open_export, versions
from plait.inspection.records import looks_like_records, records_report
from plait.inspection.reports import Report
from plait.inspection.sources import (
    SAFETENSORS,
    TENSORFLOW,
    Tensors,
    from_safetensors,
    from_tensorflow,
    looks_like_safetensors,
    tensor_grid,
    tensors_facts,
)
from plait.variables.checkpoint import CheckpointDir, is_checkpoint
from plait.variables.tf_bundle import is_bundle
from plait.variables.tf_v1 import is_v1

__all__ = ["inspect"]

_CHECKPOINT, _CHECKPOINTS = "checkpoint", "checkpoints"
_EXPORT, _EXPORTS = "export", "exports"
_RECORDS = "records"
_WRITE = (
    "name a directory of ckpt-* directories, one of them, a TensorFlow checkpoint, an export, a .safetensors file"
    " or a TFRecord file"
)
_HINTS = {
    ".onnx": "; name the export's directory, where model.json is",
    ".pt2": "; name the export's directory, where model.json is",
    ".pt": "; what torch.save wrote is loaded by ModelBank, save it as safetensors to look into it",
    ".pth": "; what torch.save wrote is loaded by ModelBank, save it as safetensors to look into it",
}


def inspect(
    path: str | os.PathLike[str], other: str | os.PathLike[str] | None = None, *, stats: bool = False
) -> Report:
    """What is inside `path`; with `other`, how the tensors of both differ."""
    target = Path(path)
    if other is not None:
        if stats:
            raise ConfigError("--stats is of one path, got two; look at each by itself, or leave --stats out")
        return comparison_report(_tensors(target), _tensors(Path(other)))
    kind = _kind(target)
    reports: dict[str, Callable[..., Report]] = {
        _CHECKPOINT: checkpoint_report,
        _CHECKPOINTS: directory_report,
        _EXPORT: export_report,
        _EXPORTS: exports_report,
        _RECORDS: records_report,
    }
    return reports.get(kind, _file_report)(target, stats=stats)


def _kind(path: Path) -> str:
    """Which of the things that can be looked into; plait's own come first."""
    if is_checkpoint(path):
        return _CHECKPOINT
    if path.is_dir():
        if CheckpointDir(path).list():
            return _CHECKPOINTS
        if is_export(path):
            return _EXPORT
        if versions(path):
            return _EXPORTS
    if is_v1(path) or is_bundle(path):
        return TENSORFLOW
    if path.is_file():
        return _kind_of_file(path)
    what = "a directory without checkpoints or exports" if path.is_dir() else "not a directory, and not a file"
    raise CheckpointError(f"{path} is {what}; {_WRITE}")


def _kind_of_file(path: Path) -> str:
    try:
        if looks_like_safetensors(path):
            return SAFETENSORS
        if looks_like_records(path):
            return _RECORDS
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {_WRITE}") from error
    what = "a file of a kind that cannot be looked into" if size else "empty"
    raise CheckpointError(f"{path} is {what}; {_WRITE}{_HINTS.get(path.suffix, '')}")


def _tensors(path: Path) -> Tensors:
    kind = _kind(path)
    if kind in (_CHECKPOINT, _CHECKPOINTS):
        return open_checkpoint(path if kind == _CHECKPOINT else newest(path))[1]
    if kind in (_EXPORT, _EXPORTS):
        return open_export(newest_export(path))
    if kind == _RECORDS:
        raise ConfigError(f"{path} has records, and only tensors are compared; name two checkpoints, exports or files")
    return _file(path, kind)


def _file(path: Path, kind: str) -> Tensors:
    return from_safetensors(path) if kind == SAFETENSORS else from_tensorflow(path)


def _file_report(path: Path, *, stats: bool) -> Report:
    tensors = _file(path, _kind(path))
    found = tensors_facts(tensors, stats=stats)
    facts = {"kind": tensors.kind, "path": str(path), **found}
    return Report(facts, [f"{path.name}: a {tensors.kind}", tensor_grid(found)])
