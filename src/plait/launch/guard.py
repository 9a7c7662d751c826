"""A small process that outlives the launcher: whatever the launcher leaves running, however it ends, is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable

__all__ = ["watch"]


def watch(lines: Iterable[str], directory: str) -> None:
    """Read `+group` and `-group`, numbers of process groups, until the launcher is gone; kill those it had left."""
    groups: set[int] = set()
    for line in lines:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(sys.stdin, sys.argv[1])
