"""What two parties say to each other to find what they have in common.

Each sends its points (its keys, hashed to the curve and multiplied by its secret) in rising order. The other one
multiplies them by its own secret, and sends them back in the same order; or, if only sizes may be known, when it has
all of them, in rising order. Who has both parties' points, multiplied by both, sees which are equal. All that has come
is on disk before it is counted as done, so that a party that was killed goes on there.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait.errors import FederalError, UnavailableError
from plait.federal.channel import Channel
from plait.psi.curve import POINT_BYTES
from plait.psi.journal import Journal
from plait.psi.matching import Matched, match
from plait.psi.points import Bytes, check, check_rising, order
from plait.psi.pool import Pool
from plait.psi.preparing import Own
from plait.psi.spill import bits_for, buckets

__all__ = ["REVEAL", "Exchange"]

REVEAL = ("both", "leader", "sizes")
"""Who learns which rows are common: both parties, the leader alone, or nobody, and both learn how many they are."""
POINTS, ANSWERS = 1, 2
"""The slots of a party's points, and of the other's points that it has multiplied."""
MOST_ROWS = 1 << 40
AHEAD = 6
"""How many batches of points may be under way before their answers: points that fill a window would leave no room for
answers, and both parties would wait for each other. So the answer to a batch never waits for more than these."""

log = logging.getLogger("plait")


@dataclass(frozen=True)
class _Peer:
    """Where the other party stands."""

    run: str
    rows: int
    have: int
    """Batches of this party's points that it has multiplied."""
    answers: int
    """Batches of answers that it has."""
    agreed: dict[str, Any] | None
    """What it has found, once it knows that this party has found the same."""


