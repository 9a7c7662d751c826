"""The other party of a federation, for a server that lives for months: met again whenever it was away."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

from plait.errors import FederalError, PlaitError, UnavailableError
from plait.federal.channel import Channel
from plait.federal.communicator import Communicator
from plait.federal.settings import Party

__all__ = ["ANSWER", "ASK", "FIRST", "KEYS", "MAX_ROWS", "Peer"]

PROTOCOL = 1
"""Of the words and slots below; frames have a version of their own."""
ASK, ANSWER = "ask", "answer"
"""The words: {"turn", "pair"} rides on the keys; {"turn", "sent": names} or {"turn", "error": kind} answers it."""
KEYS, FIRST = 1, 2
"""The slot of the keys that are asked for, and that of the first tensor of an answer."""
MAX_ROWS = 1 << 16
"""In a question."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before the other party is met again: at first, and at most while it cannot be."""

log = logging.getLogger("plait")


class Peer:
    """A thread that meets the other party and runs `work(channel)` in each session, until it is closed.

    `work` ends with the error that the channel raises when the session is over; `lost` is called then.
    """

    def __init__(self, party: Party, work: Callable[[Channel], None], lost: Callable[[], None]) -> None:
        self._work, self._lost = work, lost
        self._stopping = threading.Event()
        self._pause = FIRST_PAUSE
        self._said = ""
        self._communicator, self._channel = self._connect(party)  # what is wrong with certificates or ports is said now
        self._party = dataclasses.replace(party, listen=self.endpoint) if party.listen is not None else party
        self._thread = threading.Thread(target=self._run, name="plait-peer", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where this party listens, or dials."""
        return self._communicator.endpoint

    def close(self) -> None:
        """End without a word: the other party meets whoever comes next."""
        self._stopping.set()
        self._communicator.vanish()
        self._thread.join()

    def _connect(self, party: Party) -> tuple[Communicator, Channel]:
        made = Communicator(party)
        return made, made.connect(0, {"serving": PROTOCOL, "job": party.job})

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._meet()
            except FederalError as error:
                self._end(str(error))
                self._communicator.fail(str(error))  # takes no longer than a moment, and no news if it has ended
            except Exception as error:
                log.exception("what should not have been")
                self._end(type(error).__name__)
                self._communicator.fail(type(error).__name__)
            while not self._stopping.wait(self._pause):
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                try:
                    self._communicator, self._channel = self._connect(self._party)
                    break
                except PlaitError as error:  # somebody else has the port
                    self._end(str(error))
        self._communicator.vanish()  # `close` may not have seen the last one

    def _meet(self) -> None:
        """One session after another, until there can be none on this channel."""
        while True:
            try:
                self._channel.open()
                self._pause, self._said = FIRST_PAUSE, ""
                self._work(self._channel)
            except UnavailableError as error:
                self._end(str(error))

    def _end(self, why: str) -> None:
        if self._stopping.is_set():
            return
        self._lost()
        if why != self._said:
            log.warning("%s", why)
        self._said = why
