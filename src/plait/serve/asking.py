"""The party that answers clients asks the other one for its part of each prediction."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.errors import DataError, FederalError, UnavailableError
from plait.export.loaded import Loaded
from plait.federal.channel import Channel
from plait.federal.settings import Party
from plait.serve.peer import ANSWER, ASK, FIRST, KEYS, MAX_ROWS, Peer
from plait.serve.protocol import DATATYPES, Spec, Tensors, specs_of

__all__ = ["Asker", "Whole"]

GRACE_SECONDS = 1.0
"""For how long a connection that broke may take to come back before clients are told."""
MAX_TENSORS = 1000
"""In an answer."""
_NO_KEYS = torch.zeros(0, dtype=torch.int64)


class Asker:
    """Asks the other party; threads may ask at the same time. Every wait is bounded, and ends with UnavailableError.

    When an answer is late, nobody else asks until it has come, or the other party has: it is slow or stands still, and
    questions would pile up.
    """

    def __init__(self, party: Party, seconds: float) -> None:
        self.peer = party.peer_role
        self._seconds = seconds
        self._news = threading.Condition()
        self._channel: Channel | None = None
        self._sending = threading.Lock()
        self._turns = itertools.count(1)
        self._asked: dict[int, Future[dict[str, Tensor]]] = {}
        self._late: set[int] = set()
        self._party = Peer(party, self._hear, self._lost)

    @property
    def endpoint(self) -> str:
        return self._party.endpoint

    @property
    def ready(self) -> bool:
        """Whether the other party is there, and has answered all in time."""
        channel = self._channel
        return channel is not None and channel.connected and not self._late

    def close(self) -> None:
        self._party.close()

    def ask(self, pair: str, keys: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """What the other party's part of `pair` gives for its rows of these keys, by name. No keys: is it there?"""
        turn, answer = self._send(self._ready(), pair, torch.from_numpy(keys) if len(keys) else _NO_KEYS)
        try:
            found = answer.result(self._seconds)
        except FutureTimeoutError:
            with self._news:
                if turn in self._asked:
                    self._late.add(turn)
            raise UnavailableError(f"the {self.peer} did not answer within {self._seconds:g} s") from None
        return {name: tensor.numpy() for name, tensor in found.items()}

    def _send(self, channel: Channel, pair: str, keys: Tensor) -> tuple[int, Future[dict[str, Tensor]]]:
        answer: Future[dict[str, Tensor]] = Future()
        with self._sending:  # turns go out in their order, so that those before one that came can be forgotten
            turn = next(self._turns)
            with self._news:
                self._asked[turn] = answer
            try:
                channel.send(KEYS, turn, keys, words=[(ASK, {"turn": turn, "pair": pair})])
            except (FederalError, UnavailableError) as error:
                with self._news:
                    self._asked.pop(turn, None)
                raise self._away() from error
        return turn, answer

    def _ready(self) -> Channel:
        until = time.monotonic() + min(GRACE_SECONDS, self._seconds)
        with self._news:
            while True:
                channel = self._channel
                if self._late:
                    raise UnavailableError(f"the {self.peer} is late with an answer: ask again in a moment")
                if channel is not None and channel.connected:
                    return channel
                left = until - time.monotonic()
                if left <= 0:
                    raise self._away()
                self._news.wait(min(left, 0.02))  # nobody tells of a connection that is back

    def _away(self) -> UnavailableError:
        return UnavailableError(f"the {self.peer}, whose part of the model is needed, cannot be reached just now")

    # ---- in the peer's thread

    def _hear(self, channel: Channel) -> None:
        with self._news:
            self._channel = channel
            self._news.notify_all()
        while True:
            self._take(channel, channel.hear(ANSWER))

    def _take(self, channel: Channel, word: Any) -> None:
        turn = word.get("turn") if isinstance(word, dict) else None
        with self._news:
            answer = self._asked.pop(turn, None) if type(turn) is int else None
            self._late.discard(turn or 0)
        if answer is None or turn is None:
            raise FederalError(f"the {self.peer} answered what nobody has asked")
        try:
            answer.set_result(self._tensors(channel, turn, word))
        except (DataError, UnavailableError, RuntimeError) as error:
            answer.set_exception(error)
        channel.forget(turn + 1)  # answers come in the order of questions

    def _tensors(self, channel: Channel, turn: int, word: Mapping[str, Any]) -> dict[str, Tensor]:
        kind, names = word.get("error"), word.get("sent")
        if kind == "rows":
            raise DataError(f"the {self.peer} does not have all of these rows: ask for those that both parties have")
        if kind == "pair":
            raise UnavailableError(
                f"the {self.peer} has no part that belongs to this version: both have to be served from one export"
            )
        if kind is not None:
            raise RuntimeError(f"the {self.peer}'s part failed")
        if not isinstance(names, list) or len(names) > MAX_TENSORS or not all(isinstance(name, str) for name in names):
            raise RuntimeError(f"the {self.peer} answered without saying what it sent")
        found = {name: channel.receive(FIRST + place, turn) for place, name in enumerate(names)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _lost(self) -> None:
        with self._news:
            asked, self._asked = list(self._asked.values()), {}
            self._late.clear()
            self._channel = None
            self._news.notify_all()
        for answer in asked:
            answer.set_exception(self._away())


class Whole:
    """A part that receives, and the other party that sends: to a client one model, with an input for the rows' keys."""

    def __init__(self, loaded: Loaded, asker: Asker) -> None:
        party = loaded.about["party"]
        self._loaded, self._asker = loaded, asker
        self._pair: str = party["pair"]
        self._key: str = party["key"]
        specs = specs_of(loaded.about["inputs"])
        self._receives = {specs[place]: name for place, name in party["receives"].items()}
        self.inputs = {name: spec for name, spec in specs.items() if name not in party["receives"]}
        self.inputs[self._key] = Spec(self._key, *DATATYPES["int64"], (None,))

    def check(self) -> None:
        """Is the other party there, with the part that belongs to this one? UnavailableError if not."""
        self._asker.ask(self._pair, np.zeros(0, np.int64))

    def run(self, inputs: Tensors) -> Tensors:
        keys = inputs[self._key]
        if len(keys) > MAX_ROWS:  # with which the other party would end the session, and everybody's answers
            raise DataError(f"the request has {len(keys)} rows: ask for {MAX_ROWS} at most")
        found = self._asker.ask(self._pair, np.array(keys, np.int64))
        given = {name: value for name, value in inputs.items() if name != self._key}
        for spec, name in self._receives.items():
            value = found.get(name)
            if value is None or value.dtype != spec.dtype or not spec.fits(value.shape) or len(value) != len(keys):
                raise UnavailableError(f"the {self._asker.peer}'s {name!r} is not what this version receives")
            given[spec.name] = value
        return self._loaded.run(given)
