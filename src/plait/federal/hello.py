"""What a party says of itself on every connection, and the names of lives and sessions.

A party's life is a random text, made with its channel, and a count that every new session raises: "8f2c01d6a9b47e35:3".
Two lives make a session.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plait.federal.wire import FrameError

__all__ = ["Hello", "is_older", "name_session", "read_hello"]

_LIFE = re.compile(r"[0-9a-f]{1,64}:[0-9]{1,18}")
_MAX_NAME = 200


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The value of a HELLO."""

    party: str
    life: str
    fresh: bool
    """It is about to begin a session: neither in one, nor with a session behind it that was lost."""
    peer: str | None
    """The other party's life that it is in a session with, or, if it is fresh, would be."""
    facts: Mapping[str, Any]
    """What both parties have to agree on."""
    received: int
    """The highest number that it has of the session."""
    window: int
    """How many bytes it takes before it has consumed them."""

    def value(self) -> dict[str, Any]:
        return asdict(self)


def read_hello(value: Any) -> Hello:
    """The HELLO in a frame; FrameError if it is none. Fields of later versions do no harm."""
    fields = value if isinstance(value, dict) else {}
    given: dict[str, Any] = {name: fields.get(name) for name in Hello.__dataclass_fields__}
    hello = Hello(**given)
    good = (
        isinstance(hello.party, str)
        and 1 <= len(hello.party) <= _MAX_NAME
        and _is_life(hello.life)
        and (hello.peer is None or _is_life(hello.peer))
        and isinstance(hello.fresh, bool)
        and isinstance(hello.facts, dict)
        and _is_count(hello.received)
        and _is_count(hello.window)
    )
    if not good:
        raise FrameError("a HELLO lacks a field, or has one of a wrong type: the other side is no plait")
    return hello


def name_session(lives: Mapping[str, str]) -> int:
    """The session of two lives, given by their parties' names: 64 bits, never 0, the same at both."""
    text = "\n".join(f"{party} {life}" for party, life in sorted(lives.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1


def is_older(life: str, than: str) -> bool:
    """Whether `life` came before `than` in the same process; lives of two processes have no order."""
    one, count = life.split(":")
    other, later = than.split(":")
    return one == other and int(count) < int(later)


def _is_life(value: Any) -> bool:
    return isinstance(value, str) and _LIFE.fullmatch(value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
