"""What tests of links have in common: a channel that only keeps frames, two parties joined by a link, and waits."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from plait.federal.certificates import Credentials
from plait.federal.channel import Channel
from plait.federal.link import Dialer, Listener
from plait.federal.wire import FrameError

from .proxy import Proxy

SECONDS = 10.0
"""No wait of a test is longer."""


def wait_for(look: Callable[[], object], seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


class Post:
    """Stands where a channel does: what is put in goes out once, what comes in is kept. b"bad" is no frame."""

    def __init__(self) -> None:
        self.attached, self.refused = [], ""
        self.got: collections.deque[bytes] = collections.deque()
        self._out: collections.deque[bytes] = collections.deque()
        self._closed = False
        self._news = threading.Condition()

    def attach(self) -> PostConnection:
        with self._news:
            if self.attached:
                self.attached[-1].dropped = True
            self.attached.append(PostConnection(self))
            self._news.notify_all()
            return self.attached[-1]

    def put(self, data: bytes) -> None:
        with self._news:
            self._out.append(data)
            self._news.notify_all()

    def take(self, seconds: float = SECONDS) -> bytes:
        with self._news:
            assert self._news.wait_for(lambda: self.got, seconds), "nothing came"
            return self.got.popleft()

    def refuse(self, text: str) -> None:
        self.refused = text

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()

    def next(self, connection: PostConnection) -> bytes | None:
        with self._news:
            self._news.wait_for(lambda: self._out or connection.dropped or self._closed)
            return self._out.popleft() if self._out and not connection.dropped else None


class PostConnection:
    def __init__(self, post: Post) -> None:
        self._post = post
        self.dropped, self.reasons = False, []
        self.heard, self.reading = 0.0, None

    def invite(self) -> bool:
        return False

    def outgoing(self) -> Iterator[bytes]:
        while (data := self._post.next(self)) is not None:
            yield data

    def incoming(self, data: bytes) -> None:
        if data == b"bad":
            self.lost("a bad frame")
            raise FrameError("the frame is bad")
        with self._post._news:
            if not self.dropped:
                self._post.got.append(data)
                self._post._news.notify_all()

    def lost(self, reason: str) -> None:
        with self._post._news:
            self.dropped = True
            self.reasons.append(reason)
            self._post._news.notify_all()


@contextlib.contextmanager
def linked(
    leader: Channel | Post,
    follower: Channel | Post,
    credentials: tuple[Credentials | None, Credentials | None] = (None, None),
) -> Iterator[Proxy]:
    """The leader listens, the follower dials it through a proxy; all is ended afterwards, first the channels."""
    listener = Listener(leader, "127.0.0.1:0", "follower", credentials[0])
    with contextlib.closing(listener), Proxy(listener.endpoint) as proxy:
        dialer = Dialer(follower, proxy.endpoint, "leader", credentials[1])
        with contextlib.closing(dialer):
            try:
                yield proxy
            finally:
                both(leader.close, follower.close)


def both(first: Callable[[], object], second: Callable[[], object], seconds: float = 60.0) -> list[object]:
    """What two functions return that run side by side."""
    with ThreadPoolExecutor(2) as pool:
        return [future.result(seconds) for future in (pool.submit(first), pool.submit(second))]
