"""The rows that both parties have, in their common order: equal shards, and a manifest."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.atomic import file_digest, write_atomic
from plait.federal.alignment import MANIFEST, digest_of
from plait.psi.tables import Table

__all__ = ["bounds", "write_manifest", "write_shards"]

BLOCK_ROWS = 1 << 15
"""Rows that are put into their order together."""
MOST_BLOCKS = 256


def bounds(rows: int, shards: int) -> list[int]:
    """Where the shards begin, and the last one ends; none has more than one row more than another.

    >>> bounds(7, 3)
    [0, 2, 4, 7]
    """
    return [shard * rows // shards for shard in range(shards + 1)]


def write_shards(table: Table, rows: NDArray[np.uint64], shards: int, out: Path, scratch: Path) -> list[dict[str, Any]]:
    """Write the rows with these numbers, in this order, into so many files; what a manifest says of each."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    size = max(BLOCK_ROWS, -(-len(rows) // MOST_BLOCKS))
    blocks = _Blocks(table, rows, size, scratch)
    edges, written = bounds(len(rows), shards), []
    for shard, (begin, end) in enumerate(itertools.pairwise(edges)):
        path = out / f"part-{shard:05d}-of-{shards:05d}{table.suffix}"
        table.write(blocks.between(begin, end), path)
        about = {"name": path.name, "rows": end - begin, "bytes": path.stat().st_size, "sha256": file_digest(path)}
        written.append(about)
    shutil.rmtree(scratch)
    return written


def write_manifest(out: Path, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """`shared` is the same at both parties, and its digest stands for the run; `own` is this party's."""
    manifest = {"digest": digest_of(shared), "shared": shared, **own}
    write_atomic(out / MANIFEST, json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


class _Blocks:
    """Rows by their places in the output: put into files by place in one pass, and sorted a file at a time."""

    def __init__(self, table: Table, rows: NDArray[np.uint64], size: int, directory: Path) -> None:
        self._table, self._size, self._directory = table, size, directory
        self._places: list[list[NDArray[np.intp]]] = [[] for _ in range(-(-len(rows) // size))]
        self._number, self._held = -1, None
        order = np.argsort(rows)
        self._scatter(rows[order].astype(np.intp), order)

    def between(self, begin: int, end: int) -> Iterator[tuple[Any, int, int]]:
        """What `Table.write` takes: pieces, and from where to where in each."""
        while begin < end:
            number, start = divmod(begin, self._size)
            stop = min(self._size, start + end - begin)
            yield self._block(number), start, stop
            begin += stop - start

    def _scatter(self, rows: NDArray[np.intp], places: NDArray[np.intp]) -> None:
        first = 0
        for count, piece in self._table.pieces():
            begin, end = np.searchsorted(rows, (first, first + count)).tolist()
            wanted, where = rows[begin:end] - first, places[begin:end]
            blocks = where // self._size
            for number in np.unique(blocks).tolist():
                chosen = blocks == number
                self._table.spill(piece, wanted[chosen], self._directory / f"{number}.bin")
                self._places[number].append(where[chosen])
            first += count

    def _block(self, number: int) -> Any:
        if number != self._number:
            order = np.argsort(np.concatenate(self._places[number]))
            self._held = self._table.gather(self._directory / f"{number}.bin", order)
            self._number = number
        return self._held
