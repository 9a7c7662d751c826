"""Two channels joined within one process, for tests and notebooks, through the same wire code as any others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from plait.federal.channel import Channel, Connection
from plait.federal.wire import FrameError

__all__ = ["Joined", "Meddle", "join"]

Meddle = Callable[[str, bytes], Iterable[bytes] | None]
"""For tests: (the sender's name, a frame) to the frames that arrive in its stead, or None: the connection breaks."""
RETRY_SECONDS = 0.01
"""Between two connections, so that parties that do not fit together do not keep a processor busy."""


class Joined:
    """Carries frames both ways until both channels are closed; a connection that ends is made anew."""

    def __init__(self, one: Channel, other: Channel, meddle: Meddle | None = None) -> None:
        self._one, self._other, self._meddle = one, other, meddle
        self._changed = threading.Condition()
        self._cut = self._closed = False
        self._ends: tuple[Connection, ...] = ()
        self._thread = threading.Thread(target=self._run, name="plait-loopback", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Break the connection, and make no new one; what is under way is lost."""
        with self._changed:
            self._cut = True
            ends = self._ends
        _lose(ends, "it was cut")

    def restore(self) -> None:
        """Let there be a connection again."""
        with self._changed:
            self._cut = False
            self._changed.notify_all()

    def close(self) -> None:
        """Carry nothing more, and end the threads. Close the channels first, so that all they said arrives."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            ends = self._ends
        _lose(ends, "the link is closed")
        self._thread.join()

    def _run(self) -> None:
        while self._may_connect():
            one, other = self._ends
            back = threading.Thread(
                target=self._carry, args=(self._other.own, other, one), name="plait-loopback-back", daemon=True
            )
            back.start()
            self._carry(self._one.own, one, other)
            back.join()

    def _may_connect(self) -> bool:
        """Wait until there may be a connection, and attach it; False: there will be none."""
        with self._changed:
            while not self._closed and not (self._one.closed and self._other.closed):
                self._changed.wait(RETRY_SECONDS)
                if not (self._cut or self._closed or self._one.closed or self._other.closed):
                    self._ends = (self._one.attach(), self._other.attach())
                    return True
        return False

    def _carry(self, name: str, source: Connection, target: Connection) -> None:
        with contextlib.suppress(FrameError):  # the target has dropped the connection
            for data in source.outgoing():
                arriving = (data,) if self._meddle is None else self._meddle(name, data)
                if arriving is None or source.dropped:
                    break
                for frame in arriving:
                    target.incoming(frame)
        _lose((source, target), "the other side ended it")


def join(one: Channel, other: Channel, *, meddle: Meddle | None = None) -> Joined:
    """Join two channels; daemon threads carry their frames until both are closed."""
    return Joined(one, other, meddle)


def _lose(ends: Iterable[Connection], reason: str) -> None:
    for end in ends:
        end.lost(reason)
