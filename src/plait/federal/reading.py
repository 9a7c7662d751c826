"""What comes on a stream is read by whoever waits for it, and by the stream's own thread when nobody does.

So a tensor that a step waits for does not pass from thread to thread on its way. The stream's thread looks, while
somebody else reads, after his patience: a read from a stream cannot be given up, but the stream can be cut off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from plait.federal.patience import Patience

if TYPE_CHECKING:
    from plait.federal.connection import Connection

__all__ = ["Reading"]

REST_SECONDS = 0.02
"""For how long nobody has to have read before the stream's thread does."""


class Reading:
    """One stream of frames, and whose turn it is to read from it.

    `failed` says in words what went wrong with the stream, given the error; others are not its own, and are raised.
    """

    def __init__(
        self,
        frames: Iterable[bytes],
        connection: Connection,
        failed: Callable[[Exception], str],
        cancel: Callable[[], object],
    ) -> None:
        self._frames: Iterator[bytes] = iter(frames)
        self._connection, self._failed, self._cancel = connection, failed, cancel
        self._turn = threading.Lock()
        """Held by who reads, until what he has read is delivered."""
        self._patience: Patience | None = None
        """Of somebody who waits, and reads."""
        self._reads = 0
        """By those who wait."""
        self._over = threading.Event()
        self.reason = ""
        """How it ended."""

    def begin(self) -> bool:
        """Take the turn if it is free. Called with the session's lock held: so nothing was read and not delivered."""
        return not self._over.is_set() and self._turn.acquire(blocking=False)

    def read(self, patience: Patience) -> None:
        """Read a frame, having taken the turn, and without the session's lock; or learn that there will be none."""
        self._patience = patience
        self._reads += 1
        try:
            self._take()
        finally:
            self._patience = None
            self._turn.release()

    def carry(self) -> str:
        """Read whenever nobody else does, until the stream ends; how it ended."""
        rests = False
        while not self._over.is_set():
            reads = self._reads
            if rests:
                self._over.wait(REST_SECONDS)
                self._look_after()
            if reads == self._reads and self._turn.acquire(blocking=False):
                try:
                    self._take()
                finally:
                    self._turn.release()
            rests = self._connection.invite()
        return self.reason

    def _take(self) -> None:
        if self._over.is_set():
            return
        try:
            data = next(self._frames, None)
            if data is not None:
                self._connection.incoming(data)
                return
            reason = "the other party ended the stream"
        except Exception as error:  # noqa: BLE001 - judged by the transport
            reason = self._failed(error)
        self.reason = self.reason or reason
        self._over.set()
        self._connection.lost(self.reason)

    def _look_after(self) -> None:
        """Say what somebody waits for who cannot say it; cut the stream off when his patience is over."""
        patience, heard = self._patience, self._connection.heard
        if patience is None or patience.seconds(heard) > 0:
            return
        if patience.is_over(heard):
            self._cancel()
        else:
            patience.note()
