"""A run that is killed while it exports is started again, and exports; no version is ever half there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_export_program.py")


def killed(folder, moments):
    command = [sys.executable, PROGRAM, folder, *moments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == moments


def test_killed_while_it_exports(tmp_path):
    killed(tmp_path, ["after a file", "after it has its name"])


@pytest.mark.slow
def test_killed_at_other_moments(tmp_path):
    killed(tmp_path, ["before a file", "while it is compared", "before it has its name"])
