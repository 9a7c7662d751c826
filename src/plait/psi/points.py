"""Arrays of points: what may come from the other party, and the order that they are kept in."""

from __future__ import annotations

import secrets
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from plait.errors import FederalError
from plait.psi.curve import LARGEST, LOW_ORDER, POINT_BYTES, is_on_curve

__all__ = ["Bytes", "as_points", "check", "check_rising", "leading", "order", "same_as_next"]

Bytes: TypeAlias = NDArray[np.uint8]
"""Rows of bytes: points of 32, or points with something behind them."""
SAMPLED = 16
"""How many points of a batch are looked at whether they are on the curve."""

_WORDS = POINT_BYTES // 8
_LIMIT = np.frombuffer(LARGEST.to_bytes(POINT_BYTES, "little"), "<u8")
_LOW = np.frombuffer(b"".join(u.to_bytes(POINT_BYTES, "little") for u in LOW_ORDER), "<u8").reshape(-1, _WORDS)


def as_points(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8).reshape(-1, POINT_BYTES)


def check(points: Bytes, what: str) -> None:
    """Refuse what no honest party sends. No error names a point.

    All are compared with the largest coordinate and with the points of low order. Of a few it is computed whether they
    are on the curve: multiples of one that is not tell as little, so this is for parties that are broken, not for
    malicious ones.
    """
    words = np.ascontiguousarray(points).view("<u8")
    if _too_large(words).any():
        raise FederalError(
            f"{what} hold a coordinate that is not below 2^255 - 2^32, as those of keys are: its sender is broken"
        )
    if any((words == low).all(axis=1).any() for low in _LOW):
        raise FederalError(f"{what} hold a point of low order, with which a secret can be attacked: they are refused")
    chosen = {secrets.randbelow(len(points)) for _ in range(SAMPLED if len(points) else 0)}
    if not all(is_on_curve(int.from_bytes(points[row].tobytes(), "little")) for row in chosen):
        raise FederalError(f"{what} hold points that are not on the curve: its sender is broken")


def _too_large(words: NDArray[np.uint64]) -> NDArray[np.bool_]:
    top = (words[:, 1] == _LIMIT[1]) & (words[:, 2] == _LIMIT[2]) & (words[:, 3] == _LIMIT[3])
    found: NDArray[np.bool_] = (words[:, 3] > _LIMIT[3]) | (top & (words[:, 0] >= _LIMIT[0]))
    return found


def check_rising(points: Bytes, before: Bytes | None, what: str) -> None:
    """Points come in rising order, each once: so a batch that is repeated, or a key that is there twice, shows."""
    both = points if before is None else np.concatenate([before[-1:], points])
    if len(both) < 2:
        return
    words = _big(both)
    rising = np.zeros(len(both) - 1, bool)
    undecided = np.ones(len(both) - 1, bool)
    for column in words.T:
        rising |= undecided & (column[1:] > column[:-1])
        undecided &= column[1:] == column[:-1]
    if not rising.all():
        raise FederalError(f"{what} repeat points, or have them in a wrong order: they are refused")


def leading(rows: Bytes) -> NDArray[np.uint64]:
    """The first eight bytes of each row as a number; numbers are in the order of the bytes."""
    return np.ascontiguousarray(rows[:, :8]).view(">u8")[:, 0].astype(np.uint64)


def order(rows: Bytes) -> NDArray[np.intp]:
    """Where the rows are, by their points; equal ones as they were."""
    first = leading(rows)
    found = np.argsort(first, kind="stable")
    ties = first[found][1:] == first[found][:-1]
    if (ties & ~same_as_next(rows[found])).any():
        found = np.lexsort(_big(rows).T[::-1])
    return found


def same_as_next(rows: Bytes) -> NDArray[np.bool_]:
    """For each row but the last, whether its point is that of the next."""
    words = _big(rows)
    found: NDArray[np.bool_] = (words[1:] == words[:-1]).all(axis=1)
    return found


def _big(rows: Bytes) -> NDArray[np.uint64]:
    return np.ascontiguousarray(rows[:, :POINT_BYTES]).view(">u8").astype(np.uint64)
