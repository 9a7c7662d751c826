"""`Communicator`: one party's way to the other."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from plait.errors import FederalError
from plait.federal.channel import Channel
from plait.federal.settings import Party, other

__all__ = ["Communicator"]

HEARTBEAT = 2.0
"""After how many seconds of silence a party says that it is there."""

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Communicator:
    """Connects a party with the other one, and keeps them connected.

    `Communicator.pair()` gives two that are joined inside one process, for tests and notebooks: run each party's model
    in a thread of its own.
    """

    def __init__(self, party: Party) -> None:
        self.party = party
        self._channel: Channel | None = None
        self._close_link: Callable[[], None] = lambda: None
        self._meeting: _Meeting | None = None
        self._endpoint = "within this process"

    @classmethod
    def pair(cls, **settings: Any) -> tuple[Communicator, Communicator]:
        """A leader and a follower in one process; `settings` are those of a Party, for both."""
        meeting = _Meeting()
        made = [cls(Party(role=role, listen="127.0.0.1:0", **settings)) for role in ("leader", "follower")]
        for one in made:
            one._meeting = meeting  # noqa: SLF001 - its own class
        return made[0], made[1]

    @property
    def role(self) -> str:
        return self.party.role

    @property
    def channel(self) -> Channel:
        if self._channel is None:
            raise FederalError("there is no connection to the other party yet: compile() makes it")
        return self._channel

    @property
    def connected(self) -> bool:
        return self._channel is not None

    @property
    def endpoint(self) -> str:
        """Where this party listens, or dials."""
        return self._endpoint

    def connect(self, worker: int, facts: Mapping[str, Any]) -> Channel:
        """Begin to connect worker `worker` of this party; both parties have to state the same facts."""
        if self._channel is not None:
            return self._channel
        party, joined = self.party.of_worker(worker), self._meeting is not None
        own, peer = party.role, other(party.role)
        secured = party.certs is not None and not joined
        channel = Channel(
            own,
            peer,
            facts,
            timeout=party.timeout,
            window=party.window,
            checksum=not secured,
            heartbeat=min(HEARTBEAT, party.timeout / 4),
        )
        if self._meeting is not None:
            self._close_link = self._meeting.join(channel)
        else:
            from plait.federal import link  # noqa: PLC0415 - brings gRPC

            made = link.connect(channel, party)
            self._close_link, self._endpoint = made.close, made.endpoint
        self._channel = channel
        _open.add(self)
        return channel

    def fail(self, text: str) -> None:
        """Tell the other party why this one ends."""
        if self._channel is not None:
            self._channel.fail(text)
        self._close_link()

    def vanish(self) -> None:
        """End without a word: this party is started again, and the other one waits for it."""
        if self._channel is not None:
            self._channel.refuse(f"the {self.role} is being started again")
        self._close_link()

    def close(self) -> None:
        """Say goodbye; what was said before is delivered first."""
        _open.discard(self)
        if self._channel is not None:
            self._channel.close()
        self._close_link()


class _Meeting:
    """Two channels of one process are joined when both are there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Channel] = []
        self._joined: Any = None

    def join(self, channel: Channel) -> Callable[[], None]:
        from plait.federal import loopback  # noqa: PLC0415 - only where it is used

        with self._lock:
            self._waiting.append(channel)
            if len(self._waiting) == 2:
                self._joined = loopback.join(*self._waiting)
        return self._close

    def _close(self) -> None:
        with self._lock:
            if self._joined is not None and all(channel.closed for channel in self._waiting):
                self._joined.close()


@atexit.register
def _close_all() -> None:
    for communicator in list(_open):
        communicator.close()
