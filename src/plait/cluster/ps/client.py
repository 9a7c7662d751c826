"""The worker's end of the wire: requests that do not wait, answers in any order, and a heartbeat."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq
from torch import Tensor

from plait.cluster.ps.service import (
    MAX_BYTES,
    QUEUED,
    address,
    curve_keys,
    readable,
    receive_frames,
    send_frames,
    set_options,
)
from plait.cluster.ps.wire import Buffer, Message, WireError, decode, encode
from plait.errors import ClusterError, UnavailableError

__all__ = ["Connection", "Heartbeat", "Pending", "Refused", "say_goodbye", "wait_all"]

GOODBYE_SECONDS = 2.0
LOOK = 0.25
"""Seconds between two calls of `check` while waiting."""


_POLLIN = int(zmq.POLLIN)  # plain numbers are quicker than enumerations
_Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


class Refused(ClusterError):  # noqa: N818 - what the server did, said in one word
    """The server answered that it cannot be; `code` is for programs, the text for people."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


class Pending:
    """An answer that is on its way."""

    __slots__ = ("_answer", "_kind", "_number", "connection")

    def __init__(self, connection: Connection, kind: str, number: int) -> None:
        self.connection = connection
        self._kind, self._number = kind, number
        self._answer: Message | None = None

    @property
    def here(self) -> bool:
        return self._answer is not None

    def done(self) -> bool:
        """Whether the answer is here; takes in what has come, and does not wait."""
        if self._answer is None:
            self.connection.receive()
        return self.here

    def wait(self, timeout: float | None = None, check: Callable[[], None] | None = None) -> Message:
        """The answer, after at most `timeout` seconds (the connection's own when None)."""
        return wait_all([self], timeout, check)[0]

    def ready(self, seconds: float, check: Callable[[], None] | None = None) -> bool:
        """Whether the answer is here after at most so many seconds; it is waited for further if not."""
        missing = [self]
        _wait(missing, seconds, check)
        return not missing

    def result(self) -> Message:
        """The answer that is here; Refused when it is a refusal."""
        answer = self._answer
        if answer is None:
            raise ClusterError(f"{self.connection.where} has not answered {self._kind!r} yet: wait for it")
        if answer.kind == "refused":
            text, code = answer.head.get("text"), answer.head.get("code")
            raise Refused(f"{self.connection.where} refused {self._kind!r}: {text}", str(code))
        return answer

    def _late(self, seconds: float) -> ClusterError:
        who = self.connection
        return ClusterError(f"{who.own} waited {seconds:g} s for {who.where} to answer {self._kind!r}")


