"""The pool: threads with Intel's library, processes without it, the same points."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.psi import curve, native, pool
from plait.psi.pool import Pool

SECRET = bytes([9] * 32)
KEYS = [b"%d" % number for number in range(40)]
POINTS = b"".join(map(curve.hash_to_curve, KEYS))


@pytest.fixture
def processes(monkeypatch):
    """As where there is no library, with processes for more than a few."""
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(pool, "FEW", 4)


def check():
    with contextlib.closing(Pool(SECRET, workers=2)) as made:
        wanted = curve.multiply(SECRET, POINTS)
        futures = [made.blind(KEYS), made.multiply(POINTS), made.blind(KEYS[:3]), made.blind([])]
        assert [future.result(30) for future in futures] == [wanted, wanted, wanted[:96], b""]
        for low in (bytes(32), POINTS + bytes(32)):
            with pytest.raises(ValueError):
                made.multiply(low).result(30)
        assert made.multiply(POINTS).result(30) == wanted


def test_as_it_is_here():
    check()


def test_processes(processes):
    check()


def test_a_process_that_has_died(processes):
    with contextlib.closing(Pool(SECRET, workers=1)) as made:
        made.multiply(POINTS).result(30)
        os.kill(made._processes[0]._process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="has died: start again"):
            made.multiply(POINTS * 2000).result(30)


def test_a_process_that_dies_in_the_middle_of_an_answer(processes, monkeypatch):
    """Half an answer would be taken for the points of fewer rows."""
    half = (
        "import sys; sys.stdin.buffer.read(32 + 9); sys.stdout.buffer.write(b'M' + bytes([64] + [0] * 7) + bytes(32))"
    )
    monkeypatch.setattr(pool, "_START", half)
    with (
        contextlib.closing(Pool(SECRET, workers=1)) as made,
        pytest.raises(RuntimeError, match="has died: start again"),
    ):
        made.multiply(POINTS).result(30)


@pytest.mark.slow
def test_processes_end_with_whom_they_work_for(tmp_path):
    """However that ends."""
    program = (
        "import os, signal\n"
        "from plait.psi import native, pool\n"
        "native.load = lambda: None\n"
        "made = pool.Pool(bytes([9] * 32), workers=1)\n"
        f"made.multiply({POINTS!r} * 20).result()\n"
        "print(made._processes[0]._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, until = int(done.stdout), time.monotonic() + 30
    while Path(f"/proc/{pid}/cmdline").exists() and "curve.py" in Path(f"/proc/{pid}/cmdline").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
