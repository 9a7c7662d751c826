from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plait.errors import CheckpointError
from plait.inspection.looking import inspect
from plait.variables.checkpoint import CheckpointDir

SPEC = importlib.util.spec_from_file_location("writing", Path(__file__).with_name("writing.py"))
writing = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(writing)


def test_safetensors_by_name_and_by_content(tmp_path):
    for name in ("a.safetensors", "weights.bin"):
        save_file({"w": torch.full((2, 3), 123.25)}, tmp_path / name)
        report = inspect(tmp_path / name)
        assert report.facts["kind"] == "safetensors file"
        assert writing.text_of(report).startswith(f"{name}: a safetensors file\n")
        assert "123.25" not in writing.text_of(report)


def test_tensorflow_of_both_kinds(tmp_path):
    tensors = {"net/weights": torch.full((2, 3), 123.25), "global_step": torch.tensor(7)}
    rows, data = writing.bundle_writer.bundle_rows(tensors)
    rows[b"graph"] = writing.bundle_writer.entry(7, (), size=5)
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    new = writing.bundle_writer.write_files(tmp_path / "new" / "model.ckpt-7", rows, data)
    old = writing.v1_writer.write_v1(tmp_path / "old" / "net.ckpt", tensors)
    for path in (new, old, old.parent, new.parent):
        report = inspect(path, stats=True)
        text = writing.text_of(report)
        assert text.startswith(f"{path.name}: a TensorFlow checkpoint\n")
        found = {one["name"]: one for one in report.facts["tensors"]}
        assert found["net/weights"]["shape"] == [2, 3]
        assert found["net/weights"]["statistics"]["mean"] == 123.25
        if "graph" in found:
            assert found["graph"]["dtype"] == "string"
            assert found["graph"]["statistics"] is None


def test_plaits_own_checkpoints_come_first(tmp_path):
    writing.v1_writer.write_v1(tmp_path / "net.ckpt", {"theirs": torch.ones(1)})
    saved = CheckpointDir(tmp_path).save({"variables": {"ours": torch.ones(1)}}, step=1)
    assert inspect(tmp_path).facts["kind"] == "directory of checkpoints"
    assert inspect(saved).facts["kind"] == "plait checkpoint"


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("a.txt", b"nothing of the kind", "a kind that cannot be looked into"),
        ("empty", b"", "is empty"),
        ("model.onnx", b"\x08\x07", "name the export's directory"),
        ("weights.pt", b"PK\x03\x04 and more", "what torch.save wrote"),
        ("zipped", b"\x1f\x8b\x08\x00 not really", "cannot be looked into"),
    ],
)
def test_what_is_none_of_these(tmp_path, name, data, what):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=what) as caught:
        inspect(tmp_path / name)
    assert "or a TFRecord file" in str(caught.value)


def test_directories_of_nothing_and_paths_to_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="a directory without checkpoints"):
        inspect(tmp_path)
    with pytest.raises(CheckpointError, match="gone is not a directory"):
        inspect(tmp_path / "gone")
