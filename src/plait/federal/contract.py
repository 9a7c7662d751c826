"""The contract: which tensors travel, found out by both parties during the build, before any of them does.

Each party announces what its functions send and receive, in the order in which they do, with forms but no values; a
receive of the build gets zeros of the form that the other announced. At the end both compare.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from plait.engine.task import TaskScope
from plait.errors import FederalError, FunctionError, UnavailableError
from plait.federal.channel import Channel
from plait.federal.difference import side_by_side

__all__ = ["MEETINGS", "TOPIC", "Contract", "Item", "dtype_of", "key_of", "read_item"]

MEETINGS = 10
"""How often in a row a peer that starts anew is met again."""
MAX_BYTES = 1 << 30
"""Of one tensor; a frame holds no more."""
TOPIC = "build"
"""What announcements are told under."""

log = logging.getLogger("plait")


def key_of(scope: TaskScope) -> str:
    """A task in a mode, as both parties write it."""
    return f"{scope.mode}:{scope.task if scope.task is not None else ''}"


@dataclass(frozen=True)
class Item:
    """One tensor that a function sends or receives."""

    kind: str
    """"send" or "recv"."""
    name: str
    dtype: str
    gradient: bool
    shape: list[int | None] | None
    """The first dimension is None, since batches may be short; None for all: whatever comes."""
    rows: int = 0
    """The first dimension, in the build."""

    def sizes(self) -> tuple[int, ...]:
        """The shape in the build."""
        return tuple(self.rows if size is None else size for size in self.shape or ())


class Contract:
    """What both parties have announced."""

    def __init__(self, own: str, peer: str) -> None:
        self._own, self._peer = own, peer
        self._ours: list[dict[str, Any]] = []
        """Every announcement of this party, as it was told."""
        self._scopes: dict[str, dict[str, dict[str, Item]]] = {own: {}, peer: {}}
        """By party, scope, and kind and name."""
        self._rows: dict[str, dict[str, int | None]] = {own: {}, peer: {}}
        self._waiting: dict[str, Any] | None = None
        """What the peer announced last, if it waits for it."""
        self._peer_built = False
        self._theirs: dict[str, dict[str, Item]] = {}
        """What the peer had announced at the end of the build."""
        self.slots: dict[tuple[str, str, str], int] = {}
        """The number of each tensor: (scope, who sends it, name)."""
        self.meet: Callable[[], None] = lambda: None
        """Begins a new session, when the peer was started anew during the build."""

    # ---- the build

    def begin(self, channel: Channel, key: str, rows: int | None) -> None:
        """A function is called for the first time, with a batch of so many rows."""
        if key not in self._rows[self._own]:
            self._announce(channel, {"scope": key, "rows": rows})

    def add(self, channel: Channel, key: str, item: Item) -> None:
        known = self._scopes[self._own].get(key, {})
        if f"{item.kind} {item.name}" in known:
            raise FunctionError(
                f"{item.kind} of {item.name!r} twice in one call for {_where(key)}: give each tensor a name of its own"
            )
        self._announce(channel, {"scope": key, "item": asdict(item)})

    def form(self, channel: Channel, key: str, name: str) -> Item:
        """The form of what the peer sends under that name; waits for its announcement."""
        while True:
            found = self._scopes[self._peer].get(key, {}).get(f"send {name}")
            if found is not None:
                self._differ(*[self._facts(party, key, [(self._peer, name)]) for party in (self._own, self._peer)])
                return found
            if self._peer_built:
                raise FederalError(self._unsent(self._own, key, name))
            if self._waiting is not None and not self._sent(self._waiting):
                raise FederalError(self._stuck(key, name))
            self._hear(channel, f"the announcement of {name!r} in {_where(key)}")

    def finish(self, channel: Channel) -> None:
        """The build is done: compare all, and number the tensors."""
        self._announce(channel, {"built": True})
        while not self._peer_built:
            self._hear(channel, "the end of its build")
        self._compare()
        self._theirs = self._scopes[self._peer]
        names = [
            (key, party, item.name)
            for party, scopes in self._scopes.items()
            for key, items in scopes.items()
            for item in items.values()
            if item.kind == "send"
        ]
        self.slots = {name: number for number, name in enumerate(sorted(names), start=1)}

    def repeat(self, channel: Channel) -> None:
        """The peer has started anew, and builds: tell it all again, and compare what it tells."""
        self._tell_all(channel)
        while not self._peer_built:
            self._take(channel.hear(TOPIC, "its build"))
        self._compare()
        if self._scopes[self._peer] != self._theirs:
            raise FederalError(f"the {self._peer} came back with another program: its tensors are not those of before")

    def _tell_all(self, channel: Channel) -> None:
        self._scopes[self._peer], self._rows[self._peer] = {}, {}
        self._peer_built, self._waiting = False, None
        for announcement in self._ours:
            channel.tell(TOPIC, announcement)

    def _announce(self, channel: Channel, announcement: dict[str, Any]) -> None:
        self._ours.append(announcement)
        self._note(self._own, announcement)
        try:
            channel.tell(TOPIC, announcement)
        except UnavailableError as error:
            self._begin_again(channel, error)

    def _hear(self, channel: Channel, what: str) -> None:
        try:
            self._take(channel.hear(TOPIC, what))
        except UnavailableError as error:
            self._begin_again(channel, error)

    def _begin_again(self, channel: Channel, error: UnavailableError) -> None:
        """The peer builds anew from its beginning; this party goes on where it is."""
        for _ in range(MEETINGS):
            log.warning("%s; it is met again", error)
            try:
                self.meet()
                return self._tell_all(channel)
            except UnavailableError as another:
                error = another
        raise error

    def _take(self, announcement: Any) -> None:
        try:
            if "built" in announcement:
                self._peer_built = True
            else:
                self._note(self._peer, announcement)
            item = announcement.get("item", {})
            self._waiting = announcement if item.get("kind") == "recv" else None
        except (TypeError, KeyError, AttributeError) as error:
            raise FederalError(f"the {self._peer} announced what is no announcement") from error

    def _note(self, party: str, announcement: Mapping[str, Any]) -> None:
        scope = _checked(announcement["scope"], str) if "built" not in announcement else ""
        if "rows" in announcement:
            self._rows[party][scope] = announcement["rows"]
        if "item" in announcement:
            item = read_item(announcement["item"])
            self._scopes[party].setdefault(scope, {})[f"{item.kind} {item.name}"] = item

    def _sent(self, announcement: Mapping[str, Any]) -> bool:
        return f"send {announcement['item']['name']}" in self._scopes[self._own].get(announcement["scope"], {})

    def _stuck(self, key: str, name: str) -> str:
        """Each waits for the other; who is further on in the build never sends what the other one waits for."""
        assert self._waiting is not None  # noqa: S101 - asked before
        theirs, wanted = self._waiting["scope"], self._waiting["item"]["name"]
        if theirs == key:
            return (
                f"both parties wait for each other in {_where(key)}: the {self._own} for {name!r}, the {self._peer} "
                f"for {wanted!r}; one of them has to send first"
            )
        if theirs in self._rows[self._own]:
            return self._unsent(self._peer, theirs, wanted)
        return self._unsent(self._own, key, name)

    def _unsent(self, receiver: str, key: str, name: str) -> str:
        sender = self._peer if receiver == self._own else self._own
        sends = [item.name for item in self._scopes[sender].get(key, {}).values() if item.kind == "send"]
        there = ", ".join(repr(one) for one in sends) or "nothing"
        return f"the {receiver} receives {name!r} in {_where(key)}, which the {sender} never sends: it sends {there}"

    # ---- comparing

    def _compare(self) -> None:
        self._differ(self._seen_by(self._own), self._seen_by(self._peer))

    def _differ(self, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        found = side_by_side(self._own, ours, self._peer, theirs)
        if found is not None:
            raise FederalError(f"the two parties do not fit together:\n{found}")

    def _seen_by(self, party: str) -> dict[str, Any]:
        """Every tensor as one party has it: by who sends it, so that both say the same where they agree."""
        found: dict[str, Any] = {}
        for key in {**self._scopes[self._own], **self._scopes[self._peer]}:
            tensors = [(sender, name) for sender in (self._own, self._peer) for name in self._names(key, sender)]
            found |= self._facts(party, key, tensors)
        return found

    def _facts(self, party: str, key: str, tensors: Iterable[tuple[str, str]]) -> dict[str, Any]:
        """What one party says of a scope, and of tensors in it, each by who sends it and its name."""
        found: dict[str, Any] = {}
        where = _where(key)
        if key in self._scopes[self._own] and key in self._scopes[self._peer]:
            found[f"{where} rows of a batch"] = self._rows[party].get(key)
        for sender, name in tensors:
            kind = "send" if party == sender else "recv"
            item = self._scopes[party].get(key, {}).get(f"{kind} {name}")
            found[f"{where} {name!r} of the {sender}"] = self._described(item, key, sender, name)
        return found

    def _names(self, key: str, sender: str) -> list[str]:
        """What a party sends, or the other one expects of it."""
        own = [item.name for item in self._scopes[sender].get(key, {}).values() if item.kind == "send"]
        receiver = self._peer if sender == self._own else self._own
        expected = [item.name for item in self._scopes[receiver].get(key, {}).values() if item.kind == "recv"]
        return sorted({*own, *expected})

    def _described(self, item: Item | None, key: str, sender: str, name: str) -> str:
        if item is None:
            return "missing"
        sent = self._scopes[sender].get(key, {}).get(f"send {name}")
        shape = item.shape
        if item.kind == "recv" and sent is not None and sent.shape is not None:
            shape = _filled(shape, sent.shape)
        sizes = "" if shape is None else f" [{', '.join('*' if size is None else str(size) for size in shape)}]"
        return f"{item.dtype}{sizes}, {'with' if item.gradient else 'without'} gradient"

    # ---- afterwards

    def check_one_way(self, party: str) -> None:
        """With staleness, this party must not wait for gradients of the other in the middle of a step."""
        for key, items in self._scopes[party].items():
            for item in items.values():
                if item.kind == "send" and item.gradient:
                    raise FederalError(
                        f"staleness=1, and the {party} sends {item.name!r} in {_where(key)} with require_grad=True: "
                        "its gradient would come a step late; leave staleness out, or send only from the other party"
                    )

    def shared(self, key: str) -> bool:
        """Whether tensors travel in this task and mode."""
        return any(self._scopes[party].get(key) for party in self._scopes)

    def gives_back(self, key: str) -> bool:
        """Whether this party sends gradients in this task and mode."""
        return any(item.kind == "send" and item.gradient for item in self._scopes[self._peer].get(key, {}).values())

    def forms(self) -> dict[int, tuple[torch.dtype, tuple[int, ...]]]:
        """The form of each tensor, by its number; the first dimension is free."""
        return {
            number: (dtype_of(item.dtype), item.sizes())
            for (key, party, name), number in self.slots.items()
            for item in [self._scopes[party][key][f"send {name}"]]
        }


def _where(key: str) -> str:
    """A scope's key as people read it."""
    mode, _, task = key.partition(":")
    return f"{mode} {task}" if task else mode


