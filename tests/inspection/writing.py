"""Things to look into, for the tests."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import torch
from torch import nn

from plait.inspection.reports import _text

_SPEC = importlib.util.spec_from_file_location("v1_writer", Path(__file__).parents[1] / "variables" / "v1_writer.py")
v1_writer = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(v1_writer)
bundle_writer = v1_writer.base

STATE = {
    "variables": {"tower/weight": torch.full((3, 2), 123.25), "bias": torch.full((4,), 321.5, dtype=torch.float16)},
    "journal": {
        "project": "ads",
        "done": [["warmup", 0.25, {"step": 5}], ["bank", None, None]],
        "running": {"name": "train", "state": {"step": 7, "finish": False}},
    },
    "streams": {"clicks": {"epoch": 2, "position": 41}},
    "note": "x" * 500,
    "seed": 7,
}


def write_export(folder: Path, module: nn.Module, example: torch.Tensor, **facts) -> Path:
    """A version as the exporter lays it out."""
    folder.mkdir(parents=True)
    program = torch.export.export(module.eval(), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, folder / "model.pt2")
    write_about(folder, **facts)
    return folder


def write_about(folder: Path, **facts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    about = {
        "format": 1,
        "plait": "9.9",
        "torch": "2.99",
        "created": "2026-01-02T03:04:05+00:00",
        "formats": ["torch"],
        "inputs": [{"name": "x", "dtype": "float32", "shape": [None, 2]}],
        "outputs": [{"name": "logits", "dtype": "float32", "shape": [None, 3]}],
        "step": 12,
        "metrics": {"accuracy": 0.5},
        "epsilon": None,
        "labels": None,
        "preprocess": None,
        "checked": {},
        "files": files,
        **facts,
    }
    (folder / "model.json").write_text(json.dumps(about))


def text_of(report) -> str:
    """As it is printed into a pipe."""
    return "\n\n".join(_text(part) for part in report.parts)


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]
