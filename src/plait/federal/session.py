"""Where a party stands with its peer: whose lives are in a session, what was said in it, and how it ended.

Both parties say HELLO on every connection, and again when what it says has changed. A party that has opened is fresh;
it names the peer's life as soon as it hears that this is fresh, too. The session begins, for each of them, when the
other has named it: so whoever starts anew before that only starts the naming anew. After that, another life of the peer
means that the session is lost.
"""

from __future__ import annotations

import enum
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.errors import FederalError, UnavailableError
from plait.federal.hello import Hello, is_older, name_session
from plait.federal.mailbox import Form, Mailbox
from plait.federal.outbox import Outbox, Stamp
from plait.federal.wire import FrameError, Kind, encode_json

if TYPE_CHECKING:
    from plait.federal.connection import Connection

__all__ = ["Session", "State"]

ACK_MESSAGES = 32
"""After how many messages an acknowledgement goes out by itself; or after a quarter of the window."""
MAX_REASON = 8000
"""Characters of the text that a party ends with."""

log = logging.getLogger("plait")


class State(enum.Enum):
    """Where a party stands."""

    IDLE = enum.auto()
    """Not opened yet."""
    FRESH = enum.auto()
    """Opened, and the peer is not there yet."""
    OPEN = enum.auto()
    """In a session."""
    LOST = enum.auto()
    """The peer has started anew; the next session has to be opened."""
    CLOSED = enum.auto()