class Exchange:
    """One party's side. `say` hears of progress: what, how much, of how much."""

    def __init__(
        self,
        channel: Channel,
        journal: Journal,
        pool: Pool,
        *,
        reveal: str,
        batch: int,
        say: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        self._channel, self._journal, self._pool = channel, journal, pool
        self._batch, self._say = batch, say
        self._peer_name = channel.peer
        self._sizes = reveal == "sizes"
        self._answers = reveal != "leader" or channel.own == "follower"
        self._learns = reveal != "leader" or channel.own == "leader"
        self._collected = threading.Condition()
        self._collecting = False
        self._theirs, self._mine = journal.batches("theirs"), journal.batches("mine")
        form = (torch.uint8, (0, POINT_BYTES))
        channel.expect({POINTS: form, ANSWERS: form})

    # ---- the parts of a run, each of which may be interrupted

    def meet(self, own: Own) -> _Peer:
        """Say where this party stands, and hear where the other one does."""
        agreed = self._journal.load("agreed")
        stand = {
            "run": self._journal.run,
            "rows": own.count,
            "have": self._theirs.done,
            "answers": self._mine.done,
            "agreed": agreed,
        }
        self._channel.tell("psi", stand)
        peer = self._read_peer(self._channel.hear("psi", "its keys to be ready"), own)
        known = self._journal.load("peer")
        now = {"run": peer.run, "rows": peer.rows}
        if known is None:
            self._journal.save("peer", now)
        elif known != now:
            raise FederalError(
                f"the {self._peer_name} has begun another run, and this party is in the middle of one with it: let it "
                "go on in the directory where it was, or begin anew at both, in empty directories"
            )
        return peer

    def swap(self, own: Own, peer: _Peer) -> None:
        """Send, multiply, receive: until both have all that they need."""
        self._collecting = self._learns and not self._sizes
        ways: list[Callable[[], None]] = [lambda: self._send(own, peer), lambda: self._multiply(peer)]
        if self._learns:
            ways.append(lambda: self._collect(own))
        with ThreadPoolExecutor(len(ways), thread_name_prefix="plait-psi-exchange") as threads:
            under_way = [threads.submit(way) for way in ways]
            wait(under_way, return_when=FIRST_EXCEPTION)
            failed = [error for one in under_way if one.done() and (error := one.exception()) is not None]
            if failed and not isinstance(failed[0], UnavailableError):  # the others would wait for ever
                self._channel.fail(str(failed[0]) if isinstance(failed[0], FederalError) else type(failed[0]).__name__)
        if failed:
            raise failed[0]

    def find(self, own: Own, peer: _Peer) -> Matched | None:
        """What is common; None if this party is not to know."""
        if self._theirs.done != -(-peer.rows // self._batch) or (self._learns and self._mine.done != own.batches):
            raise FederalError(f"the {self._peer_name} has ended this run already, and here batches of it are missing")
        self._say("matching", 0, 1)
        found = match(
            self._mine,
            own.row_numbers() if self._learns else np.empty(0, np.uint64),
            self._theirs,
            own.count + peer.rows,
            self._journal.directory / "matching",
            self._peer_name,
        )
        self._say("matching", 1, 1)
        return found if self._learns else None  # who learns nothing has looked for repeated points alone

    def agree(self, found: dict[str, Any], peer: _Peer) -> None:
        """Make sure that both have found the same."""
        if peer.agreed is None:
            self._channel.tell("agree", found)
            theirs = self._channel.hear("agree", "what it has found")
        else:
            theirs = peer.agreed
        if theirs != found:
            raise FederalError(
                f"the {self._channel.own} and the {self._peer_name} have not found the same rows in common: one of "
                "them has not followed the protocol, or its memory or disk is broken"
            )
        self._journal.save("agreed", found)

    def part(self) -> None:
        """Both have all that they need of each other."""
        self._channel.tell("kept", True)
        self._channel.hear("kept", "it to have all that it needs")

    # ---- three ways at once

    def _send(self, own: Own, peer: _Peer) -> None:
        for number in range(peer.have, own.batches):
            with self._collected:
                self._collected.wait_for(lambda: not self._collecting or number < self._mine.done + AHEAD)  # noqa: B023 - it is asked at once
            self._channel.send(POINTS, number, _tensor(own.read(number)))

    def _multiply(self, peer: _Peer) -> None:
        """Multiply the other party's points, a few batches at once."""
        if self._answers and not self._sizes:
            for number in range(peer.answers, self._theirs.done):
                self._channel.send(ANSWERS, number, _tensor(self._theirs.read(number)))
        under_way: deque[list[Future[bytes]]] = deque()
        most = min(self._pool.workers, AHEAD - 1)
        batches = -(-peer.rows // self._batch)
        before: Bytes | None = None
        self._say("multiplying", min(self._theirs.done * self._batch, peer.rows), peer.rows)
        for number in range(self._theirs.done, batches):
            points = self._receive(POINTS, number, min(self._batch, peer.rows - number * self._batch))
            check_rising(points, before, self._name(POINTS))
            before = points
            parts = np.array_split(points, -(-self._pool.workers // most))  # of more cores, each has its part
            under_way.append([self._pool.multiply(part.tobytes()) for part in parts])
            if len(under_way) > most:
                self._finish(under_way.popleft(), peer)
        while under_way:
            self._finish(under_way.popleft(), peer)
        if self._sizes:
            self._answer_sorted(peer)

    def _finish(self, parts: list[Future[bytes]], peer: _Peer) -> None:
        try:
            points = b"".join([part.result() for part in parts])
        except ValueError:
            raise FederalError(f"{self._name(POINTS)} hold a point of low order: they are refused") from None
        number = self._theirs.done
        self._theirs.add(points)
        if self._answers and not self._sizes and number >= peer.answers:
            self._channel.send(ANSWERS, number, _tensor(points))
        self._say("multiplying", min(self._theirs.done * self._batch, peer.rows), peer.rows)

    def _answer_sorted(self, peer: _Peer) -> None:
        """In rising order, nothing tells which answer belongs to which point."""
        directory = self._journal.directory / "answering"
        whole = (bucket[order(bucket)] for bucket in buckets(self._theirs, POINT_BYTES, bits_for(peer.rows), directory))
        for number, points in enumerate(_regrouped(whole, self._batch)):
            if number >= peer.answers:
                self._channel.send(ANSWERS, number, _tensor(points.tobytes()))

    def _collect(self, own: Own) -> None:
        """Take the answers to this party's own points."""
        before: Bytes | None = None
        try:
            for number in range(self._mine.done, own.batches):
                points = self._receive(ANSWERS, number, own.size(number))
                if self._sizes:
                    check_rising(points, before, self._name(ANSWERS))
                    before = points
                with self._collected:
                    self._mine.add(points.tobytes())
                    self._collected.notify_all()
        finally:
            with self._collected:
                self._collecting = False
                self._collected.notify_all()

    # ---- what comes

    def _receive(self, slot: int, number: int, size: int) -> Bytes:
        what = f"batch {number} of {self._name(slot)}"
        found = self._channel.receive(slot, number, what=what)
        if found is None or len(found) != size:
            count = "no" if found is None else str(len(found))
            raise FederalError(f"{what} has {count} points, and {size} were announced: it is refused")
        points = found.numpy()
        check(points, self._name(slot))
        return points

    def _name(self, slot: int) -> str:
        return f"the {self._peer_name}'s {'points' if slot == POINTS else 'answers'}"

    def _read_peer(self, value: Any, own: Own) -> _Peer:
        """Nothing that comes is believed before it is looked at."""
        try:
            peer = _Peer(**value)
            batches = -(-peer.rows // self._batch)
            counts = (peer.rows, MOST_ROWS), (peer.have, own.batches), (peer.answers, batches)
            good = all(type(count) is int and 0 <= count <= most for count, most in counts)
            good = (
                good
                and isinstance(peer.run, str)
                and len(peer.run) <= 64
                and peer.run.isascii()
                and isinstance(peer.agreed, (dict, type(None)))
            )
        except TypeError:
            good = False
        if not good:
            raise FederalError(
                f"the {self._peer_name} says of itself what cannot be: wrong counts, or another protocol"
            )
        return peer


def _tensor(points: bytes) -> torch.Tensor:
    if not points:
        return torch.empty((0, POINT_BYTES), dtype=torch.uint8)
    return torch.frombuffer(bytearray(points), dtype=torch.uint8).view(-1, POINT_BYTES)


def _regrouped(pieces: Iterator[Bytes], size: int) -> Iterator[Bytes]:
    """The same rows, in batches of one size."""
    kept = np.empty((0, POINT_BYTES), np.uint8)
    for piece in pieces:
        kept = np.concatenate([kept, piece])
        whole = len(kept) - len(kept) % size
        for first in range(0, whole, size):
            yield kept[first : first + size]
        kept = kept[whole:]
    if len(kept):
        yield kept
