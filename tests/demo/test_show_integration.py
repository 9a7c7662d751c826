"""`plait demo` as people run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from plait.demo import show
from plait.variables.checkpoint import CheckpointDir

COMMAND = [sys.executable, "-W", "error", "-c", "from plait.cli import main; main()", "demo", "--output", "out"]
SECONDS = 300.0
"""More than twice what it may take on two cores that do nothing else."""
SAME = "all of it in one place: the same weights, to the last bit"


def newest(path):
    found = CheckpointDir(path).read_latest()
    assert found is not None
    return found[1]


def run(directory):
    return subprocess.run(COMMAND, cwd=directory, capture_output=True, text=True, timeout=SECONDS, check=False)


def accuracies(said):
    return {name: float(value) for name, value in re.findall(r"^  ([a-z ]+?) +(0\.\d{4})  ", said, re.MULTILINE)}


def test_the_whole_demo(tmp_path):
    """Two parties do as well as all data in one place, and better than one of them; a curve; both parties' lines."""
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = accuracies(done.stdout)
    assert list(found) == list(show.RUNS)
    assert found["two parties"] > 0.96
    assert abs(found["two parties"] - found["centralised"]) < 0.01
    assert found["leader alone"] < found["two parties"] - 0.03
    assert SAME in done.stdout
    assert re.search(r"on the wire       \d\.\d MB sent, \d\.\d MB received, at the leader", done.stdout)
    for party in show.PARTIES:
        assert re.search(rf"^{party:<8} \| INFO:plait:on the wire: ", done.stdout, re.MULTILINE)
        state = newest(tmp_path / "out" / party)
        assert (state["global_step"], len(state["history"])) == (900, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "aligned",
        "curve.png",
        "follower",
        "ids",
        "leader",
        "logs",
    ]
    assert "2,000 ids of the leader, 2,100 of the follower: 1,797 in common" in done.stdout


@pytest.mark.slow
def test_a_demo_that_was_cut_off_goes_on_and_one_that_had_ended_begins_anew(tmp_path):
    log = tmp_path / "out" / "logs" / "leader.log"
    process = subprocess.Popen(COMMAND, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + SECONDS
        while not (log.exists() and log.read_text().count("on the wire") >= 4):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(SECONDS) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "out" / "curve.png").exists()
    assert len(newest(tmp_path / "out" / "leader")["history"]) < 20
    second = run(tmp_path)
    assert re.search(r"leader   \| .*going on at global step [1-8]\d\d", second.stdout), second.stdout + second.stderr
    assert SAME in second.stdout
    third = run(tmp_path)
    assert "going on" not in third.stdout
    assert accuracies(third.stdout) == accuracies(second.stdout)
