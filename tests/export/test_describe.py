"""`model.json` says the truth about the files beside it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import plait
from plait.errors import ConfigError, DataError
from plait.export.describe import check_facts, check_labels, form, read_about, read_labels, write_about

BODY = {"formats": ["torch"], "inputs": [form("x", torch.float32, [None, 2])], "outputs": [], "labels": None}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "assets").mkdir()
    (tmp_path / "model.pt2").write_bytes(b"weights")
    (tmp_path / "assets" / "words").write_bytes(b"a b")
    write_about(tmp_path, BODY)
    return tmp_path


def changed(folder, **changes):
    body = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**body, **changes}))


PARTY = {"role": "leader", "pair": "p", "key": "id", "receives": {}, "sends": []}


def test_what_is_written_is_read(folder):
    about = read_about(folder)
    assert about.items() >= BODY.items()
    assert about["format"] == 1
    assert about["plait"] == plait.__version__
    assert about["torch"] == torch.__version__
    assert about["files"].keys() == {"model.pt2", "assets/words"}
    assert about["inputs"][0] == {"name": "x", "dtype": "float32", "shape": [None, 2]}
    assert read_labels(folder, about) is None


def test_a_file_that_changed(folder):
    (folder / "model.pt2").write_bytes(b"w3ights")
    with pytest.raises(DataError, match=r"model.pt2 is not the file that was exported"):
        read_about(folder)
    read_about(folder, digests=False)


def test_a_file_that_is_gone(folder):
    (folder / "assets" / "words").unlink()
    with pytest.raises(DataError, match="lacks assets/words"):
        read_about(folder, digests=False)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b"])
def test_a_file_outside(folder, name):
    changed(folder, files={name: "0"})
    with pytest.raises(DataError, match="outside"):
        read_about(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "has format 2"),
        ({"inputs": None}, "no 'inputs'"),
        ({"files": []}, "no 'files'"),
        ({"outputs": ["y"]}, "without name, dtype and shape"),
        ({"outputs": [{"name": "y", "dtype": "float32", "shape": "ab"}]}, "without name, dtype and shape"),
        ({"outputs": [{"name": "y", "dtype": "float32", "shape": [-5]}]}, "without name, dtype and shape"),
        ({"inputs": [{"name": ["x"], "dtype": "float32", "shape": [2]}]}, "without name, dtype and shape"),
        ({"formats": [{}]}, "no texts"),
        ({"files": {"model.pt2": None}}, "no texts"),
        ({"labels": "../secret"}, "in another file"),
        ({"party": 5}, "has a 'party'"),
        ({"party": {"role": "leader", "key": "id", "receives": {}, "sends": []}}, "has a 'party'"),
        ({"party": {**PARTY, "receives": {"nothing": "x"}}}, "has a 'party'"),
        ({"party": {**PARTY, "sends": ["nothing"]}}, "has a 'party'"),
        ({"party": {**PARTY, "sends": [[]]}}, "has a 'party'"),
    ],
)
def test_another_format(folder, changes, words):
    changed(folder, **changes)
    with pytest.raises(DataError, match=words):
        read_about(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff", "[" * 100_000])
def test_no_json(tmp_path, text):
    (tmp_path / "model.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError):
        read_about(tmp_path)


def test_no_directory(tmp_path):
    with pytest.raises(DataError, match="is no export"):
        read_about(tmp_path / "missing")


def test_facts_are_plain():
    given = {
        "step": np.int64(7),
        "metrics": {"accuracy": torch.tensor(0.5), "loss": float("nan")},
        "preprocess": {"mean": [1.5, (2,)]},
    }
    assert check_facts(given) == {
        "step": 7,
        "metrics": {"accuracy": 0.5, "loss": None},
        "epsilon": None,
        "party": None,
        "preprocess": {"mean": [1.5, [2]]},
    }
    assert check_facts(None) == {"step": None, "metrics": {}, "epsilon": None, "party": None, "preprocess": None}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"steps": 1}, "facts has 'steps'"),
        ({"metrics": 0.5}, "write a dict of name: number"),
        ({"metrics": {"a": object()}}, "metrics.a is a object"),
        ({"metrics": {"a": torch.ones(2)}}, "metrics.a is a Tensor"),
    ],
)
def test_facts_that_cannot_be(facts, words):
    with pytest.raises(ConfigError, match=words):
        check_facts(facts)


def test_labels():
    assert check_labels(("cat", "a dog")) == ["cat", "a dog"]
    assert check_labels(np.array(["a", "b"])) == ["a", "b"]
    assert check_labels(name for name in "ab") == ["a", "b"]
    assert check_labels(None) is None


@pytest.mark.parametrize("labels", [[], "cat", ["cat", ""], ["a\nb"], ["a\n"], [1], ["a\u2028b"], ["\ud800"]])
def test_labels_that_cannot_be(labels):
    with pytest.raises(ConfigError, match="each a text of one line"):
        check_labels(labels)
