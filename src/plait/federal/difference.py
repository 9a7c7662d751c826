"""What two parties say of the same things, side by side, where it differs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from plait.variables.inspect import plain_table

__all__ = ["side_by_side"]

MAX_LINES = 20
"""Of the table, its head included."""
_SHORT = 60
_BEFORE = 20
"""How much of two long values that begin alike is shown before they part."""
_ABSENT = "-"


def side_by_side(own_name: str, own: Mapping[str, Any], peer_name: str, theirs: Mapping[str, Any]) -> str | None:
    """A table with a line for each key that differs, nested ones as "data.batch"; None where nothing does."""
    mine, yours = dict(_flat(own)), dict(_flat(theirs))
    keys = [*mine, *(key for key in yours if key not in mine)]
    rows = [(key, *_pair(mine.get(key), yours.get(key))) for key in keys if mine.get(key) != yours.get(key)]
    if not rows:
        return None
    room = MAX_LINES - 1
    if len(rows) > room:
        rows = [*rows[: room - 1], (f"and {len(rows) - room + 1} more", "", "")]
    return plain_table(["", own_name, peer_name], [(_cut(key), *values) for key, *values in rows])


def _flat(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Every value as text, so that a number, a text and nothing at all stay apart, in JSON's way at both parties."""
    for key, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _pair(one: str | None, other: str | None) -> tuple[str, str]:
    if one is None or other is None:
        return (_ABSENT if one is None else _cut(one)), (_ABSENT if other is None else _cut(other))
    alike = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    begin = max(0, alike - _BEFORE) if max(len(one), len(other)) > _SHORT else 0
    return _cut(one, begin), _cut(other, begin)


def _cut(text: str, begin: int = 0) -> str:
    tail = text[begin:]
    shown = tail if len(tail) <= _SHORT else tail[: _SHORT - 3] + "..."
    return f"...{shown}" if begin else shown
