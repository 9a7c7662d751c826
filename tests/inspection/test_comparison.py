from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plait.errors import CheckpointError, ConfigError
from plait.inspection.comparison import comparison_report
from plait.inspection.looking import inspect
from plait.inspection.sources import from_safetensors
from plait.variables.checkpoint import CheckpointDir

SPEC = importlib.util.spec_from_file_location("writing", Path(__file__).with_name("writing.py"))
writing = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(writing)


def compare(folder, here, there):
    save_file(here, folder / "here.safetensors")
    save_file(there, folder / "there.safetensors")
    return comparison_report(*(from_safetensors(folder / f"{side}.safetensors") for side in ("here", "there")))


def test_what_differs_is_told_by_kind(tmp_path):
    ones = torch.ones
    here = {"a": torch.tensor([1.0, 2.0]), "b": ones(2), "c": ones(2, 3), "d": ones(2), "e": ones(1)}
    there = {"a": torch.tensor([1.0, 2.5]), "b": ones(2), "c": ones(3, 2), "d": ones(2).half(), "f": ones(1)}
    report = compare(tmp_path, here, there)
    found = {one["name"]: one for one in report.facts["tensors"]}
    kinds = {"a": "differs", "b": "same", "c": "other shape", "d": "other dtype", "e": "only here", "f": "only there"}
    assert {name: one["is"] for name, one in found.items()} == kinds
    assert (found["a"]["absolute"], found["a"]["relative"]) == (0.5, 0.2)
    assert (found["d"]["absolute"], found["d"]["relative"]) == (0, 0)
    assert report.facts["same"] is False
    text = writing.text_of(report)
    assert ["a", "differs", "float32", "[2]", "float32", "[2]", "0.5", "0.2"] in writing.rows_of(text)
    assert "1 of 6 tensors are the same, bit for bit; 1 only here, 1 only there, 1 other shape" in text
    json.dumps(report.facts)


def test_the_same_bit_for_bit(tmp_path):
    tensors = {"a": torch.tensor([float("nan"), -0.0, float("inf")]), "n": torch.tensor(3)}
    report = compare(tmp_path, tensors, {name: tensor.clone() for name, tensor in tensors.items()})
    assert report.facts["same"] is True
    assert writing.text_of(report).endswith("All 2 tensors are the same, bit for bit.")


def test_signs_of_zeros_are_no_difference_but_not_the_same(tmp_path):
    report = compare(tmp_path, {"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])})
    assert report.facts["tensors"][0]["is"] == "differs"
    assert report.facts["tensors"][0]["absolute"] == 0


def test_nothing_and_nothing(tmp_path):
    report = compare(tmp_path, {}, {})
    assert writing.text_of(report).endswith("Neither has a tensor.")


def test_a_checkpoint_and_a_file_are_compared_as_the_bank_loads_them(tmp_path):
    weight = torch.arange(6.0).reshape(3, 2)
    state = {"variables": {"net/weight": weight}, "optimizers": {"momentum": torch.ones(3)}}
    CheckpointDir(tmp_path / "run").save(state, step=1)
    save_file({"net.weight": weight}, tmp_path / "net.safetensors")
    report = inspect(tmp_path / "run", tmp_path / "net.safetensors")
    assert report.facts["as_variables"] is True
    assert [(one["name"], one["is"]) for one in report.facts["tensors"]] == [("net/weight", "same")]
    assert "of different kinds" in writing.text_of(report)


def test_tensorflows_layout_is_turned(tmp_path):
    kernel = torch.arange(24.0).reshape(1, 2, 3, 4)
    path = writing.v1_writer.write_v1(tmp_path / "net.ckpt", {"conv/weights": kernel, "conv/biases": torch.ones(4)})
    turned = kernel.permute(3, 2, 0, 1).contiguous()
    CheckpointDir(tmp_path / "run").save({"variables": {"conv/weights": turned, "conv/biases": torch.ones(4)}}, step=1)
    report = inspect(path, tmp_path / "run")
    assert report.facts["same"] is True
    assert report.facts["tensors"][1]["here"]["shape"] == [4, 3, 1, 2]


def test_what_cannot_be_read_is_not_called_the_same(tmp_path):
    rows, data = writing.bundle_writer.bundle_rows({"w": torch.ones(2)})
    rows[b"graph"] = writing.bundle_writer.entry(7, (), size=5)
    path = writing.bundle_writer.write_files(tmp_path / "model.ckpt-7", rows, data)
    report = inspect(path, path)
    assert report.facts["counts"] == {"not read": 1, "same": 1}
    assert report.facts["same"] is False


def test_names_that_would_be_one_are_an_error(tmp_path):
    CheckpointDir(tmp_path / "run").save({"variables": {"a": torch.ones(1)}}, step=1)
    save_file({"a.b": torch.ones(1), "a/b": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="'a/b' twice"):
        inspect(tmp_path / "run", tmp_path / "x.safetensors")


def test_statistics_are_of_one_path(tmp_path):
    with pytest.raises(ConfigError, match="--stats is of one path"):
        inspect(tmp_path, tmp_path, stats=True)
