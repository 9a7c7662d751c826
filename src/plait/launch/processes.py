"""Processes of this machine: started, watched, ended with all that they had started themselves."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["Child", "Guard", "LocalChild", "Processes", "describe", "end", "exit_status", "write_note"]

_LOOK_SECONDS = 0.05  # between looks, where the system cannot wake us when a process ends
_GONE_SECONDS = 5.0  # a killed process is gone by then, or hangs inside the kernel


class Child(Protocol):
    """One process of the cluster, over all its restarts."""

    kind: str
    index: int
    log: Path
    began: int
    """Where in the log the output of the last start begins."""
    code: int | None
    """Its exit code, or minus the number of the signal that killed it; None while it runs, 0 before the start."""
    ended: float
    """When it ended: of two, the smaller number was the first."""

    def start(self, environ: Mapping[str, str], note: str = "") -> None:
        """Start it; `note` is written into the log before anything of its own."""

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs. SIGKILL is for all that it has started, too."""


class Processes:
    """The processes of a cluster on this machine, none of which outlives this one, not even when it is killed."""

    def __init__(self, directory: Path) -> None:
        """A guard kills what is left, and removes `directory`."""
        self._guard = Guard(directory)
        self._running: dict[int, LocalChild] = {}
        # It keeps the order in which processes have ended, also while nobody looks.
        self._ends = select.epoll() if hasattr(os, "pidfd_open") and hasattr(select, "epoll") else None

    def child(self, kind: str, index: int, command: Sequence[str], log: Path) -> LocalChild:
        return LocalChild(kind, index, command, log, self._add)

    def wait(self, seconds: float) -> None:
        """Until one has ended, or the time is over; those that have ended get their `code`."""
        if self._ends is None:
            time.sleep(min(seconds, _LOOK_SECONDS))
            keys = list(self._running)
        else:
            keys = [handle for handle, _ in self._ends.poll(seconds)]
        for key in keys:
            child = self._running[key]
            if child.take_note():
                del self._running[key]
                self._guard.remove(child.pid)
                if self._ends is not None:
                    os.close(key)

    def close(self) -> None:
        self._guard.close()
        if self._ends is not None:
            for handle in self._running:
                os.close(handle)
            self._ends.close()

    def _add(self, child: LocalChild) -> None:
        self._guard.add(child.pid)
        key = child.pid
        if self._ends is not None:
            key = os.pidfd_open(child.pid)
            self._ends.register(key, select.EPOLLIN)
        self._running[key] = child


class LocalChild:
    """A process of this machine, in a session of its own; what it writes goes straight into its log."""

    def __init__(
        self, kind: str, index: int, command: Sequence[str], log: Path, started: Callable[[LocalChild], None]
    ) -> None:
        self.kind, self.index, self.log = kind, index, log
        self.began, self.pid = 0, 0
        self.code: int | None = 0
        self.ended = 0.0
        self._command, self._started = list(command), started
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environ: Mapping[str, str], note: str = "") -> None:
        self.began = write_note(self.log, note)
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(  # noqa: S603 - to run the user's script is what a launcher is for
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )
        self.pid, self.code = self._process.pid, None
        self._started(self)

    def take_note(self) -> bool:
        """Whether it has ended; what it had started itself is killed then."""
        if self._process is None or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        # Until we ask for its exit code, nobody else gets its number.
        _kill_group(self.pid)
        self.code, self.ended = self._process.wait(), time.monotonic()
        self._process = None
        return True

    def tell(self, number: signal.Signals) -> None:
        process = self._process
        if process is not None and number == signal.SIGKILL:
            _kill_group(process.pid)
        elif process is not None:
            process.send_signal(number)


class Guard:
    """A process that kills process groups and removes a directory when this one ends without having done it."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(directory)]
        self._process = subprocess.Popen(  # noqa: S603 - our own file, by Python itself
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def add(self, group: int) -> None:
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._write(f"-{group}\n")

    def close(self) -> None:
        """Whatever was added and not removed is killed now."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_GONE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_GONE_SECONDS)

    def _write(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody has killed it: the launcher goes on without
                self._process.stdin.write(line.encode())


def end(
    children: Sequence[Child],
    grace: float,
    *,
    wait: Callable[[float], None],
    hurry: Callable[[], bool] = lambda: False,
) -> list[Child]:
    """SIGTERM to those that run, SIGKILL after `grace` seconds or when there is a hurry; those that would not die.

    `wait` comes back when a process has ended, or so many seconds are over.
    """
    for child in children:
        child.tell(signal.SIGTERM)
    left = _wait_for_all(children, grace, wait, hurry)
    for child in left:
        child.tell(signal.SIGKILL)
    return _wait_for_all(left, _GONE_SECONDS, wait, lambda: False)


def write_note(log: Path, note: str) -> int:
    """A line of its own, also after a process that died in the middle of one; where the log ends then."""
    with log.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        broken = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        if note:
            file.write(b"\n" * broken + f"{note}\n".encode())
        return file.tell()


def describe(code: int) -> str:
    """In words: `exit code 3`, `SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def exit_status(code: int) -> int:
    """As a shell tells it: 128 + n for a signal."""
    return code if code >= 0 else 128 - code


def _wait_for_all(
    children: Sequence[Child], seconds: float, wait: Callable[[float], None], hurry: Callable[[], bool]
) -> list[Child]:
    until = time.monotonic() + seconds
    while left := [child for child in children if child.code is None]:
        if time.monotonic() >= until or hurry():
            break
        wait(_LOOK_SECONDS)
    return left


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
