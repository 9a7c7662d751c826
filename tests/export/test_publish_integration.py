"""A SIGKILL at any moment leaves no version that is not whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_program.py")


def killed(folder, rounds):
    done = subprocess.run(
        [sys.executable, PROGRAM, folder, str(rounds)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return map(int, done.stdout.split())


def test_exports_that_are_killed(tmp_path):
    whole, left = killed(tmp_path, 25)
    assert whole >= 2
    assert left >= 5, "too few were killed while they wrote: the test tests nothing"


@pytest.mark.slow
def test_many_exports_that_are_killed(tmp_path):
    whole, left = killed(tmp_path, 400)
    assert whole >= 5  # a busy machine ends fewer of them before they are killed
    assert left >= 100
