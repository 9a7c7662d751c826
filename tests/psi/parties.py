"""Two parties that align tables: in threads of this process, or in processes that may be killed."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from plait.federal.communicator import Communicator
from plait.psi.run import align

DEADLINE = 60.0
ROLES = ("leader", "follower")
PROGRAM = Path(__file__).parent / "programs" / "party.py"


def write_csv(path, rows, columns=("id", "note")):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def tables(directory, leader, follower):
    """A table of ids for each party; its other column says whose it is."""
    for role, ids in zip(ROLES, (leader, follower), strict=True):
        write_csv(directory / f"{role}.csv", [(one, f"{role}'s {one}") for one in ids])


def read_ids(found, column="id"):
    """The ids in a party's output, in order; shards one after the other."""
    ids = []
    for path in found.files:
        with path.open(newline="", encoding="utf-8") as file:
            ids += [row[column] for row in csv.DictReader(file)]
    return ids


def together(*functions):
    """What functions return that run at the same time, or the error of each."""
    results = [None] * len(functions)

    def call(place):
        try:
            results[place] = functions[place]()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            results[place] = error

    threads = [threading.Thread(target=call, args=(place,), daemon=True) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads), "a party did not end"
    return results


def outcomes(
    directory, key="id", *, suffix=".csv", leader=None, follower=None, timeout=20.0, window=1 << 24, **settings
):
    """Align DIRECTORY/leader.csv and follower.csv; what each party's `align` returned or raised."""
    ends = Communicator.pair(timeout=timeout, window=window)
    own = {"leader": leader or {}, "follower": follower or {}}

    def run(end):
        given = {"key": key, "batch": 8, **settings, **own[end.role]}
        return align(directory / f"{end.role}{suffix}", out=directory / f"out-{end.role}", communicator=end, **given)

    return together(*(lambda end=end: run(end) for end in ends))


def aligned(directory, *arguments, **settings):
    """As `outcomes`, of parties that both do well."""
    found = outcomes(directory, *arguments, **settings)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


class Starter:
    """A process that has imported all that a party needs, and starts parties at once; whom it started ends with it."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self._pids = set()

    def start(self, code, **arguments):
        """Start `align`; its exit code will be in the file `code`."""
        Path(code).unlink(missing_ok=True)
        self._process.stdin.write(json.dumps({"code": str(code), "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        self._pids.add(pid)
        return pid

    def kill(self, pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + DEADLINE
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.002)
        self._pids.discard(pid)

    def close(self):
        for pid in list(self._pids):
            self.kill(pid)
        self._process.stdin.close()
        self._process.wait(DEADLINE)
        self._process.stdout.close()
