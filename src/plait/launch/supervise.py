"""Groups of processes that are started again when one of them fails, until their restarts are used up."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from plait.launch.processes import Child, describe, end

__all__ = ["GRACE_SECONDS", "SERVER_SECONDS", "Failure", "Group", "Supervisor", "caught_signals"]

GRACE_SECONDS = 10.0
"""From SIGTERM to SIGKILL."""
SERVER_SECONDS = 15.0
"""How long servers have to end by themselves after the last worker."""
_LOOK_SECONDS = 0.2


@dataclasses.dataclass
class Group:
    """Processes that are started again together: a collective group, or one process that stands for itself."""

    children: Sequence[Child]
    environments: Callable[[int], Sequence[Mapping[str, str]]]
    """The children's variables at the start, 0, and at each restart: 1, 2, ..."""
    restarts: int = 0

    @property
    def has_workers(self) -> bool:
        return any(child.kind == "worker" for child in self.children)

    def start(self, note: str = "") -> None:
        for child, environ in zip(self.children, self.environments(self.restarts), strict=True):
            child.start(environ, note)

    def failed(self) -> Failure | None:
        """The first that did not end well."""
        bad = [Failure(child, child.code) for child in self.children if child.code]
        return min(bad, key=lambda failure: failure.child.ended, default=None)

    def done(self) -> bool:
        return all(child.code == 0 for child in self.children)


@dataclasses.dataclass(frozen=True)
class Failure:
    """Who failed, and with what: an exit code, or minus the number of a signal."""

    child: Child
    code: int

    @property
    def name(self) -> str:
        return f"{self.child.kind} {self.child.index}"


class Supervisor:
    """Starts groups, starts them again, and ends them all."""

    def __init__(
        self,
        groups: Sequence[Group],
        max_restarts: int,
        *,
        wait: Callable[[float], None],
        say: Callable[[str], None],
        stopped: Callable[[], int],
    ) -> None:
        """`wait` comes back when a child has ended, or so many seconds are over; `say` shows a line to the user;
        `stopped` tells how often somebody has asked for the end.
        """
        self._groups, self._max_restarts = groups, max_restarts
        self._wait, self._say, self._stopped = wait, say, stopped

    def run(self) -> Failure | None:
        """Until all workers have ended well, a group has used up its restarts, or somebody asks for the end."""
        try:
            for group in self._groups:
                group.start()
            failure = self._watch()
            if failure is None and not self._stopped():
                self._wait_for_servers()
        finally:
            self._end_all()
        return failure

    def _watch(self) -> Failure | None:
        workers = [group for group in self._groups if group.has_workers]
        while not self._stopped() and not all(group.done() for group in workers):
            for group in self._groups:
                failure = group.failed()
                if failure is not None and group.restarts >= self._max_restarts:
                    return failure
                if failure is not None:
                    self._restart(group, failure)
            self._wait(_LOOK_SECONDS)
        return None

    def _restart(self, group: Group, failure: Failure) -> None:
        self._end(group.children)
        if self._stopped():
            return
        group.restarts += 1
        cause = f"{failure.name} ended with {describe(failure.code)}"
        group.start(f"plait launch: restart {group.restarts} of {self._max_restarts}: {cause}")

    def _wait_for_servers(self) -> None:
        until = time.monotonic() + SERVER_SECONDS
        while (running := self._running()) and not self._stopped():
            left = until - time.monotonic()
            if left <= 0:
                names = ", ".join(f"{child.kind} {child.index}" for child in running)
                self._say(f"plait launch: {names}: told to end {SERVER_SECONDS:g} s after the last worker")
                break
            self._wait(min(left, _LOOK_SECONDS))

    def _end_all(self) -> None:
        self._end([child for group in self._groups for child in group.children])

    def _end(self, children: Sequence[Child]) -> None:
        asked = self._stopped()

        def asked_twice() -> bool:
            return self._stopped() > max(asked, 1)

        for child in end(children, GRACE_SECONDS, wait=self._wait, hurry=asked_twice):
            self._say(f"plait launch: {child.kind} {child.index} could not be killed: it hangs in a call of the system")

    def _running(self) -> list[Child]:
        return [child for group in self._groups for child in group.children if child.code is None]


@contextlib.contextmanager
def caught_signals(note: Callable[[signal.Signals], None]) -> Iterator[list[signal.Signals]]:
    """The signals that ask this process to end are kept in a list; outside the main thread, none arrive."""
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def keep(number: int, _frame: FrameType | None) -> None:
        caught.append(signal.Signals(number))
        note(caught[-1])

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: keep for number in wanted if signal.getsignal(number) is not signal.SIG_IGN}  # nohup ignores
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # exit codes would be lost
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
