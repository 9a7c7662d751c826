"""Scripts for processes that are launched, and a look at whether a process is still there."""

from __future__ import annotations

import io
import textwrap
import time
from pathlib import Path

import pytest

from plait.launch import run

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
kind, index = os.environ["PLAIT_ROLE"], int(os.environ["PLAIT_INDEX"])
restart = int(os.environ["PLAIT_RESTART"])
here = Path(__file__).parent
"""


@pytest.fixture
def write_script(tmp_path):
    """Write a script, which knows its `kind`, `index` and `restart`; its path."""

    def write(body, name="script.py"):
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def launch(write_script, tmp_path):
    """Launch a script of these lines; the exit code, and the lines that were shown."""

    def launched(body, *arguments, **options):
        out = io.StringIO()
        options = {"workers": 2, "max_restarts": 0, "log_dir": tmp_path / "logs", **options}
        code = run([write_script(body), *arguments], out=out, **options)
        return code, out.getvalue().splitlines()

    return launched


def is_running(pid):
    """Whether it is there and not only waiting for somebody to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def wait_until():
    def wait(look, seconds=10.0):
        until = time.monotonic() + seconds
        while not look():
            assert time.monotonic() < until, "it did not come to that in time"
            time.sleep(0.01)

    return wait


@pytest.fixture
def all_gone(wait_until):
    """Wait until these processes have ended."""
    return lambda pids, seconds=5.0: wait_until(lambda: not any(is_running(pid) for pid in pids), seconds)
