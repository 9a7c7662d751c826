"""`Connection`: the frames of a channel on one connection, for a transport to carry."""

from __future__ import annotations

import time
from collections.abc import Iterator

from plait.federal.difference import side_by_side
from plait.federal.hello import Hello, read_hello
from plait.federal.mailbox import misfit
from plait.federal.outbox import Message
from plait.federal.reading import Reading
from plait.federal.session import Session, State
from plait.federal.wire import VERSION, Frame, FrameError, Kind, VersionError, decode, encode_json

__all__ = ["Connection"]

SILENCE_SECONDS, SILENCE_HEARTBEATS = 120.0, 10
"""A connection is given up on which nothing was heard for the longer of the two: a large tensor may take a while, and
transports look after connections, too."""


class Connection:
    """One connection. A thread of the transport's takes `outgoing`; another calls `incoming` with what comes."""

    def __init__(self, session: Session, heartbeat: float) -> None:
        self.dropped = False
        """The transport should end it, and make a new one."""
        self.greet = True
        """A HELLO is due."""
        self.tag = 0
        """The session that the peer has said, on this connection, that it is in, and"""
        self.next = 0
        """the number of the next message for it."""
        self.heard = time.monotonic()
        self.ended = False
        """The session's farewell was said."""
        self.reading: Reading | None = None
        """Where those who wait may read by themselves."""
        self._session, self._heartbeat = session, heartbeat
        self._said = self.heard
        self._greeted = False

    def outgoing(self) -> Iterator[bytes]:
        """The frames to send; waits for them. It ends when the connection is dropped, or the channel closed."""
        while (data := self._next()) is not None:
            yield data

    def incoming(self, data: bytes) -> None:
        """A frame that came. FrameError: it is refused, and the connection dropped."""
        session = self._session
        try:
            frame = decode(data)
            with session.lock:
                if not self.dropped and session.state is not State.CLOSED:
                    session.hear(self)
                    session.received_bytes += len(data)
                    self._handle(frame, len(data))
        except VersionError as error:
            if self._greeted or _is_altered(data):
                session.drop(self, str(error))
                raise
            with session.lock:  # stays connected, so that the peer hears our version
                session.hear(self)
                session.end(f"the {session.own} and the {session.peer} do not fit together: {error}")
        except FrameError as error:
            session.drop(self, str(error))
            raise

    def invite(self) -> bool:
        """Let those who wait read by themselves; whether there are any."""
        with self._session.lock:
            if self._session.waiters:
                self._session.news.notify_all()
            return self._session.waiters > 0

    def lost(self, reason: str) -> None:
        """The transport says that the connection broke."""
        self._session.drop(self, reason)

    # ---- what goes out

    def _next(self) -> bytes | None:
        session = self._session
        while True:
            with session.lock:
                chosen = self._choose()
                if chosen is None:
                    return None
                if isinstance(chosen, bytes):
                    return self._count(chosen)
                if chosen.data is not None:
                    return self._count(chosen.data)
                stamp, outbox = session.stamp(), session.outbox
            try:  # without the lock: a large tensor takes a while
                data = chosen.encode(stamp, checksum=session.checksum)
            except Exception as error:  # noqa: BLE001  a transport's thread must not die of what a user sends
                self._give_up(chosen, error)
                continue
            with session.lock:
                data = outbox.settle(chosen, data)  # of its own session, which may be over
                if not self.dropped and self.tag == session.tag == stamp[0]:
                    return self._count(data)

    def _choose(self) -> bytes | Message | None:
        """The next frame, or message to be encoded; waits for it. None: there will be none."""
        session = self._session
        while not self.dropped:
            if self.greet:
                self.greet = False
                return session.say_hello()
            if session.farewell is not None and not self.ended:
                self.ended = True
                return session.farewell
            message = session.outbox.get(self.next) if self.tag == session.tag != 0 and not session.failure else None
            if message is not None:
                self.next += 1
                return message
            if session.state is State.CLOSED and not session.acknowledge_now:
                return None
            now = time.monotonic()
            beat = self._said + self._heartbeat
            if now >= beat or session.owes_ack():
                tag, received, consumed = session.stamp()
                return encode_json(Kind.ACK, None, session=tag, received=received, consumed=consumed)
            silence = self.heard + max(SILENCE_SECONDS, SILENCE_HEARTBEATS * self._heartbeat)
            if now >= silence:
                session.drop(self, "nothing was heard on it")
                return None
            session.work.wait(min(beat, silence) - now)
        return None

    def _count(self, data: bytes) -> bytes:
        self._said = time.monotonic()
        self._session.sent_bytes += len(data)
        if self._session.closing:  # somebody waits for the last words to be said
            self._session.news.notify_all()
        return data

    def _give_up(self, message: Message, error: Exception) -> None:
        """A message cannot be encoded; unless another connection has, or the session is over, nothing can follow."""
        session = self._session
        with session.lock:
            if message.data is None and session.outbox.get(message.number) is message:
                session.end(f"the {session.own} cannot send: {error}")

    # ---- what comes in

    def _handle(self, frame: Frame, size: int) -> None:
        session = self._session
        if frame.kind == Kind.HELLO:
            self._meet(read_hello(frame.value))
        elif not self._greeted:
            raise FrameError(f"a connection begins with a HELLO, and this one with kind {frame.kind.name}")
        current = frame.session == session.tag != 0
        if current and session.outbox.acknowledge(frame.received, frame.consumed):
            session.news.notify_all()
        if frame.kind == Kind.FAIL or (frame.kind == Kind.BYE and not frame.number):
            if current or session.failure or session.state is not State.OPEN:
                self._part(frame)
        elif frame.kind not in (Kind.HELLO, Kind.ACK) and current and not session.failure:
            self._keep(frame, size)

    def _meet(self, hello: Hello) -> None:
        session = self._session
        self._greeted = True
        session.hello = hello
        if hello.party != session.peer:
            session.end(
                f"the {session.own} waits for the {session.peer}, and met one that calls itself {hello.party!r}: start "
                f"one party as {session.own} and the other as {session.peer}"
            )
        table = side_by_side(session.own, session.facts, session.peer, hello.facts)
        if table is not None:
            session.end(f"the {session.own} and the {session.peer} do not fit together:\n{table}")
        if not session.failure:
            session.meet(hello, self)

    def _part(self, frame: Frame) -> None:
        """The peer ends, or has heard that this party does; the first of the two is answered."""
        session = self._session
        session.parted = True
        text = frame.value.get("text") if isinstance(frame.value, dict) else None
        why = f" with an error: {text}" if frame.kind == Kind.FAIL else ""
        if not why and session.state is State.FRESH:
            why = ": start it again, too, and both go on from what they have saved"
        session.end(f"the {session.peer} has ended{why}", tell=False)
        session.farewell = session.farewell or encode_json(Kind.BYE, {}, session=0)
        session.work.notify_all()
        session.news.notify_all()

    def _keep(self, frame: Frame, size: int) -> None:
        session, box = self._session, self._session.mailbox
        if frame.number == 0 or frame.number > box.number + 1:
            raise FrameError(f"message {frame.number} came after {box.number}: some are missing")
        if frame.number <= box.number:
            session.duplicates += 1
            return
        complaint = None
        if frame.kind == Kind.TENSOR:
            complaint = misfit(session.expected, frame.slot, frame.turn, frame.gradient, frame.tensor)
        complaint = complaint or box.put(frame, size)
        if complaint:
            session.end(f"the {session.own} refuses what the {session.peer} sends: {complaint}")
            return
        if frame.kind == Kind.BYE:
            session.peer_ended = session.acknowledge_now = True
        session.count_consumed()
        session.news.notify_all()


def _is_altered(data: bytes) -> bool:
    """Whether a frame that claims another version is one of ours, with that one byte altered on its way."""
    try:
        decode(data[:3] + bytes([VERSION]) + data[4:])
    except FrameError:
        return False
    return True
