from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from plait.errors import CheckpointError
from plait.variables.checkpoint import CheckpointDir
from plait.variables.inspect import describe, plain_table

SPEC = importlib.util.spec_from_file_location("v1_writer", Path(__file__).with_name("v1_writer.py"))
v1_writer = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(v1_writer)
writer = v1_writer.base

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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = CheckpointDir(tmp_path / "run", version="9.9")
    directory.save({"variables": {"old": torch.ones(1)}}, step=1)
    directory.save(STATE, step=12)
    return tmp_path / "run"


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_directory_shows_all_and_the_newest(run: Path):
    text = describe(run)
    lines = rows(text)
    assert lines[0] == ["step", "when", "bytes", "state", "name"]
    assert [line[0] for line in lines[1:3]] == ["1", "12"]
    assert [line[3] for line in lines[1:3]] == ["valid", "valid"]
    assert "step 12, sequence 2" in text
    assert "plait 9.9" in text
    assert ["variables/bias", "float16", "[4]", "8"] in lines
    assert ["variables/tower/weight", "float32", "[3,", "2]", "24"] in lines
    assert ["total:", "2", "32"] in lines
    assert text.index("variables/bias") < text.index("variables/tower")
    assert "variables/old" not in text


def test_the_rest_is_summarised(run: Path):
    text = describe(str(run))
    lines = rows(text)
    assert "journal of ads: 2 stages done" in text
    assert ["warmup", "done", "0.25", '{"step":', "5}"] in lines
    assert ["bank", "done", "null", "null"] in lines
    assert next(line for line in lines if line[:1] == ["train"])[1] == "running"
    assert ["clicks", "2", "41"] in lines
    assert ["seed", "7"] in lines
    assert ["variables", "dict", "of", "2"] in lines
    assert "x" * 61 not in text


def test_values_are_never_shown(run: Path):
    assert "123.25" not in describe(run)
    assert "321.5" not in describe(run)


def test_a_bad_one_says_what_is_wrong_and_the_one_before_is_shown(run: Path):
    newest = CheckpointDir(run).list()[-1].path
    (newest / "state.json").write_text("{}")
    text = describe(run)
    assert "state.json has 2 bytes" in text
    assert "step 1, sequence 1" in text
    assert "variables/old" in text
    with pytest.raises(CheckpointError, match="state.json has 2 bytes"):
        describe(newest)


def test_when_none_is_valid_the_table_still_shows(run: Path):
    for info in CheckpointDir(run).list():
        (info.path / "manifest.json").unlink()
    text = describe(run)
    assert text.count("manifest.json is missing") == 2
    assert text.endswith("None of them can be read.")


def test_one_checkpoint_by_its_path(run: Path):
    text = describe(CheckpointDir(run).list()[0].path)
    assert text.startswith("ckpt-000000000001-000001: step 1")
    assert "variables/old" in text


def test_odd_states_are_shown_as_they_are(tmp_path: Path):
    directory = CheckpointDir(tmp_path)
    for state in (
        [1, 2],
        {},
        {"journal": 3, "streams": [1]},
        {"journal": {"done": ["x", [], {}], "running": 5}, "streams": {"s": 4}},
        {"journal": {"project": "p"}, "top": torch.ones(2)},
    ):
        assert "sequence" in describe(directory.save(state, step=1))
    assert "a tensor" in describe(tmp_path)


def test_what_holds_no_checkpoint_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="without checkpoints"):
        describe(tmp_path)
    with pytest.raises(CheckpointError, match="gone is not a directory"):
        describe(tmp_path / "gone")


def test_a_tensorflow_checkpoint_is_listed(tmp_path: Path):
    rows_, data = writer.bundle_rows({"net/weights": torch.full((2, 3), 123.25), "global_step": torch.tensor(7)})
    rows_[b"graph"] = writer.entry(7, (), size=5)
    path = writer.write_files(tmp_path / "model.ckpt-7", rows_, data)
    text = describe(path)
    assert text.startswith("model.ckpt-7: a TensorFlow checkpoint\n")
    assert ["net/weights", "float32", "[2,", "3]", "24"] in rows(text)
    assert ["global_step", "int64", "[]", "8"] in rows(text)
    assert ["graph", "string", "[]", "5"] in rows(text)
    assert ["total:", "3", "37"] in rows(text)
    assert "123.25" not in text
    assert "net/weights" in describe(tmp_path)
    CheckpointDir(tmp_path).save(STATE, step=3)
    assert "net/weights" not in describe(tmp_path)


def test_a_tensorflow_checkpoint_of_the_older_kind_is_listed(tmp_path: Path):
    tensors = {"net/weights": torch.full((2, 3), 123.25), "global_step": torch.tensor(7)}
    path = v1_writer.write_v1(tmp_path / "net.ckpt", tensors)
    for text in (describe(path), describe(tmp_path)):
        assert ": a TensorFlow checkpoint\n" in text
        assert ["net/weights", "float32", "[2,", "3]", "24"] in rows(text)
        assert ["total:", "2", "32"] in rows(text)
        assert "123.25" not in text


def test_a_table_is_plain_and_whole():
    long = "n" * 300
    text = plain_table(["a", "b"], [[long, "\x1b[31m:smile:[b]"], ["x", "y"]])
    assert long in text
    assert "\\x1b[31m:smile:[b]" in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
