from __future__ import annotations

import logging
import sys

import pytest
import torch

from plait.demo import agreed, show
from plait.errors import ConfigError
from plait.variables.checkpoint import CheckpointDir


def save(output, *, passes=2, project=agreed.PROJECT, parties=show.PARTIES):
    """Checkpoints as of a run that has come so far, its logs and its picture, and something of the user's own."""
    for party in parties:
        directory = CheckpointDir(output / party)
        for done in range(passes + 1):
            directory.save({"journal": {"project": project}, "history": [{}] * done}, step=45 * done)
        log = output / "logs" / f"{party}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("on the wire: 0.4 MB sent, 0.5 MB received\non the wire: 0.8 MB sent, 1.0 MB received\n")
    (output / "curve.png").write_bytes(b"png")
    (output / "leader" / "notes.txt").write_text("mine")


def files(output):
    return {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}


def test_a_finished_run_is_removed_and_nothing_else(tmp_path):
    save(tmp_path)
    (tmp_path / "logs" / "other.log").write_text("mine")
    show.remove_finished_run(tmp_path, 2)
    assert files(tmp_path) == {"leader/notes.txt", "logs/other.log"}


@pytest.mark.parametrize("parties", [show.PARTIES, ("leader",)], ids=["cut off", "of one party"])
def test_a_run_that_has_not_ended_in_both_parties_stays(tmp_path, parties):
    save(tmp_path, passes=2 if len(parties) == 1 else 1, parties=parties)
    before = files(tmp_path)
    show.remove_finished_run(tmp_path, 2)
    assert files(tmp_path) == before


def test_where_nothing_is_there_is_nothing_to_remove(tmp_path):
    show.remove_finished_run(tmp_path / "new", 2)
    assert not (tmp_path / "new").exists()


def test_checkpoints_of_somebody_else_are_left_alone(tmp_path):
    save(tmp_path, project="mine")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="project 'mine'.*--output DIR"):
        show.run(tmp_path)
    assert files(tmp_path) == before


def test_an_end_of_a_party_is_the_end_of_the_demo_with_its_exit_code(tmp_path, monkeypatch):
    called = {}

    def federate(*scripts, **settings):
        called.update(settings, scripts=[script.name for script in scripts])
        return 130

    monkeypatch.setattr(show, "federate", federate)
    with pytest.raises(SystemExit) as ended:
        show.run(tmp_path, passes=7)
    assert ended.value.code == 130
    assert called == {
        "scripts": ["leader.py", "follower.py"],
        "args": [str(tmp_path), "7"],
        "log_dir": tmp_path / "logs",
    }


def test_difference():
    one = {"a": torch.zeros(2), "b": torch.ones(3)}
    assert show.difference(one, {name: value.clone() for name, value in one.items()}) == 0.0
    assert show.difference(one, {"a": torch.tensor([0.0, 0.5]), "b": torch.ones(3)}) == 0.5
    nan = {"a": torch.full((2,), torch.nan), "b": torch.ones(3)}
    assert show.difference(one, nan) != 0.0


def test_summary(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])
    save(tmp_path)
    accuracies = {"two parties": 0.98, "centralised": 0.975, "leader alone": 0.9}
    lines = show.summary(accuracies, 0.0, tmp_path, drawn=True).splitlines()
    assert lines == [
        "",
        "test accuracy",
        "  two parties     0.9800  left halves and labels at one, right halves at the other",
        "  centralised     0.9750  all of it in one place: the same weights, to the last bit",
        "  leader alone    0.9000  left halves only",
        "on the wire       0.8 MB sent, 1.0 MB received, at the leader",
        f"curve             {tmp_path / 'curve.png'}",
        f"checkpoints       {tmp_path / 'leader'}, {tmp_path / 'follower'}",
        f"look inside with  plait inspect {tmp_path / 'leader'}",
    ]


def test_the_summary_says_only_what_is_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "plait")])
    said = show.summary({"centralised": 0.98}, 3e-8, tmp_path, drawn=False)
    assert "weights that differ by at most 3e-08" in said
    assert "curve" not in said
    assert "on the wire" not in said
    assert said.endswith(f"{tmp_path / 'bin' / 'plait'} inspect {tmp_path / 'leader'}")


def test_quiet_puts_the_log_back():
    log = logging.getLogger("plait")
    log.setLevel(logging.DEBUG)
    with show._quiet():
        assert not log.isEnabledFor(logging.INFO)
    assert log.level == logging.DEBUG
