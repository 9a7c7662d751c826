"""What is inside a checkpoint, in words and tables. Never a tensor's values."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.errors import CheckpointError
from plait.variables.checkpoint import CheckpointDir, CheckpointInfo, Manifest, is_checkpoint, load_parts, verify
from plait.variables.tf_bundle import TensorInfo, is_bundle, list_bundle
from plait.variables.tf_v1 import is_v1, list_v1
from plait.variables.tree import MARKER

__all__ = ["describe", "plain_table"]

_SHORT = 60
_STAGES = 12
"""How many of the last stages are listed."""


def describe(path: str | os.PathLike[str]) -> str:
    """What `plait inspect DIR` prints: all checkpoints in a table and the newest valid one, or the one given.

    Of a TensorFlow checkpoint, its names, types and shapes as TensorFlow has them.
    """
    target = Path(path)
    if is_checkpoint(target):
        return _describe_one(target)
    infos = CheckpointDir(target).list() if target.is_dir() else []
    if not infos and is_v1(target):
        return _describe_tensorflow(target, list_v1(target))
    if not infos and is_bundle(target):
        return _describe_tensorflow(target, list_bundle(target))
    if not infos:
        what = "a directory without checkpoints" if target.is_dir() else "not a directory"
        raise CheckpointError(
            f"{target} is {what}; name a directory of ckpt-* directories, one of them, or a TensorFlow checkpoint"
        )
    return _describe_all(infos)


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without colours or frames, as wide as it needs to be."""
    from rich.console import Console  # noqa: PLC0415  only where something is shown
    from rich.table import Table  # noqa: PLC0415  same

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_printable(cell) for cell in row))
    text = io.StringIO()
    console = Console(file=text, width=100_000, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _printable(text: str) -> str:
    """Names come out of files: none may move the reader's cursor."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _describe_all(infos: list[CheckpointInfo]) -> str:
    rows, valid = [], None
    for info in infos:
        try:
            created, verdict = verify(info.path).created, "valid"
            valid = info.path
        except CheckpointError as error:
            created, verdict = "-", str(error).removeprefix(f"checkpoint {info.path}: ")
        rows.append([str(info.step), created, f"{_size_on_disk(info.path):,}", verdict, info.path.name])
    table = plain_table(["step", "when", "bytes", "state", "name"], rows)
    return f"{table}\n\n{_describe_one(valid) if valid else 'None of them can be read.'}"


def _size_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*") if file.is_file())


def _describe_one(path: Path) -> str:
    manifest, state, tensors = load_parts(path)
    parts = [_headline(path, manifest), _tensor_table(tensors), _summary(state)]
    if isinstance(state, dict):
        parts += [_journal(state.get("journal")), _streams(state.get("streams"))]
    return "\n\n".join(part for part in parts if part)


def _headline(path: Path, manifest: Manifest) -> str:
    saved = f"saved {manifest.created} by plait {manifest.plait}"
    return _printable(f"{path.name}: step {manifest.step}, sequence {manifest.sequence}, {saved}")


def _describe_tensorflow(path: Path, entries: Mapping[str, TensorInfo]) -> str:
    rows = [(name, entry.dtype, list(entry.shape), entry.nbytes) for name, entry in entries.items()]
    return f"{_printable(path.name)}: a TensorFlow checkpoint\n\n{_table_of_tensors(rows)}"


def _tensor_table(tensors: dict[str, Tensor]) -> str:
    return _table_of_tensors(
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    )


def _table_of_tensors(found: Iterable[tuple[str, str, list[int], int]]) -> str:
    ordered = sorted(found)
    rows = [[name, dtype, str(shape), f"{nbytes:,}"] for name, dtype, shape, nbytes in ordered]
    total = f"{sum(nbytes for *_, nbytes in ordered):,}"
    return plain_table(["tensor", "dtype", "shape", "bytes"], [*rows, [f"total: {len(rows)}", "", "", total]])


def _summary(state: Any) -> str:
    if not isinstance(state, dict):
        return f"state: {_short(state)}"
    return plain_table(["state", "holds"], [[key, _short(value)] for key, value in state.items()])


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "a tensor" if MARKER in value else f"dict of {len(value)}"
    if isinstance(value, list):
        return f"list of {len(value)}"
    return _cut(value)


def _cut(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHORT else text[: _SHORT - 3] + "..."


def _journal(journal: Any) -> str:
    """The stages, done and running; nothing if this is not a journal."""
    if not isinstance(journal, dict):
        return ""
    done = journal.get("done")
    rows = [_stage_row(stage) for stage in done[-_STAGES:]] if isinstance(done, list) else []
    if isinstance(done, list) and done[_STAGES:]:
        rows.insert(0, [f"({len(done) - _STAGES} before)", "done", "", ""])
    running = journal.get("running")
    if isinstance(running, dict):
        rows.append([str(running.get("name")), "running", "", _cut(running.get("state"))])
    title = _printable(f"journal of {journal.get('project')}: {len(done) if isinstance(done, list) else 0} stages done")
    return f"{title}\n{plain_table(['stage', 'is', 'result', 'state'], rows)}" if rows else title


def _stage_row(stage: Any) -> list[str]:
    """One [name, result, state] of the journal's "done"."""
    name, result, state = [*stage, None, None, None][:3] if isinstance(stage, list) else (stage, None, None)
    return [str(name), "done", _cut(result), _cut(state)]


def _streams(streams: Any) -> str:
    if not isinstance(streams, dict) or not streams:
        return ""
    rows = []
    for name, at in streams.items():
        known = at if isinstance(at, dict) else {}
        rows.append([name, _cut(known.get("epoch")), _cut(known.get("position"))])
    return plain_table(["stream", "epoch", "position"], rows)
