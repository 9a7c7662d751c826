"""`Channel`: messages between two parties over connections that break and come back. It knows no transport."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from plait.errors import ConfigError, FederalError
from plait.federal.connection import Connection
from plait.federal.mailbox import NOTHING, Form
from plait.federal.outbox import Message
from plait.federal.patience import LIVING_TIMEOUTS, WORD_TIMEOUTS, Patience
from plait.federal.session import Session, State
from plait.federal.wire import Kind, dump_words, encode_json

__all__ = ["Channel", "Connection"]

CLOSE_SECONDS = 30.0
"""For how long a silent peer is waited for when the last words are to be delivered."""
LINGER_SECONDS = 0.3
"""The same, of a peer that has ended as well, and may wait to hear that its last words came."""
FAREWELL_SECONDS = 2.0
"""For how long a party that ends with an error tries to say so."""
_DONE = None
"""What a wait for no thing in particular finds."""

log = logging.getLogger("plait")


class Channel:
    """Messages between two parties over a connection that may break and come back: none lost, none twice.

    `own` and `peer` are the parties' names; `facts` are what both have to agree on, in JSON's types. Its methods may be
    called from several threads.
    """

    def __init__(
        self,
        own: str,
        peer: str,
        facts: Mapping[str, Any] | None = None,
        *,
        timeout: float = 600.0,
        window: int = 64 << 20,
        checksum: bool = False,
        heartbeat: float = 2.0,
    ) -> None:
        self.own, self.peer = own, peer
        self._timeout, self._heartbeat = timeout, heartbeat
        self._session = Session(own, peer, _as_json(facts or {}), window, checksum=checksum)

    def open(self) -> None:
        """Begin a new session, with nothing of the one before; waits until the peer begins one, too."""
        session = self._session
        with session.lock:
            session.check_alive()
            session.begin()
        self._wait(lambda: _DONE if session.state is State.OPEN else NOTHING, "a session")
        log.info("the %s and the %s have begun a session", self.own, self.peer)

    def tell(self, topic: str, value: Any) -> None:
        """Say a word, in JSON's types. Waits only while the window is full."""
        session = self._session

        def add() -> None:
            session.outbox.word(Kind.WORD, topic, value, session.stamp(), checksum=session.checksum)

        self._say(add, topic)

    def hear(self, topic: str, what: str = "") -> Any:
        """The next word of a topic; waits for it. `what` is for the error and the log."""
        what = what or f"the word {topic!r}"
        return self._wait(lambda: self._session.mailbox.word(topic, take=True), what, times=WORD_TIMEOUTS)

    def peek(self, topic: str, what: str = "") -> Any:
        """The next word of a topic, which stays the next; waits for it."""
        return self._wait(lambda: self._session.mailbox.word(topic, take=False), what or f"the word {topic!r}")

    def look(self, topic: str) -> Any | None:
        """The next word of a topic if it is there, taken; does not wait."""
        session = self._session
        if session.state is State.OPEN and not session.failure and not session.mailbox.has_word(topic):
            return None  # asked at every step, and answered without a lock
        with session.lock:
            session.check()
            word = self._session.mailbox.word(topic, take=True)
            self._session.count_consumed()
        return None if word is NOTHING else word

    def send(
        self,
        slot: int,
        turn: int,
        tensor: Tensor | None,
        *,
        gradient: bool = False,
        precision: str | None = None,
        words: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Send a tensor; it must not be changed in place afterwards. Waits only while the window is full.

        `words`, topics and values, ride on it.
        """
        given = None if tensor is None else tensor.detach()
        if given is not None and given.device.type != "cpu":
            given = given.cpu()
        message = Message(None, slot, turn, given, gradient, precision, dump_words(words) if words else b"")
        self._say(lambda: self._session.outbox.add(message), f"slot {slot} of turn {turn}")

    def receive(self, slot: int, turn: int, *, gradient: bool = False, what: str = "") -> Tensor | None:
        """The tensor that the peer sent for this slot and turn; waits for it. None: a gradient that is zero."""
        what = what or f"slot {slot} of turn {turn}"
        found = self._wait(lambda: self._session.mailbox.tensor(slot, turn, gradient), what)
        return found if isinstance(found, Tensor) else None

    def expect(self, slots: Mapping[int, Form]) -> None:
        """Which tensors may come, by slot, with their dtype and shape (the first dimension is free); no others do.

        It holds for gradients in these slots, too, and in the sessions that follow.
        """
        session = self._session
        with session.lock:
            session.expected = dict(slots)
            complaint = session.mailbox.complaint(session.expected)
            if complaint:
                session.end(f"the {self.own} refuses what the {self.peer} sends: {complaint}")

    def forget(self, before: int) -> None:
        """Drop the tensors of turns before this one, those that are here and those that are still to come."""
        with self._session.lock:
            if self._session.mailbox.forget(before):
                self._session.count_consumed()

    def fail(self, text: str) -> None:
        """Tell the peer why this party ends, if that takes at most 2 seconds, and close."""
        with self._session.lock:
            self._session.end(text)
        self.close()

    def close(self) -> None:
        """Deliver all that was said, say goodbye, and end. The wait is bounded where the peer is gone."""
        session = self._session
        with session.lock:
            if session.closing:
                return
            session.closing = True
            if session.state is State.OPEN and not session.failure:
                session.outbox.word(Kind.BYE, "", {}, session.stamp(), checksum=session.checksum)
                self._wake()
                self._deliver()
            if session.state is not State.OPEN or session.failure:  # or the peer has started anew meanwhile
                if not session.failure:
                    session.farewell = encode_json(Kind.BYE, {}, session=0)
                self._wake()
                self._say_farewell()
            session.state = State.CLOSED
            self._wake()

    @property
    def closed(self) -> bool:
        return self._session.state is State.CLOSED

    @property
    def connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return self._session.connection is not None

    @property
    def sent_bytes(self) -> int:
        """Of frames, those sent again included."""
        return self._session.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._session.received_bytes

    @property
    def duplicates(self) -> int:
        """Messages that came again after a connection broke, and were dropped."""
        return self._session.duplicates

    @property
    def kept_bytes(self) -> int:
        """Of messages that the peer may not have yet."""
        with self._session.lock:
            return self._session.outbox.kept

    # ---- for a transport

    def attach(self) -> Connection:
        """A new connection; the one before is dropped. A closed channel gives one that is dropped already."""
        session = self._session
        with session.lock:
            if session.connection is not None:
                session.drop(session.connection, "there is a newer one")
            connection = Connection(session, self._heartbeat)
            if session.state is State.CLOSED:
                connection.dropped = True
            else:
                session.connection = connection
            return connection

    def refuse(self, text: str) -> None:
        """The peer does not take this party: every call fails with `text`, and the peer is told nothing."""
        with self._session.lock:
            self._session.end(text, tell=False)

    # ---- waits

    def _wait(self, take: Callable[[], Any], what: str, *, times: int = LIVING_TIMEOUTS) -> Any:
        """What `take` finds, as soon as it does; bounded, and ended by whatever ends the session."""
        session = self._session
        with session.lock:
            session.check()
            found = take()
            if found is not NOTHING:
                session.count_consumed()
                return found
            patience = Patience(self.own, self.peer, what, self._timeout, times=times)
            epoch = session.epoch
            session.waiters += 1
            session.count_consumed()
            try:
                while True:
                    if session.peer_ended:
                        raise FederalError(f"the {self.peer} has ended, and the {self.own} waits for {what}")
                    self._wait_a_while(patience)
                    session.check(epoch)
                    found = take()
                    if found is not NOTHING:
                        return found
            finally:
                session.waiters -= 1
                session.count_consumed()
                if session.waiters:  # who waits, too, may read now
                    session.news.notify_all()

    def _wait_a_while(self, patience: Patience) -> None:
        """Until there may be news: read them, or let another thread do so. The session's lock is held but for that."""
        session = self._session
        left = patience.seconds(session.heard)
        reading = session.connection.reading if session.connection is not None else None
        if left > 0 and (reading is None or not reading.begin()):
            session.news.wait(left)
            return
        if left <= 0 and patience.is_over(session.heard):
            raise FederalError(patience.text(session.heard, session.mailbox.waiting))
        session.lock.release()
        try:
            if left <= 0 or reading is None:
                patience.note()
            else:
                reading.read(patience)
        finally:
            session.lock.acquire()

    def _say(self, add: Callable[[], None], what: str) -> None:
        session = self._session

        def say() -> object:
            if session.peer_ended:
                raise FederalError(f"the {self.peer} has ended, and the {self.own} sends {what}")
            if session.state is not State.OPEN or session.outbox.unconsumed >= session.window:
                return NOTHING
            add()
            session.work.notify_all()
            return _DONE

        self._wait(say, f"room to send {what}")

    def _deliver(self) -> None:
        """Wait until the peer has all, or is silent for long.

        A peer that has ended as well needs nothing more but to hear that its last words came; it may be gone already.
        """
        session, begin, connected = self._session, time.monotonic(), self._session.connection is not None
        patience = min(CLOSE_SECONDS, self._timeout)
        while session.state is State.OPEN and not session.failure and session.outbox.received < session.outbox.last:
            until = min(max(begin, session.heard or begin) + patience, begin + self._timeout)
            if session.peer_ended:
                until = min(until, begin + LINGER_SECONDS) if connected else begin
            left = until - time.monotonic()
            if left <= 0:
                if not session.peer_ended:
                    log.warning("the %s closes, and the %s may not have all that was said", self.own, self.peer)
                return
            session.news.wait(left)

    def _say_farewell(self) -> None:
        """Wait until both parties have said that they end."""
        session, until = self._session, time.monotonic() + FAREWELL_SECONDS
        while session.farewell is not None and session.heard is not None:
            connection, left = session.connection, until - time.monotonic()
            if left <= 0 or (session.parted and (connection is None or connection.ended)):
                return
            session.news.wait(left)

    def _wake(self) -> None:
        self._session.work.notify_all()
        self._session.news.notify_all()


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as the peer will read them."""
    try:
        read: dict[str, Any] = json.loads(json.dumps(facts, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"facts that cannot be said in JSON ({error}): use numbers, text, lists and dicts") from None
    return read
