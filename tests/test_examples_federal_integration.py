"""The examples of two parties run as they stand, over mutual TLS."""

from __future__ import annotations

import io
import os
import random
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.relative_to(EXAMPLES).as_posix() for path in (EXAMPLES / "federal").rglob("*.py"))


def numbers(text):
    return [float(found) for found in re.findall(r"\d+\.\d+", text)]


def test_every_example_is_tested():
    text = Path(__file__).read_text()
    assert SCRIPTS
    assert [name for name in SCRIPTS if text.count(f'"{name}"') == 0] == []


@pytest.fixture
def federate(tmp_path):
    """Run an example's two parties and return what they printed."""

    def run_both(leader, follower, *arguments):
        scripts = [str(EXAMPLES / leader), str(EXAMPLES / follower)]
        command = [
            str(Path(sys.executable).with_name("plait")),
            "federate",
            "--restarts",
            "0",
            *scripts,
            "--",
            *arguments,
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return "\n".join(line for line in done.stdout.splitlines() if "INFO:plait:" not in line)

    return run_both


@pytest.mark.slow
def test_halves(federate):
    out = federate("federal/halves/leader.py", "federal/halves/follower.py")  # and "federal/halves/common.py"
    assert numbers(out)[-1] > 0.94


@pytest.mark.slow
def test_hierarchical(federate):
    # and "federal/hierarchical/common.py"
    out = federate("federal/hierarchical/leader.py", "federal/hierarchical/follower.py")
    found = {task: float(value) for task, value in re.findall(r"(digit|even): accuracy (\d\.\d+)", out)}
    assert set(found) == {"digit", "even"}
    assert min(found.values()) > 0.94


@pytest.mark.slow
def test_local_task(federate):
    # and "federal/local_task/common.py"
    scripts = "federal/local_task/leader.py", "federal/local_task/follower.py"
    together, without = (numbers(federate(*scripts, *arguments))[-1] for arguments in ([], ["--without"]))
    assert together > without
    assert together > 0.94


def census_archive(member, rows):
    """An archive like the real one, of rows that were thrown with dice."""
    dice = random.Random(0)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as package:
        for part, count in rows.items():
            lines = []
            for _ in range(count):
                row = [str(dice.randrange(5)) for _ in range(41)]
                row.append("50000+." if int(row[0]) + int(row[39]) + dice.randrange(3) > 6 else "- 50000.")
                lines.append(", ".join(row))
            text = "\n".join(lines).encode()
            info = tarfile.TarInfo(member.format(part))
            info.size = len(text)
            package.addfile(info, io.BytesIO(text))
    return data.getvalue()


@pytest.mark.slow
def test_census_is_as_good_as_centralised(federate, tmp_path):
    table = runpy.run_path(str(EXAMPLES / "federal/census/table.py"))  # and "federal/census/common.py"
    archive = census_archive(table["MEMBER"], {"train": 5000, "test": 1000})
    for party in ("leader", "follower"):
        np.savez(tmp_path / f"{party}.npz", **table["make"](party, archive))
    arguments = ["--data", str(tmp_path), "--epochs", "4"]
    script = str(EXAMPLES / "federal/census/centralised.py")
    command = [sys.executable, "-W", "error", script, *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    alone = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout
    together = federate("federal/census/leader.py", "federal/census/follower.py", *arguments)
    aucs = [re.findall(r"test auc (\d\.\d+)", out) for out in (together, alone)]
    assert len(aucs[0]) == 4
    assert aucs[0] == aucs[1]
    assert float(aucs[0][-1]) > 0.8


def test_census_refuses_another_archive(tmp_path):
    table = runpy.run_path(str(EXAMPLES / "federal/census/table.py"))
    (tmp_path / table["ARCHIVE"]).write_bytes(b"something else")
    with pytest.raises(SystemExit, match="SHA-256"):
        table["load"]("leader", str(tmp_path))
    assert not (tmp_path / "leader.npz").exists()
