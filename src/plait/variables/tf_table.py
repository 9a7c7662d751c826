"""TensorFlow's sorted tables, which every checkpoint of its has, and the messages that are their values.

A table is a file of blocks, each with a checksum and perhaps compressed with Snappy, then a block that tells where
those are, then a footer:

    block: key, value, key, value ...    a key is told by how it differs from the one before it
    index: last key of a block -> where it is
    footer: where the index is

Nothing in a file is trusted: places are checked against the file, lengths before memory is taken for them.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from plait.errors import CheckpointError

__all__ = ["LARGEST_GAIN", "Table", "is_table", "masked_crc", "read_message", "read_varint", "reading", "unsnap"]

_MAGIC = bytes.fromhex("57fb808b247547db")
_FOOTER = 48
_TRAILER = 5
"""Bytes behind a block: how it is compressed, and the checksum."""
_PLAIN, _SNAPPY = 0, 1
LARGEST_GAIN = 22
"""What Snappy can make of a byte at most: a copy of 64 bytes is told in three."""

_Row = tuple[bytes, memoryview]


class Table:
    """A table in an open file; blocks are read when they are asked for, and none unpacks to more than `limit` bytes."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _FOOTER))
        footer = stream.read(_FOOTER)
        if len(footer) < _FOOTER or not footer.endswith(_MAGIC):
            raise CheckpointError(
                f"does not end as a table does: it was cut, or is another kind of file ({size} bytes)"
            )
        self._end = size - _FOOTER
        _, _, at = _handle(footer, 0)
        offset, size, _ = _handle(footer, at)
        self._index = self._block(offset, size)

    def rows(self) -> Iterator[_Row]:
        """All keys and values, in order; together they may have `limit` bytes."""
        unpacked = 0
        for key, value in _in_order(row for _, offset, size in self._places() for row in self._pairs(offset, size)):
            unpacked += len(key) + len(value)
            if unpacked > self._limit:
                raise CheckpointError(f"its names and values have more than {self._limit} bytes")
            yield key, value

    def find(self, keys: Iterable[bytes]) -> Iterator[_Row]:
        """Those of `keys` that are there, in order; only the blocks where they would be are read."""
        return _in_order(self._find(sorted(set(keys))))

    def _find(self, keys: list[bytes]) -> Iterator[_Row]:
        done = 0
        for last, offset, size in self._places():
            upto = bisect.bisect_right(keys, last, done)
            if upto > done:
                wanted = set(keys[done:upto])
                yield from (row for row in self._pairs(offset, size) if row[0] in wanted)
            done = upto
            if done == len(keys):
                return

    def _places(self) -> Iterator[tuple[bytes, int, int]]:
        """A key that none in the block comes after, and the block's place, of each block."""
        end = 0
        for last, where in _in_order(_split(self._index)):
            offset, size, _ = _handle(where, 0)
            if offset < end:  # otherwise a small file could have us read one large block again and again
                raise CheckpointError(f"its blocks overlap at {offset}")
            end = offset + size
            yield last, offset, size

    def _pairs(self, offset: int, size: int) -> Iterator[_Row]:
        return _split(self._block(offset, size))

    def _block(self, offset: int, size: int) -> memoryview:
        """The keys and values of a block, after its checksum, without the numbers that help to search in it."""
        if offset + size + _TRAILER > self._end:
            raise CheckpointError(f"a block of {size} bytes at {offset} reaches past its end")
        self._stream.seek(offset)
        content = self._stream.read(size + 1)
        if masked_crc(content) != int.from_bytes(self._stream.read(_TRAILER - 1), "little"):
            raise CheckpointError(f"the block at {offset} was altered, its checksum is another")
        kind, block = content[-1], memoryview(content)[:-1]
        if kind == _SNAPPY:
            block = memoryview(unsnap(content[:-1], self._limit))
        elif kind != _PLAIN:
            raise CheckpointError(
                f"the block at {offset} is compressed in a way (kind {kind}) that plait does not read"
            )
        if len(block) > self._limit:
            raise CheckpointError(f"the block at {offset} has {len(block)} bytes, {self._limit} are allowed")
        restarts = int.from_bytes(block[-4:], "little")
        stop = len(block) - 4 * (restarts + 1)
        if stop < 0:
            raise CheckpointError(f"the block at {offset} has {len(block)} bytes, too few for {restarts} restarts")
        return block[:stop]


