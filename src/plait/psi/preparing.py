"""A party's own keys as secret multiples, in an order that tells nothing of its file."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plait.atomic import atomic_path
from plait.errors import DataError
from plait.psi.curve import POINT_BYTES
from plait.psi.journal import Journal
from plait.psi.points import Bytes, order, same_as_next
from plait.psi.pool import Pool
from plait.psi.spill import bits_for, buckets

__all__ = ["DUPLICATES", "Own", "blind", "sort_own"]

DUPLICATES = ("error", "first")
"""What is done with rows of the same key: refuse the file, or take the first of them."""
_ROW_BYTES = 8


@dataclass(frozen=True)
class Own:
    """The points of this party's keys in rising order, each once, and the row that each stands for."""

    points: Path
    rows: Path
    count: int
    batch: int

    @property
    def batches(self) -> int:
        return -(-self.count // self.batch)

    def size(self, number: int) -> int:
        """How many points a batch has."""
        return min(self.batch, self.count - number * self.batch)

    def read(self, number: int) -> bytes:
        with self.points.open("rb") as file:
            file.seek(number * self.batch * POINT_BYTES)
            return file.read(self.size(number) * POINT_BYTES)

    def row_numbers(self) -> NDArray[np.uint64]:
        return np.fromfile(self.rows, "<u8")


def blind(
    keys: Iterator[Callable[[], bytes]], journal: Journal, pool: Pool, batch: int, say: Callable[[int], None]
) -> None:
    """Multiply every row's key, a batch at a time; those that are done are passed over.

    A key is asked for only where it is needed. `say` hears how many rows are done.
    """
    done = journal.batches("own")
    under_way: deque[tuple[int, Future[bytes]]] = deque()
    count = sum(1 for _ in itertools.islice(keys, done.done * batch))
    say(count)

    def finish() -> None:
        nonlocal count
        size, future = under_way.popleft()
        done.add(future.result())
        count += size
        say(count)

    while chosen := [key() for key in itertools.islice(keys, batch)]:
        under_way.append((len(chosen), pool.blind(chosen)))
        if len(under_way) > pool.workers:
            finish()
    while under_way:
        finish()


def sort_own(journal: Journal, batch: int, duplicates: str) -> Own:
    """Sort the points of `blind`. DataError: a key is in two rows, and duplicates are an error."""
    directory = journal.directory
    known = journal.load("own")
    if known is None:
        blinded = journal.batches("own")
        total = sum(blinded.path(number).stat().st_size for number in range(blinded.done)) // POINT_BYTES
        count = 0
        with (
            atomic_path(directory / "points.bin") as points,
            atomic_path(directory / "rows.bin") as rows,
            points.open("wb") as points_file,
            rows.open("wb") as rows_file,
        ):
            width = POINT_BYTES + _ROW_BYTES
            for bucket in buckets(_numbered(blinded), width, bits_for(total), directory / "sorting"):
                found = _distinct(bucket[order(bucket)], duplicates)
                points_file.write(found[:, :POINT_BYTES].tobytes())
                rows_file.write(found[:, POINT_BYTES:].tobytes())
                count += len(found)
        known = {"count": count, "rows": total}
        journal.save("own", known)
    return Own(directory / "points.bin", directory / "rows.bin", int(known["count"]), batch)


def _numbered(batches: Iterable[Bytes]) -> Iterator[Bytes]:
    """Each point with the number of its row behind it."""
    first = 0
    for points in batches:
        numbers = np.arange(first, first + len(points), dtype="<u8").view(np.uint8).reshape(-1, _ROW_BYTES)
        first += len(points)
        yield np.concatenate([points, numbers], axis=1)


def _distinct(rows: Bytes, duplicates: str) -> Bytes:
    same = same_as_next(rows) if len(rows) > 1 else np.zeros(0, bool)
    if not same.any():
        return rows
    if duplicates == "error":
        place = int(np.flatnonzero(same)[0])
        one, other = sorted(int.from_bytes(rows[at, POINT_BYTES:].tobytes(), "little") + 1 for at in (place, place + 1))
        raise DataError(
            f"rows {one} and {other} have the same key, and {int(same.sum()) - 1} more are repeated: make the keys "
            "unique, or take the first row of each with duplicates='first'"
        )
    kept: Bytes = rows[np.concatenate([[True], ~same])]
    return kept
