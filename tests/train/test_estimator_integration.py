"""An Estimator in several processes is that of one process on the joined batch, also after a crash."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("launched_program.py")


def run(folder, batch, *launch, crash_at=-1):
    start = [sys.executable, "-m", "plait", "launch", *launch] if launch else [sys.executable]
    command = [*start, str(PROGRAM), str(batch), str(folder / "model"), str(crash_at)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=180, check=False)


def found(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(value) for value in re.search(r"found (.*)", done.stdout).group(1).split()]


@pytest.mark.slow
@pytest.mark.parametrize("servers", [(), ("--servers", "1")], ids=["collective", "servers"])
def test_two_workers_are_one_process_on_the_joined_batch(tmp_path, servers):
    (tmp_path / "alone").mkdir()
    (tmp_path / "two").mkdir()
    alone = found(run(tmp_path / "alone", 32))
    assert alone[2:] == [35, 512]
    crashed = run(tmp_path / "two", 16, "--workers", "2", *servers, crash_at=24)
    assert crashed.returncode != 0
    assert found(run(tmp_path / "two", 16, "--workers", "2", *servers)) == pytest.approx(alone, abs=2e-6)
