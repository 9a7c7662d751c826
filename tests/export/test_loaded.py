"""An export is checked before it is run, and so is what it is given."""

from __future__ import annotations

import importlib.util
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from plait.errors import ConfigError, DataError
from plait.export import Loaded, export, load, versions
from plait.export.formats import FORMATS


class Two(nn.Module):
    def forward(self, x, ids):
        return {"sum": x.sum(1) + ids, "double": x * 2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    inputs = {"x": torch.zeros(2, 3), "ids": torch.zeros(2, dtype=torch.int64)}
    export(Two(), inputs, folder, formats=["torch", "onnx"], labels=["cat", "dog"], facts={"step": 5})
    return folder


X = np.arange(6, dtype=np.float32).reshape(2, 3)
IDS = np.array([10, 20])


@pytest.mark.parametrize("kind", ["torch", "onnx", None])
def test_it_runs(directory, kind, torch_settings):
    loaded = load(directory / "1", format=kind, threads=1)
    assert isinstance(loaded, Loaded)
    assert loaded.labels == ["cat", "dog"]
    assert loaded.about["step"] == 5
    found = loaded.run({"ids": IDS, "x": X})
    assert found.keys() == {"sum", "double"}
    np.testing.assert_array_equal(found["sum"], [13.0, 32.0])
    np.testing.assert_array_equal(found["double"], X * 2)


def test_arrays_of_any_layout(directory):
    still = X.copy()
    still.flags.writeable = False
    for kind in ("torch", "onnx"):
        run = load(directory / "1", format=kind).run
        for x in (still, X[::-1][::-1], np.asfortranarray(X), X.astype(np.float64), X.astype(np.int32)):
            np.testing.assert_array_equal(run({"ids": IDS.astype(np.int32), "x": x})["double"], X * 2)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"x": X}, "the inputs are x: give x, ids"),
        ({}, "the inputs are none"),
        ({"x": X, "ids": IDS, "z": X}, "the inputs are x, ids, z"),
        ({"x": X[:, :2], "ids": IDS}, "'x' has the shape 2x2: give nx3"),
        ({"x": X[0], "ids": IDS}, "'x' has the shape 3: give nx3"),
        ({"x": X[0], "ids": IDS[0]}, "'x' has the shape 3: give nx3"),
        ({"x": X, "ids": IDS * 1.5}, "'ids' is float64: give int64"),
        ({"x": X.astype(np.float64) + 1e300, "ids": IDS}, "'x' has numbers that float32 cannot hold"),
        ({"x": X, "ids": IDS.astype(np.uint64) + 2**63}, "'ids' has numbers that int64 cannot hold"),
        ({"x": np.array([["a"] * 3]), "ids": IDS}, "'x' is <U1: give float32"),
        ({"x": X, "ids": IDS[:1]}, "different numbers of rows, x has 2, ids has 1"),
        ({"x": X[:0], "ids": IDS[:0]}, "no rows"),
    ],
)
def test_inputs_that_do_not_fit(directory, inputs, words):
    with pytest.raises(DataError, match=words):
        load(directory / "1", format="onnx").run(inputs)


def test_a_file_that_changed(directory, tmp_path):
    copy = shutil.copytree(directory / "1", tmp_path / "1")
    with (copy / "model.onnx").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(DataError, match="model.onnx is not the file that was exported"):
        load(copy, format="torch")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"format": "tf"}, "no format 'tf'"), ({"threads": 0}, "threads is 0"), ({"threads": 1.5}, "threads is 1.5")],
)
def test_options_that_cannot_be(directory, options, words):
    with pytest.raises(ConfigError, match=words):
        load(directory / "1", **options)


def test_without_onnxruntime(directory, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    np.testing.assert_array_equal(load(directory / "1").run({"ids": IDS, "x": X})["sum"], [13.0, 32.0])
    with pytest.raises(ConfigError, match=r"needs onnxruntime.*pip install 'plait\[export\]'"):
        load(directory / "1", format="onnx")


def test_formats_of_a_newer_plait(directory, monkeypatch):
    for name in list(FORMATS):
        monkeypatch.delitem(FORMATS, name)
    with pytest.raises(DataError, match="only formats that this plait does not know: torch, onnx"):
        load(directory / "1")


def test_versions_are_the_whole_ones_the_newest_last(directory, tmp_path):
    for name in ("10", "9", "2", "best", "a", ".8.0.partial", "broken", "lacking"):
        shutil.copytree(directory / "1", tmp_path / name)
    (tmp_path / "broken" / "model.json").write_text("{")
    (tmp_path / "lacking" / "model.onnx").unlink()
    (tmp_path / "file").touch()
    assert versions(tmp_path) == ["a", "best", "2", "9", "10"]
    with pytest.raises(DataError, match="cannot be read"):
        versions(tmp_path / "missing")
