"""What a checkpoint of plait's holds beside tensors: its step, the stages done, the positions in the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait.errors import CheckpointError
from plait.inspection.reports import Grid, Report, cut, progress
from plait.inspection.sources import CHECKPOINT, Tensors, from_safetensors, tensor_grid, tensors_facts
from plait.variables.checkpoint import CheckpointDir, Manifest, verify
from plait.variables.tf_table import reading
from plait.variables.tree import MARKER

__all__ = ["checkpoint_report", "directory_report", "newest", "open_checkpoint"]

_STAGES = 12
"""How many of the last stages are listed."""


def open_checkpoint(path: Path) -> tuple[Manifest, Tensors]:
    """A checkpoint that is whole; its tensors are still on disk."""
    with progress(f"checking {path.name}"):
        manifest = verify(path)
    found = from_safetensors(path / "tensors.safetensors", CHECKPOINT)
    return manifest, Tensors(CHECKPOINT, path, found.entries, found.read)


def newest(directory: Path) -> Path:
    """The newest checkpoint that is whole."""
    infos = CheckpointDir(directory).list()
    for info in reversed(infos):
        try:
            verify(info.path)
        except CheckpointError:
            continue
        return info.path
    raise CheckpointError(
        f"none of the {len(infos)} checkpoints in {directory} can be read; bring one back from a copy"
    )


def directory_report(directory: Path, *, stats: bool) -> Report:
    """All checkpoints in a table, and the newest that is whole."""
    listed: list[dict[str, Any]] = []
    whole = None
    for info in CheckpointDir(directory).list():
        created, state = None, "valid"
        try:
            with progress(f"checking {info.path.name}"):
                created = verify(info.path).created
            whole = info.path
        except CheckpointError as error:
            state = str(error).removeprefix(f"checkpoint {info.path}: ")
        size = sum(file.stat().st_size for file in info.path.glob("*") if file.is_file())
        listed.append(
            {"name": info.path.name, "step": info.step, "created": created, "bytes": size, "state": state},
        )
    rows = [[str(one["step"]), one["created"] or "-", f"{one['bytes']:,}", one["state"], one["name"]] for one in listed]
    grid = Grid(("step", "when", "bytes", "state", "name"), rows, right=frozenset({"step", "bytes"}))
    facts = {"kind": "directory of checkpoints", "path": str(directory), "checkpoints": listed, "newest": None}
    if whole is None:
        return Report(facts, [grid, "None of them can be read."])
    one = checkpoint_report(whole, stats=stats)
    return Report({**facts, "newest": one.facts}, [grid, *one.parts])


def checkpoint_report(path: Path, *, stats: bool) -> Report:
    """One checkpoint: headline, tensors, and what else is in its state."""
    manifest, tensors = open_checkpoint(path)
    file = path / "state.json"
    with reading(file):
        state = json.loads(file.read_bytes())
    found = tensors_facts(tensors, stats=stats)
    facts = {
        "kind": CHECKPOINT,
        "path": str(path),
        "step": manifest.step,
        "sequence": manifest.sequence,
        "created": manifest.created,
        "plait": manifest.plait,
        **found,
        "state": {key: _short(value) for key, value in state.items()} if isinstance(state, dict) else _short(state),
    }
    saved = f"saved {manifest.created} by plait {manifest.plait}"
    headline = f"{path.name}: step {manifest.step}, sequence {manifest.sequence}, {saved}"
    parts: list[str | Grid] = [headline, tensor_grid(found), *_state_parts(state)]
    return Report(facts, parts)


def _state_parts(state: Any) -> list[str | Grid]:
    if not isinstance(state, dict):
        return [f"state: {_short(state)}"]
    parts: list[str | Grid] = []
    if state:
        parts.append(Grid(("state", "holds"), [[key, _short(value)] for key, value in state.items()]))
    return [*parts, *_journal(state.get("journal")), *_streams(state.get("streams"))]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "a tensor" if MARKER in value else f"dict of {len(value)}"
    return f"list of {len(value)}" if isinstance(value, list) else cut(value)


def _journal(journal: Any) -> list[str | Grid]:
    """The stages, done and running; nothing if this is not a journal."""
    if not isinstance(journal, dict):
        return []
    kept = journal.get("done")
    done = kept if isinstance(kept, list) else []
    rows = [_stage_row(stage) for stage in done[-_STAGES:]]
    if done[_STAGES:]:
        rows.insert(0, [f"({len(done) - _STAGES} before)", "done", "", ""])
    running = journal.get("running")
    if isinstance(running, dict):
        rows.append([str(running.get("name")), "running", "", cut(running.get("state"))])
    title = f"journal of {journal.get('project')}: {len(done)} stages done"
    return [Grid(("stage", "is", "result", "state"), rows, title)] if rows else [title]


def _stage_row(stage: Any) -> list[str]:
    """One [name, result, state] of the journal's "done"."""
    name, result, state = [*stage, None, None, None][:3] if isinstance(stage, list) else (stage, None, None)
    return [str(name), "done", cut(result), cut(state)]


def _streams(streams: Any) -> list[str | Grid]:
    if not isinstance(streams, dict) or not streams:
        return []
    rows = []
    for name, at in streams.items():
        known = at if isinstance(at, dict) else {}
        rows.append([name, cut(known.get("epoch")), cut(known.get("position"))])
    return [Grid(("stream", "epoch", "position"), rows, right=frozenset({"epoch", "position"}))]
