"""Which of this party's rows the other one has, too, in an order that both find."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plait.errors import FederalError
from plait.psi.curve import POINT_BYTES
from plait.psi.points import Bytes, order, same_as_next
from plait.psi.spill import bits_for, buckets

__all__ = ["Matched", "match"]

_TAIL_BYTES = 8
_THEIRS = np.iinfo(np.uint64).max
"""Stands where a row of this party has its number."""


@dataclass(frozen=True)
class Matched:
    """What both have."""

    rows: NDArray[np.uint64]
    """The numbers of this party's rows, in the order of the points that both have multiplied."""
    digest: str
    """Of those points: equal at both parties if and only if they have found the same."""


def match(
    mine: Iterable[Bytes], rows: NDArray[np.uint64], theirs: Iterable[Bytes], total: int, directory: Path, peer: str
) -> Matched:
    """Join the points that both have multiplied: this party's, with a row for each, and the other's.

    FederalError: a point is there twice, so that the other party has multiplied one twice, or by several secrets.
    """
    digest, found = hashlib.blake2b(digest_size=32), [np.empty(0, np.uint64)]
    pieces = _tagged(mine, rows, theirs)
    for bucket in buckets(pieces, POINT_BYTES + _TAIL_BYTES, bits_for(total), directory):
        bucket = bucket[order(bucket)]  # noqa: PLW2901 - sorted, it is the same
        if len(bucket) < 2:
            continue
        same = same_as_next(bucket)
        numbers = np.ascontiguousarray(bucket[:, POINT_BYTES:]).view("<u8")[:, 0].astype(np.uint64)
        own = numbers != _THEIRS
        if (same & (own[1:] == own[:-1])).any():
            raise FederalError(f"the {peer} has sent points that are the same once both have multiplied them: refused")
        places = np.flatnonzero(same)
        found.append(np.where(own[places], numbers[places], numbers[places + 1]))
        digest.update(bucket[places, :POINT_BYTES].tobytes())
    return Matched(np.concatenate(found), digest.hexdigest())


def _tagged(mine: Iterable[Bytes], rows: NDArray[np.uint64], theirs: Iterable[Bytes]) -> Iterator[Bytes]:
    first = 0
    for points in mine:
        yield _with(points, rows[first : first + len(points)])
        first += len(points)
    for points in theirs:
        yield _with(points, np.full(len(points), _THEIRS, np.uint64))


def _with(points: Bytes, numbers: NDArray[np.uint64]) -> Bytes:
    tails = numbers.astype("<u8").view(np.uint8).reshape(-1, _TAIL_BYTES)
    return np.concatenate([points, tails], axis=1)
