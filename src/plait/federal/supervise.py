"""Parties that are started again when they are killed, and that end together when one of them fails."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from plait.launch.processes import Child, LocalChild, describe, end
from plait.launch.supervise import GRACE_SECONDS, Failure, Group

__all__ = ["LAST_SECONDS", "RECOVERABLE_EXIT", "Keeper", "Member", "PassingChild", "may_start_again"]

LAST_SECONDS = 10.0
"""How long a party has to end by itself after the other one has failed."""
RECOVERABLE_EXIT = 75
"""A script that ends with this code (EX_TEMPFAIL of sysexits.h) asks to be started again."""
_LAST_WORDS_SECONDS = 1.0  # a party ends so soon after the other, if that was killed when both had all
_LOOK_SECONDS = 0.2


@dataclasses.dataclass
class Member(Group):
    """The processes of one party: they are started again together."""

    name: str = ""
    since: float = 0.0
    """When it was started last."""

    def start(self, note: str = "") -> None:
        self.since = time.time()
        super().start(note)


class PassingChild(LocalChild):
    """A process that writes where this one writes, in a session of its own."""

    def start(self, environ: Mapping[str, str], note: str = "") -> None:
        if note:
            print(note, file=sys.stderr, flush=True)  # noqa: T201 - it has no log
        self._process = subprocess.Popen(  # noqa: S603 - to run the user's script is what a launcher is for
            self._command, stdin=subprocess.DEVNULL, env=dict(environ), start_new_session=True
        )
        self.pid, self.code = self._process.pid, None
        self._started(self)


class Keeper:
    """Starts the parties, starts one again that was killed, and ends all of them.

    The parties need each other: one that has already ended well is started again with one that was killed, and finds
    in its checkpoints what is left to do.
    """

    def __init__(
        self,
        members: Sequence[Member],
        restarts: int,
        *,
        program: str,
        wait: Callable[[float], None],
        say: Callable[[str], None],
        caught: Sequence[signal.Signals],
    ) -> None:
        """`wait` comes back when a process has ended, or so many seconds are over; `say` shows a line to the user;
        `caught` grows by each signal that asks for the end; `program` stands before what is said.
        """
        self._members, self._restarts, self._program = members, restarts, program
        self._wait, self._say, self._caught = wait, say, caught
        self._children: list[Child] = [child for member in members for child in member.children]

    def run(self) -> Failure | None:
        """Until all have ended well, one has failed for good, or a signal asks for the end, which goes on to all."""
        failure = None
        try:
            for member in self._members:
                member.start()
            failure = self._watch()
            if self._caught:
                self._pass_on(self._caught[0])
        finally:
            self._end(self._children)
        return failure

    def _watch(self) -> Failure | None:
        while not self._caught and not all(member.done() for member in self._members):
            found = self._failures()
            if self._are_final(found):
                self._wait_for_end(LAST_SECONDS)
                if self._are_final(self._failures()):
                    return min((failure for _, failure in found), key=lambda failure: failure.child.ended)
            elif found:
                self._wait_for_end(_LAST_WORDS_SECONDS)
            for member, failure in self._failures():
                self._start_again(member, failure)
            self._wait(_LOOK_SECONDS)
        return None

    def _failures(self) -> list[tuple[Member, Failure]]:
        return [(member, failure) for member in self._members if (failure := member.failed()) is not None]

    def _are_final(self, found: Sequence[tuple[Member, Failure]]) -> bool:
        return any(
            member.restarts >= self._restarts or not (may_start_again(failure.code) or self._was_late(member))
            for member, failure in found
        )

    def _was_late(self, member: Member) -> bool:
        """Whether it came back, and the other one had ended well: together they find that nothing is left to do."""
        others = [other for other in self._members if other is not member]
        return member.restarts > 0 and bool(others) and all(other.done() for other in others)

    def _start_again(self, member: Member, failure: Failure) -> None:
        self._end(member.children)
        if self._caught:
            return
        cause = f"the {member.name} ended with {describe(failure.code)}"
        for other in self._members:
            if other is member or other.done():
                other.restarts += 1
                other.start(f"{self._program}: restart {other.restarts} of {self._restarts}: {cause}")

    def _pass_on(self, number: signal.Signals) -> None:
        for child in self._children:
            child.tell(number)
        self._wait_for_end(GRACE_SECONDS)

    def _wait_for_end(self, seconds: float) -> None:
        until, asked = time.monotonic() + seconds, len(self._caught)
        while any(child.code is None for child in self._children) and len(self._caught) == asked:
            left = until - time.monotonic()
            if left <= 0:
                break
            self._wait(min(left, _LOOK_SECONDS))

    def _end(self, children: Sequence[Child]) -> None:
        asked = len(self._caught)

        def hurry() -> bool:
            return len(self._caught) > max(1, asked) or asked > 1

        for child in end(children, GRACE_SECONDS, wait=self._wait, hurry=hurry):
            self._say(f"{self._program}: {child.kind} {child.index} could not be killed: it hangs in a system call")


def may_start_again(code: int) -> bool:
    """Whether it was killed, or asks for it; an error would only come again."""
    return code < 0 or code == RECOVERABLE_EXIT