class Connection:
    """The way to one server; for one thread.

    A server that is gone is connected to again when it is back, and gets what was not sent yet; what it had got is
    never answered. `reset` forgets both.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        name: str = "the server",
        own: str = "this process",
        secret: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.endpoint, self.own, self.timeout = endpoint, own, timeout
        self.where = f"{name} ({endpoint})"
        self._secret = os.environ.get("PLAIT_SECRET") if secret is None else secret
        self._context: _Context = zmq.Context.instance()
        self._waiting: dict[int, Pending] = {}
        self._number = 0
        self.socket = _dealer(self._context, endpoint, self._secret)

    def send(self, kind: str, head: dict[str, Any] | None = None, tensors: Sequence[Tensor] = ()) -> Pending:
        """Ask, without waiting for the answer. Leave the tensors as they are until it is here: they are not copied."""
        if len(self._waiting) >= QUEUED:
            self._make_room(kind)
        self._number += 1
        pending = Pending(self, kind, self._number)
        frames = encode(kind, head or {}, tensors, number=self._number)
        try:
            send_frames(self.socket, frames)
        except zmq.Again:
            self._send_when_free(kind, frames)
        self._waiting[self._number] = pending
        return pending

    def request(self, kind: str, head: dict[str, Any] | None = None, tensors: Sequence[Tensor] = ()) -> Message:
        """Ask, and wait for the answer."""
        return self.send(kind, head, tensors).wait()

    def receive(self) -> None:
        """Take in the answers that have come, without waiting."""
        while readable(self.socket):
            with contextlib.suppress(WireError):  # not an answer of ours: nobody waits for it
                message = decode(receive_frames(self.socket, MAX_BYTES))
                pending = self._waiting.pop(message.number, None)
                if pending is not None:
                    pending._answer = message  # noqa: SLF001 - the two are one thing

    def forget(self, pending: Pending) -> None:
        """Its answer is not waited for any more; should it come, it is dropped."""
        self._waiting.pop(pending._number, None)  # noqa: SLF001 - the two are one thing

    def reset(self) -> None:
        """Connect anew: nothing that was asked and not yet sent is sent, no answer is waited for any more."""
        self.close()
        self.socket = _dealer(self._context, self.endpoint, self._secret)

    def close(self) -> None:
        self._waiting.clear()
        self.socket.close(0)

    def _make_room(self, kind: str) -> None:
        """Wait for an answer: more than the queues hold must not be under way, or the server would drop answers."""
        until = time.monotonic() + self.timeout
        self.receive()
        while len(self._waiting) >= QUEUED:
            left = until - time.monotonic()
            if left <= 0:
                raise self._not_taken(kind)
            self.socket.poll(math.ceil(left * 1000))
            self.receive()

    def _send_when_free(self, kind: str, frames: list[Buffer]) -> None:
        if not self.socket.poll(int(self.timeout * 1000), zmq.POLLOUT):
            raise self._not_taken(kind)
        send_frames(self.socket, frames)

    def _not_taken(self, kind: str) -> ClusterError:
        return ClusterError(f"{self.own} waited {self.timeout:g} s for {self.where} to take {kind!r}")


def wait_all(
    pendings: Sequence[Pending], timeout: float | None = None, check: Callable[[], None] | None = None
) -> list[Message]:
    """The answers of all, in the order given; the connections may be several.

    `check` is called every quarter of a second and may raise. The first refusal is raised when all are here.
    """
    seconds = timeout if timeout is not None else max((p.connection.timeout for p in pendings), default=0.0)
    missing = list(pendings)
    try:
        _wait(missing, seconds, check)
        if missing:
            raise missing[0]._late(seconds)  # noqa: SLF001 - the two are one thing
    finally:
        for pending in missing:
            pending.connection.forget(pending)
    return [pending.result() for pending in pendings]


def _wait(missing: list[Pending], seconds: float, check: Callable[[], None] | None) -> None:
    """Take those out of `missing` whose answers come within so many seconds."""
    begun = time.monotonic()
    until, looked = begun + seconds, begun
    connections = {pending.connection for pending in missing}
    watched = [(connection.socket, _POLLIN) for connection in connections]
    while True:
        for connection in connections:
            connection.receive()
        missing[:] = [pending for pending in missing if not pending.here]
        now = time.monotonic()
        if not missing or now >= until:
            return
        if check is not None and now - looked >= LOOK:
            looked = now
            check()
        zmq.zmq_poll(watched, math.ceil(min(until - now, LOOK) * 1000))


def say_goodbye(connections: Sequence[Connection], worker: int) -> None:
    """Tell servers that a worker has finished, and close: they end when all have. One that is gone needs no goodbye."""
    pendings = [connection.send("bye", {"worker": worker}) for connection in connections]
    for pending in pendings:
        with contextlib.suppress(ClusterError):
            pending.wait(GOODBYE_SECONDS)
    for connection in connections:
        connection.close()


class Heartbeat:
    """A thread that tells every server once a second that this process lives, and notices servers that do not.

    Seconds in which this process itself stood still are not held against a server.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        head: dict[str, Any],
        *,
        interval: float = 1.0,
        limit: float = 5.0,
        secret: str | None = None,
    ) -> None:
        self.endpoints, self.head = list(endpoints), head
        self.interval, self.limit = interval, limit
        self.notices: dict[int, Any] = {}
        """The last notice of each server."""
        self._secret = os.environ.get("PLAIT_SECRET") if secret is None else secret
        self._lock = threading.Lock()
        self._silent = [0.0] * len(self.endpoints)
        self._incarnations: dict[int, tuple[str, str]] = {}  # the first that was heard of, and the last
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        for endpoint in self.endpoints:
            address(endpoint)  # a wrong one is said here, not in the thread

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="plait-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise UnavailableError if a server is silent for too long, or was started again."""
        for server, endpoint in enumerate(self.endpoints):
            if self._silent[server] > self.limit:
                raise UnavailableError(
                    f"server {server} ({endpoint}) has not answered for {self._silent[server]:.1f} s; "
                    f"{self.limit:g} s are allowed"
                )
            first, last = self._incarnations.get(server, ("", ""))
            if first != last:
                raise UnavailableError(f"server {server} ({endpoint}) was started again")

    def reset(self) -> None:
        """Take the servers for new: what they were before is forgotten, their silence counts from now."""
        with self._lock:
            self._silent = [0.0] * len(self.endpoints)
            self._incarnations = {}

    def expect(self, server: int, incarnation: str) -> None:
        """The server is the one that answered just now; another in its place is noticed."""
        with self._lock:
            self._silent[server] = 0.0
            self._incarnations[server] = (incarnation, incarnation)

    def _run(self) -> None:
        context = zmq.Context()
        sockets = [_dealer(context, endpoint, self._secret) for endpoint in self.endpoints]
        number, due, before = 0, 0.0, time.monotonic()
        try:
            while not self._stopping.wait(self.interval / 8):
                now = time.monotonic()
                for server, socket in enumerate(sockets):
                    with self._lock:
                        self._silent[server] += min(now - before, self.interval)
                        self._take(server, socket)
                before = now
                if now >= due:
                    number, due = number + 1, now + self.interval
                    for socket in sockets:
                        with contextlib.suppress(zmq.Again):
                            send_frames(socket, encode("beat", self.head, number=number))
        finally:
            for socket in sockets:
                socket.close(0)
            context.term()

    def _take(self, server: int, socket: zmq.Socket[bytes]) -> None:
        while readable(socket):
            try:
                message = decode(receive_frames(socket, MAX_BYTES))
            except WireError:
                continue
            if message.kind == "reply":
                self._silent[server] = 0.0
                self.notices[server] = message.head.get("notice")
                found = str(message.head.get("incarnation"))
                self._incarnations[server] = (self._incarnations.get(server, (found, found))[0], found)


def _dealer(context: _Context, endpoint: str, secret: str | None) -> zmq.Socket[bytes]:
    where = address(endpoint)
    socket = context.socket(zmq.DEALER)
    set_options(socket)
    if secret:
        keys = curve_keys(secret)
        socket.curve_publickey, socket.curve_secretkey = keys["worker"]
        socket.curve_serverkey = keys["server"][0]
    socket.connect(where)
    return socket
