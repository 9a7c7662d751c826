"""Starting clusters in tests, killing parts of them, and ending them whatever happens."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


class Cluster:
    """`plait launch` of a program, in a process group of its own, with its output in a file."""

    def __init__(self, directory: Path, program: str, *arguments, workers=2, servers=0, max_restarts=0, environ=None):
        self.log = directory / "output.txt"
        command = ["launch", "--workers", str(workers), "--servers", str(servers), "--max-restarts", str(max_restarts)]
        command += ["--log-dir", str(directory / "logs"), str(PROGRAMS / program), *map(str, arguments)]
        self._file = self.log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from plait.cli import main; main()", *command],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._file.close()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output()[-4000:]}") from None

    def members(self) -> dict[str, int]:
        """The processes by role, such as "worker 0"."""
        found = {}
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                named = dict(item.split(b"=", 1) for item in variables if b"=" in item)
                if b"PLAIT_ROLE" in named and pid not in found.values():
                    who = f"{named[b'PLAIT_ROLE'].decode()} {named[b'PLAIT_INDEX'].decode()}"
                    found.setdefault(who, pid)
        return found


def descendants(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        for file in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = [int(child) for child in file.read_text().split()]
                found += children
                todo += children
    return found


def steps_in(progress: Path) -> int:
    lines = progress.read_text().split() if progress.exists() else []
    return int(lines[-1]) if lines and lines[-1].isdigit() else 0


def kill_often(cluster: Cluster, target: str, times: int, progress: Path, seed: int, deadline: float) -> int:
    """Kill `target` with -9 at random moments: after steps, or in the middle of coming back."""
    draws, killed, until = random.Random(seed), 0, time.monotonic() + deadline
    reached = 0
    while killed < times and cluster.process.poll() is None and time.monotonic() < until:
        if draws.random() < 0.3 and killed:
            time.sleep(draws.uniform(0.2, 4.0))
        else:
            wanted = reached + draws.randint(1, 20)
            while steps_in(progress) < wanted and cluster.process.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(draws.uniform(0.0, 0.2))
        pid = cluster.members().get(target)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        reached = steps_in(progress)
    return killed