def is_table(path: str | os.PathLike[str]) -> bool:
    """Whether a file ends as a table does."""
    try:
        with Path(path).open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - len(_MAGIC)))
            return stream.read() == _MAGIC
    except (OSError, ValueError):  # a name with a zero byte is a ValueError
        return False


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Whatever a strange file makes a parser raise is a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except Exception as error:
        reason = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file} cannot be read: {reason}") from error


def unsnap(data: bytes, limit: int) -> bytearray:
    """Undo Snappy: the length, then pieces that are either there to be taken or a copy of what is behind."""
    length, at = read_varint(data, 0)
    if length > min(limit, LARGEST_GAIN * len(data)):
        raise CheckpointError(f"{len(data)} compressed bytes tell of {length}: no more than {limit} are allowed")
    out = bytearray()
    while at < len(data):
        kind, high = data[at] & 3, data[at] >> 2
        at += 1
        if kind == 0:
            wide = max(0, high - 59)
            size = 1 + (int.from_bytes(data[at : at + wide], "little") if wide else high)
            out += data[at + wide : at + wide + size]
            at += wide + size
        else:
            wide = (1, 2, 4)[kind - 1]
            offset, size = int.from_bytes(data[at : at + wide], "little"), high + 1
            if kind == 1:
                offset, size = offset | (high >> 3) << 8, 4 + (high & 7)
            _repeat(out, offset, size)
            at += wide
        if at > len(data) or len(out) > length:
            break
    if at != len(data) or len(out) != length:
        raise CheckpointError(f"{len(data)} compressed bytes do not make the {length} that they tell of")
    return out


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise CheckpointError("a number in it does not end")


def read_message(data: bytes | memoryview) -> tuple[dict[int, int], dict[int, list[memoryview]]]:
    """The fields of a protocol buffer by their numbers: the numbers (signed, the last wins), and what is nested."""
    numbers: dict[int, int] = {}
    nested: dict[int, list[memoryview]] = {}
    data, at = memoryview(data), 0  # weights are not copied for each message around them
    while at < len(data):
        tag, at = read_varint(data, at)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = read_varint(data, at)
            numbers[field] = value - (1 << 64) if value >> 63 else value
            continue
        length = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            length, at = read_varint(data, at)
        elif not length:
            raise CheckpointError(f"an entry has a field of wire type {wire}")
        if at + length > len(data):
            raise CheckpointError("a field runs past its entry")
        if wire == 2:
            nested.setdefault(field, []).append(data[at : at + length])
        else:
            numbers[field] = int.from_bytes(data[at : at + length], "little")
        at += length
    return numbers, nested


def masked_crc(data: bytes | np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """CRC-32C, turned and shifted, as TensorFlow stores it."""
    import google_crc32c  # noqa: PLC0415 - only where a checkpoint of TensorFlow's is read

    crc: int = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFF_FFFF


def _handle(data: bytes | memoryview, at: int) -> tuple[int, int, int]:
    """Offset and size of a block, and where the handle ends."""
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return offset, size, at


def _split(block: memoryview) -> Iterator[_Row]:
    key, at = b"", 0
    while at < len(block):
        shared, at = read_varint(block, at)
        added, at = read_varint(block, at)
        length, at = read_varint(block, at)
        middle, end = at + added, at + added + length
        if shared > len(key) or end > len(block):
            raise CheckpointError(f"a key of {shared} + {added} bytes or its value of {length} runs past its block")
        key = key[:shared] + block[at:middle]
        yield key, block[middle:end]
        at = end


def _in_order(rows: Iterable[_Row]) -> Iterator[_Row]:
    last = None
    for key, value in rows:
        if last is not None and key <= last:
            raise CheckpointError(f"its keys are not in order at {key[:99]!r}")
        last = key
        yield key, value


def _repeat(out: bytearray, offset: int, size: int) -> None:
    """Append `size` bytes from `offset` back; where that is less than `size`, what is appended is repeated too."""
    start = len(out) - offset
    if offset == 0 or start < 0:
        raise CheckpointError(f"compressed bytes copy from {offset} back after {len(out)}")
    if offset >= size:
        out += out[start : start + size]
    else:
        out += (out[start:] * (size // offset + 1))[:size]
