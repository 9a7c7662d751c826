"""Sorting and joining more points than memory holds: rows of bytes are put into files by their first bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from plait.psi.points import Bytes, leading

__all__ = ["BUCKET_ROWS", "bits_for", "buckets"]

BUCKET_ROWS = 1 << 21
"""About how many rows are looked at together."""
MOST_BITS = 12


def bits_for(rows: int) -> int:
    """How many of the first bits say in which bucket a row is."""
    return min(MOST_BITS, max(0, (rows - 1) // BUCKET_ROWS).bit_length())


def buckets(pieces: Iterable[Bytes], width: int, bits: int, directory: Path) -> Iterator[Bytes]:
    """The rows of all pieces, bucket by bucket, each row of `width` bytes; without bits, all of them at once.

    Files are in `directory` meanwhile; they are made anew if they are left from a run that was killed.
    """
    if bits == 0:
        yield np.concatenate([np.empty((0, width), np.uint8), *pieces])
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for piece in pieces:
        where = (leading(piece) >> np.uint64(64 - bits)).astype(np.intp)
        order = np.argsort(where, kind="stable")
        ends = np.searchsorted(where[order], np.arange(1, (1 << bits) + 1)).tolist()
        for bucket, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > begin:
                with _file(directory, bucket).open("ab") as file:
                    file.write(piece[order[begin:end]].tobytes())
    for bucket in range(1 << bits):
        path = _file(directory, bucket)
        yield np.fromfile(path, np.uint8).reshape(-1, width) if path.exists() else np.empty((0, width), np.uint8)
        path.unlink(missing_ok=True)
    shutil.rmtree(directory)


def _file(directory: Path, bucket: int) -> Path:
    return directory / f"{bucket:04x}.bin"
