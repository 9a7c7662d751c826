"""The party that answers no clients, only the other party: its part of a prediction, from its own rows."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plait.errors import DataError, FederalError, PlaitError
from plait.export.describe import read_about
from plait.export.loaded import Loaded, load, versions
from plait.federal.channel import Channel
from plait.federal.settings import Party
from plait.serve.models import find_models
from plait.serve.peer import ANSWER, ASK, FIRST, KEYS, MAX_ROWS, Peer
from plait.serve.protocol import Tensors
from plait.serve.rows import Rows
from plait.serve.settings import Settings

__all__ = ["Answerer", "Parts"]

KEPT = 4
"""Parts that are kept open: those of old versions are asked for until the other party has swapped its own."""

log = logging.getLogger("plait")


class Parts:
    """The parts of a directory, by the pairs that they belong to. The newest of each model is opened at once."""

    def __init__(self, directory: str | os.PathLike[str], settings: Settings) -> None:
        self._directory, self._settings = directory, settings
        self._opened: OrderedDict[str, Loaded] = OrderedDict()
        self._places: dict[str, Path] = {}
        self._looked = 0.0
        newest = self._look()
        for pair in newest:
            self.get(pair)
        if not newest:
            raise DataError(
                f"{directory} has no part that sends: name the directory that this party's export_part wrote to"
            )

    @property
    def key(self) -> str:
        """The name of the rows' keys."""
        names: set[str] = {loaded.about["party"]["key"] for loaded in self._opened.values()}
        if len(names) > 1:
            raise DataError(f"the parts name the keys of rows {', '.join(sorted(names))}: serve them one by one")
        return names.pop()

    def get(self, pair: str) -> Loaded | None:
        """The part of a pair; looks for new versions if it is not known, but not all the time."""
        found = self._opened.get(pair)
        if found is not None:
            self._opened.move_to_end(pair)
            return found
        if pair not in self._places and time.monotonic() - self._looked >= self._settings.poll:
            self._look()
        place = self._places.get(pair)
        if place is None:
            return None
        found = load(place, format=self._settings.format, threads=self._settings.threads)
        log.info("%s: the part of version %s is served", place.parent.name, place.name)
        self._opened[pair] = found
        while len(self._opened) > KEPT:
            self._opened.popitem(last=False)
        return found

    def _look(self) -> list[str]:
        """Find all parts; the pairs of the newest version of each model."""
        self._looked = time.monotonic()
        newest: list[str] = []
        places: dict[str, Path] = {}
        for folder in find_models(self._directory).values():
            pairs = {version: _pair(folder / version) for version in versions(folder)}
            places |= {pair: folder / version for version, pair in pairs.items() if pair is not None}
            last = next(reversed(pairs.values()))
            newest += [last] if last is not None else []
        self._places = places
        return newest


def _pair(folder: Path) -> str | None:
    party = read_about(folder, digests=False).get("party")
    return party["pair"] if isinstance(party, dict) and party.get("sends") else None


class Answerer:
    """Answers the other party, one question after the other, in a thread of its own."""

    def __init__(self, party: Party, parts: Parts, rows: Rows, *, batch: int) -> None:
        self._parts, self._rows, self._batch = parts, rows, batch
        self._peer = party.peer_role
        self._party = Peer(party, self._work, lambda: None)

    @property
    def endpoint(self) -> str:
        return self._party.endpoint

    def close(self) -> None:
        self._party.close()

    def _work(self, channel: Channel) -> None:
        channel.expect({KEYS: (torch.int64, (0,))})
        while True:
            word = channel.hear(ASK)
            turn, pair = (word.get("turn"), word.get("pair")) if isinstance(word, dict) else (None, None)
            if type(turn) is not int or not isinstance(pair, str):
                raise FederalError(f"the {self._peer} asked what is no question")
            keys = channel.receive(KEYS, turn)
            channel.forget(turn + 1)
            if keys is None or len(keys) > MAX_ROWS:
                raise FederalError(f"the {self._peer} asked for more than {MAX_ROWS} rows at once, or for none")
            answer = self._answer(pair, keys.numpy())
            if isinstance(answer, str):
                channel.tell(ANSWER, {"turn": turn, "error": answer})
            else:
                _send(channel, turn, answer)

    def _answer(self, pair: str, keys: NDArray[np.int64]) -> Tensors | str:
        """The tensors, or the kind of what went wrong: its text may have values in it."""
        try:
            loaded = self._parts.get(pair)
            if loaded is None:
                return "pair"
            return self._computed(loaded, keys) if len(keys) else {}
        except LookupError:
            return "rows"
        except PlaitError as error:
            log.warning("a question could not be answered: %s", error)
        except Exception as error:  # noqa: BLE001 - whatever a model or a source of rows raises, the server goes on
            log.warning("a question could not be answered: %s", type(error).__name__)
        return "failed"

    def _computed(self, loaded: Loaded, keys: NDArray[np.int64]) -> Tensors:
        names: list[str] = loaded.about["party"]["sends"]
        wanted = [one["name"] for one in loaded.about["inputs"]]
        pieces: list[dict[str, Any]] = []
        for start in range(0, len(keys), self._batch):
            rows = self._rows(keys[start : start + self._batch])
            lacks = [name for name in wanted if name not in rows]
            if lacks:
                raise DataError(f"rows has no {lacks[0]!r}: give every input of the part, by its name")
            pieces.append(loaded.run({name: rows[name] for name in wanted}))
        if len(pieces) == 1:
            return {name: pieces[0][name] for name in names}
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in names}


def _send(channel: Channel, turn: int, answer: Tensors) -> None:
    """The tensors; the word that says which they are rides on the last."""
    word = (ANSWER, {"turn": turn, "sent": list(answer)})
    if not answer:
        channel.tell(*word)
    for place, value in enumerate(answer.values()):
        words = [word] if place == len(answer) - 1 else []
        channel.send(FIRST + place, turn, torch.from_numpy(np.ascontiguousarray(value)), words=words)