class Session:
    """What a channel and its connections share. Everything but the first three fields is touched with `lock` held."""

    def __init__(self, own: str, peer: str, facts: Mapping[str, Any], window: int, *, checksum: bool) -> None:
        self.own, self.peer, self.facts = own, peer, facts
        self.checksum = checksum
        self.lock = threading.RLock()
        self.news = threading.Condition(self.lock)
        """For those who wait for the peer."""
        self.work = threading.Condition(self.lock)
        """For the transport that sends."""
        self.state = State.IDLE
        self.closing = False
        self.failure = ""
        """Why every call fails from now on."""
        self.farewell: bytes | None = None
        """The frame that tells the peer that this party ends, outside of a session or with an error; it is answered."""
        self.parted = False
        """The peer has said the same."""
        self.connection: Connection | None = None
        self.hello: Hello | None = None
        """The peer's last."""
        self.heard: float | None = None
        self.expected: dict[int, Form] | None = None
        self.waiters = 0
        self.duplicates = self.sent_bytes = self.received_bytes = 0
        self.epoch = 0
        """Counts the sessions of this process."""
        self._process = secrets.token_hex(8)
        self._window = window
        self._clear()

    def _clear(self) -> None:
        """Nothing of a session is left."""
        self.tag = 0
        """The session on the wire; 0: none."""
        self.partner: str | None = None
        """The peer's life."""
        self.peer_ended = False
        self.window = self._window
        """The smaller of both parties', once both are known."""
        self.outbox = Outbox()
        self.mailbox = Mailbox(self._window)
        self.acknowledge_now = False
        self._told = (0, 0, 0)  # the number received, the bytes received and the credit that the peer knows of

    @property
    def life(self) -> str:
        return f"{self._process}:{self.epoch}"

    # ---- lives

    def begin(self) -> None:
        """Be fresh: a new life, ready for the peer's next one."""
        self.epoch += 1
        self.state = State.FRESH
        self._clear()
        self._greet()
        if self.hello is not None:
            self.meet(self.hello, None)
        self.news.notify_all()

    def meet(self, hello: Hello, connection: Connection | None) -> None:
        """Judge what the peer says of itself, on a connection or before."""
        if self.state is State.FRESH:
            self._consider(hello)
        elif self.state is State.OPEN and hello.life != self.partner and not is_older(hello.life, str(self.partner)):
            self._clear()
            self.state = State.LOST
            self.news.notify_all()
        if (
            self.state is State.OPEN
            and connection is not None
            and (hello.life, hello.peer) == (self.partner, self.life)
        ):
            self._resume(hello, connection)

    def _consider(self, hello: Hello) -> None:
        if self.partner is not None and is_older(hello.life, self.partner):
            return
        named = hello.peer == self.life
        if not named and not hello.fresh:  # it does not know yet that its session is over, and will say HELLO again
            return
        if hello.life != self.partner:
            self.partner = hello.life
            self._greet()
        if named:
            self.state = State.OPEN
            self.tag = name_session({self.own: self.life, self.peer: hello.life})
            self.window = max(1, min(self._window, hello.window))
            self.news.notify_all()

    def _resume(self, hello: Hello, connection: Connection) -> None:
        """What the peer lacks is sent, or sent again; once for each connection."""
        if connection.tag == self.tag:
            return
        if hello.received < self.outbox.received:
            raise FrameError("the other party says that it lacks what it has acknowledged")
        self.outbox.acknowledge(hello.received, self.outbox.consumed)
        connection.tag, connection.next = self.tag, hello.received + 1
        self.work.notify_all()

    def _greet(self) -> None:
        if self.connection is not None:
            self.connection.greet = True
            self.work.notify_all()

    # ---- frames

    def say_hello(self) -> bytes:
        tag, received, consumed = self.stamp()
        hello = Hello(
            party=self.own,
            life=self.life,
            fresh=self.state is State.FRESH,
            peer=self.partner,
            facts=self.facts,
            received=received,
            window=self._window,
        )
        return encode_json(Kind.HELLO, hello.value(), session=tag, received=received, consumed=consumed)

    def stamp(self) -> Stamp:
        """What the next frame says of the session; the peer knows of it from then on."""
        box = self.mailbox
        self._told = (box.number, box.received, box.credit)
        self.acknowledge_now = False
        return self.tag, box.number, box.credit

    def owes_ack(self) -> bool:
        """Whether the peer should hear what came and was consumed, though there is nothing else to say."""
        box, (number, received, credit) = self.mailbox, self._told
        return bool(self.tag) and (
            self.acknowledge_now
            or box.number - number >= ACK_MESSAGES
            or max(box.received - received, box.credit - credit) >= max(1, self.window // 4)
        )

    def count_consumed(self) -> None:
        """Note that something was taken, came, or is waited for.

        A party that waits lets more come than it has taken, so that no order of taking blocks both.
        """
        box = self.mailbox
        box.advance(eager=self.waiters > 0)
        number, received, credit = self._told
        told = box.number == number and box.received == received and box.credit == credit
        if (not told or self.acknowledge_now) and self.owes_ack():
            self.work.notify_all()

    # ---- ends

    def end(self, text: str, *, tell: bool = True) -> None:
        """Every call fails with `text` from now on; the peer is told."""
        if self.failure or self.state is State.CLOSED:
            return
        self.failure = "".join(c if c.isprintable() or c == "\n" else "?" for c in text[:MAX_REASON])
        if tell and self.farewell is None:
            self.farewell = encode_json(Kind.FAIL, {"text": self.failure}, session=self.tag)
        self.work.notify_all()
        self.news.notify_all()

    def check_alive(self) -> None:
        if self.failure:
            raise FederalError(self.failure)
        if self.closing:
            raise FederalError(f"the channel of the {self.own} is closed: nothing more can be said or heard")

    def check(self, epoch: int | None = None) -> None:
        """Raise what every call raises that cannot go on; `epoch` is that of a wait's begin."""
        self.check_alive()
        if self.state is State.LOST:
            raise UnavailableError(f"the {self.peer} has started anew: the session with it is lost")
        if self.state is State.IDLE:
            raise FederalError(f"the channel of the {self.own} is not open: call open() first")
        if epoch is not None and epoch != self.epoch:
            raise UnavailableError(f"the {self.own} has begun a new session")

    def drop(self, connection: Connection, reason: str) -> None:
        with self.lock:
            if not connection.dropped:
                log.debug("a connection of the %s to the %s is dropped: %s", self.own, self.peer, reason)
            connection.dropped = True
            if self.connection is connection:
                self.connection = None
            self.work.notify_all()
            self.news.notify_all()

    def hear(self, connection: Connection) -> None:
        self.heard = connection.heard = time.monotonic()
