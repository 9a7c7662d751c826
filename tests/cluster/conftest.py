"""What tests of several processes have in common."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

RANKS, DEADLINE = 2, 100.0


@pytest.fixture(scope="session")
def run_ranks():
    """Run a test file as the program of two ranks, `FILE FOLDER CASES RANK`, and see that both end well."""

    def run(file, folder, cases):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        strict = ["-W", "error::UserWarning", "-W", "error::FutureWarning"]
        processes = []
        for rank in range(RANKS):
            command = [sys.executable, *strict, file, str(folder), cases, str(rank)]
            with open(folder / f"{rank}.log", "w") as log:
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        until = time.monotonic() + DEADLINE
        try:
            codes = [process.wait(max(0.1, until - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [(folder / f"{rank}.log").read_text()[-4000:] for rank in range(RANKS)]
        assert codes == [0] * RANKS, "\n".join(texts)

    return run
