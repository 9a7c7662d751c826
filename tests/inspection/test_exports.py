from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from plait.errors import CheckpointError
from plait.inspection.exports import export_report, exports_report, newest_export, open_export, versions
from plait.inspection.looking import inspect

SPEC = importlib.util.spec_from_file_location("writing", Path(__file__).with_name("writing.py"))
writing = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(writing)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    folder = writing.write_export(tmp_path_factory.mktemp("net") / "3", module, torch.ones(2, 2))
    return folder, module


def test_one_version_is_described(exported):
    report = export_report(exported[0], stats=True)
    text = writing.text_of(report)
    rows = writing.rows_of(text)
    assert text.startswith(f"{exported[0].parent.name}/3: an export, step 12, torch, made 2026-01-02")
    assert ["input", "x", "float32", "[any,", "2]"] in rows
    assert ["output", "logits", "float32", "[any,", "3]"] in rows
    assert ["metrics", '{"accuracy":', "0.5}"] in rows
    assert next(row for row in rows if row[:1] == ["model.pt2"])[2] == "valid"
    assert next(row for row in rows if row[:1] == ["0.weight"])[:5] == ["0.weight", "float32", "[3,", "2]", "24"]
    assert ["total:", "7", "22", "numbers", "92"] in rows
    json.dumps(report.facts)


def test_weights_are_those_of_the_module(exported):
    folder, module = exported
    tensors = open_export(folder)
    state = module.state_dict()
    assert set(tensors.entries) == set(state)
    for name, tensor in tensors.each(tensors.entries):
        assert torch.equal(tensor, state[name])
        assert tensor.dtype == state[name].dtype
    assert inspect(folder.parent, folder).facts["same"] is True


def test_the_module_that_the_exporter_puts_around_is_left_out(tmp_path):
    outer = nn.Module()
    outer.module = nn.Linear(2, 3)
    outer.forward = outer.module.forward
    tensors = open_export(writing.write_export(tmp_path / "1", outer, torch.ones(2, 2)))
    assert list(tensors.entries) == ["bias", "weight"]
    assert torch.equal(tensors.read(["weight"])["weight"], outer.module.weight)


def test_a_file_that_was_altered_or_lost_is_told(tmp_path):
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "labels.txt").write_text("cat\ndog\n")
    writing.write_about(folder, formats=["onnx"], labels="labels.txt")
    assert {one["state"] for one in export_report(folder, stats=False).facts["files"]} == {"valid"}
    (folder / "model.onnx").write_bytes(b"grabh")
    (folder / "labels.txt").unlink()
    states = {one["name"]: one["state"] for one in export_report(folder, stats=False).facts["files"]}
    assert states == {"labels.txt": "is missing", "model.onnx": "was altered"}


def test_a_file_outside_is_not_looked_at(tmp_path):
    (tmp_path / "secret").write_text("x")
    writing.write_about(tmp_path / "1", files={"../secret": "0"})
    assert "outside" in export_report(tmp_path / "1", stats=False).facts["files"][0]["state"]


def test_numbers_are_in_order_and_the_highest_is_shown(tmp_path):
    for name in ("10", "9", "best", "011", "1" * 19, ".11.abc.partial"):
        writing.write_about(tmp_path / name, step=None)
    (tmp_path / "12").mkdir()
    assert [path.name for path in versions(tmp_path)] == ["011", "1" * 19, "best", "9", "10"]
    assert newest_export(tmp_path).name == "10"
    report = exports_report(tmp_path, stats=False)
    assert [one["version"] for one in report.facts["versions"]][-3:] == ["best", "9", "10"]
    assert report.facts["newest"]["path"].endswith("10")
    assert "/10: an export, torch, made" in writing.text_of(report)


@pytest.mark.parametrize(
    ("text", "message"), [("[]", "its format is"), ('{"format": 7}', "its format is 7"), ("{", "JSONDecodeError")]
)
def test_what_is_no_description_is_an_error(tmp_path, text, message):
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        export_report(tmp_path, stats=False)


@pytest.mark.parametrize("facts", [{"inputs": [{}]}, {"files": [1]}, {"outputs": 5}])
def test_a_description_that_makes_no_sense_is_an_error(tmp_path, facts):
    writing.write_about(tmp_path / "1", **facts)
    with pytest.raises(CheckpointError, match="model.json"):
        export_report(tmp_path / "1", stats=False)


def test_an_archive_that_is_none_is_an_error(tmp_path):
    (tmp_path / "model.pt2").write_bytes(b"PK no")
    writing.write_about(tmp_path)
    with pytest.raises(CheckpointError, match="model.pt2 cannot be read"):
        export_report(tmp_path, stats=False)


def test_without_torchs_format_there_is_nothing_to_compare(tmp_path):
    writing.write_about(tmp_path / "1", formats=["onnx"])
    with pytest.raises(CheckpointError, match="has no model.pt2"):
        inspect(tmp_path / "1", tmp_path / "1")
