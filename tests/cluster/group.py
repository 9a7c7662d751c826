"""Starts the workers of `group_program.py`, and always ends them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("group_program.py")
SECONDS = 100.0
"""How long a group may take altogether, on a busy machine."""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_group(cases, workers=2, *, shared=True, indices=None, secrets=None, timeout=30.0, endings=None):
    """Run cases in every worker, and return what each printed as JSON, in the order of `indices`.

    `endings` are the exit codes that are expected of the workers, when not all are 0.
    """
    indices = list(range(workers)) if indices is None else indices
    port = free_port()
    processes = []
    try:
        for number, index in enumerate(indices):
            given = {
                "cases": cases, "index": index, "workers": workers, "port": port, "shared": shared,
                "timeout": timeout,
            }  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
            environment.pop("PLAIT_SECRET", None)
            if secrets:
                environment["PLAIT_SECRET"] = secrets[number]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "error", str(PROGRAM), json.dumps(given)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
    codes = [process.returncode for process in processes]
    assert codes == (endings or [0] * len(indices)), "\n".join(error[-3000:] for _, error in outputs)
    return [json.loads(out) if out else {} for out, _ in outputs]
