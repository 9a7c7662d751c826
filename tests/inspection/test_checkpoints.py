from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from plait.errors import CheckpointError
from plait.inspection.checkpoints import checkpoint_report, directory_report, newest
from plait.variables.checkpoint import CheckpointDir

SPEC = importlib.util.spec_from_file_location("writing", Path(__file__).with_name("writing.py"))
writing = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(writing)


@pytest.fixture
def run(tmp_path):
    directory = CheckpointDir(tmp_path / "run", version="9.9")
    directory.save({"variables": {"old": torch.ones(1)}}, step=1)
    directory.save(writing.STATE, step=12)
    return tmp_path / "run"


def test_a_directory_shows_all_and_the_newest(run):
    report = directory_report(run, stats=False)
    text = writing.text_of(report)
    rows = writing.rows_of(text)
    assert rows[0] == ["step", "when", "bytes", "state", "name"]
    assert [(row[0], row[3]) for row in rows[1:3]] == [("1", "valid"), ("12", "valid")]
    assert "step 12, sequence 2" in text
    assert "plait 9.9" in text
    assert ["variables/bias", "float16", "[4]", "8"] in rows
    assert ["variables/tower/weight", "float32", "[3,", "2]", "24"] in rows
    assert ["total:", "2", "10", "numbers", "32"] in rows
    assert "variables/old" not in text
    assert [one["step"] for one in report.facts["checkpoints"]] == [1, 12]
    assert report.facts["newest"]["total"] == {"tensors": 2, "numbers": 10, "bytes": 32}


def test_the_rest_is_summarised_and_values_are_not_shown(run):
    text = writing.text_of(directory_report(run, stats=False))
    rows = writing.rows_of(text)
    assert "journal of ads: 2 stages done" in text
    assert ["warmup", "done", "0.25", '{"step":', "5}"] in rows
    assert next(row for row in rows if row[:1] == ["train"])[1] == "running"
    assert ["clicks", "2", "41"] in rows
    assert ["variables", "dict", "of", "2"] in rows
    assert "x" * 61 not in text
    assert "123.2" not in text
    assert "321.5" not in text


def test_statistics_on_request(run):
    report = checkpoint_report(newest(run), stats=True)
    rows = writing.rows_of(writing.text_of(report))
    told = ["variables/bias", "float16", "[4]", "8", "321.5", "0", "321.5", "321.5", "0.0%", "0", "0"]
    assert told in rows
    assert report.facts["tensors"][1]["statistics"]["mean"] == 123.25


def test_a_bad_one_says_what_is_wrong_and_the_one_before_is_shown(run):
    bad = CheckpointDir(run).list()[-1].path
    (bad / "state.json").write_text("{}")
    text = writing.text_of(directory_report(run, stats=False))
    assert "state.json has 2 bytes" in text
    assert "step 1, sequence 1" in text
    assert newest(run).name == "ckpt-000000000001-000001"
    with pytest.raises(CheckpointError, match="state.json has 2 bytes"):
        checkpoint_report(bad, stats=False)


def test_when_none_is_valid_the_table_still_shows(run):
    for info in CheckpointDir(run).list():
        (info.path / "manifest.json").unlink()
    report = directory_report(run, stats=False)
    text = writing.text_of(report)
    assert text.count("manifest.json is missing") == 2
    assert text.endswith("None of them can be read.")
    assert report.facts["newest"] is None
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        newest(run)


@pytest.mark.parametrize(
    "state",
    [
        [1, 2],
        {},
        {"journal": 3, "streams": [1]},
        {"journal": {"done": ["x", [], {}], "running": 5}, "streams": {"s": 4}},
        {"journal": {"project": "p"}, "top": torch.ones(2)},
    ],
)
def test_odd_states_are_shown_as_they_are(tmp_path, state):
    text = writing.text_of(checkpoint_report(CheckpointDir(tmp_path).save(state, step=1), stats=True))
    assert "step 1, sequence 1" in text
    assert ("stages done" in text) == (isinstance(state, dict) and isinstance(state.get("journal"), dict))


def test_of_many_stages_the_last_are_listed(tmp_path):
    state = {"journal": {"project": "p", "done": [[f"stage{number}", 1, 2] for number in range(20)]}}
    text = writing.text_of(checkpoint_report(CheckpointDir(tmp_path).save(state, step=1), stats=False))
    assert ["(8", "before)", "done"] in writing.rows_of(text)
    assert "stage8" in text
    assert "stage7" not in text
