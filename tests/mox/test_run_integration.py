"""Exact resume: a `mox.run` that was killed again and again ends with the bits of one that never was."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("run_program.py")
INSIDE = ("step", "update", "evaluation", "write")
SYNCS = 6  # a checkpoint syncs its three files, itself and the directory; one more skips into the next checkpoint
DEADLINE = 120.0


@contextlib.contextmanager
def started(log_dir: Path | None, out: Path, kill_at: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process of the program, which is ended with the block; what it says goes to `log.txt`."""
    command = [sys.executable, str(PROGRAM), str(log_dir or "-"), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PLAIT_KILL_AT": kill_at}
    with out.with_name("log.txt").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait(DEADLINE)


def finish(log_dir: Path | None, out: Path) -> dict[str, Any]:
    with started(log_dir, out) as process:
        assert process.wait(DEADLINE) == 0, said(out)
    return json.loads(out.read_text())


def said(out: Path) -> str:
    return out.with_name("log.txt").read_text(errors="replace")[-4000:]


def saved_step(log_dir: Path) -> int:
    """The global step of the newest checkpoint; -1 before the first."""
    found = [re.fullmatch(r"ckpt-(\d+)-\d+", path.name) for path in log_dir.glob("ckpt-*")]
    return max((int(hit[1]) for hit in found if hit), default=-1)


def kill(log_dir: Path, out: Path, moment: str, step: int, draws: random.Random) -> None:
    """Start the training and see it killed: from inside at a named moment, or from outside at any."""
    if moment != "outside":
        skip = draws.randrange(SYNCS) if moment == "write" else draws.randrange(3)
        with started(log_dir, out, f"{moment}:{step}:{skip}") as process:
            assert process.wait(DEADLINE) == -signal.SIGKILL, f"not killed in {moment!r} from {step} on:\n{said(out)}"
        return
    with started(log_dir, out) as process:
        deadline = time.monotonic() + DEADLINE
        while saved_step(log_dir) < step and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draws.uniform(0.0, 0.05))
        assert process.poll() is None, f"it ended before it was killed, at {step}:\n{said(out)}"


def check_resume(moments: list[str], folder: Path, seed: int) -> None:
    expected = finish(None, folder / "expected.json")
    draws = random.Random(seed)
    assert expected["global_step"] < 5000, "no early stop"
    for number, moment in enumerate(moments):
        # A fifth of the training is left for the last: so it cannot end before the kill comes.
        step = number * expected["global_step"] * 4 // (5 * len(moments))
        kill(folder / "log", folder / "out.json", moment, step, draws)
    found = finish(folder / "log", folder / "out.json")
    for part, value in expected.items():
        assert found[part] == value, f"{part} differs after kills in {moments}"


def test_three_kills(tmp_path):
    check_resume(["outside", "write", "evaluation"], tmp_path, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_twenty_kills(tmp_path, seed):
    moments = [("outside", *INSIDE)[number % 5] for number in range(20)]
    random.Random(seed).shuffle(moments)
    check_resume(moments, tmp_path, seed)


def test_the_same_command_after_the_end_changes_nothing_and_says_so(tmp_path):
    first = finish(tmp_path / "log", tmp_path / "out.json")
    again = finish(tmp_path / "log", tmp_path / "out.json")
    assert again == first
    assert "has ended, at step" in said(tmp_path / "out.json")