def read_item(value: Any) -> Item:
    """The item in an announcement; TypeError if it is none. What is made of it in the build is bounded."""
    item = Item(**value)
    for part, kind in ((item.name, str), (item.dtype, str), (item.gradient, bool), (item.rows, int)):
        _checked(part, kind)
    for size in _checked(item.shape, list) if item.shape is not None else ():
        _checked(0 if size is None else size, int)
    if item.kind not in ("send", "recv") or min((0, *item.sizes())) < 0 or (item.kind == "send" and item.shape is None):
        raise TypeError("no kind, or no shape, of a tensor")
    if item.kind == "send" and math.prod(item.sizes()) * dtype_of(item.dtype).itemsize > MAX_BYTES:
        raise FederalError(f"{item.name!r:.40} is announced with shape {list(item.sizes())}: that is too large to send")
    return item


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _filled(wanted: list[int | None] | None, sent: list[int | None]) -> list[int | None]:
    """The shape that a receive asks for, with what was sent where it leaves a size open."""
    if wanted is None or len(wanted) != len(sent):
        return sent if wanted is None else wanted
    return [size if mine is None else mine for mine, size in zip(wanted, sent, strict=True)]


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FederalError(f"{name!r:.40} is announced as the dtype of a tensor, and is none")
    return found
