"""TFRecord files without TensorFlow: written whole or not at all, read as a stream or by number, every byte checked.

A record is its length (uint64), the masked CRC-32C of the length, the bytes, and the masked CRC-32C of the bytes, all
little endian. A file may be compressed as a whole (GZIP or ZLIB).

Plain files are mapped into memory and records are views of them: nothing is copied. A file that somebody cuts short
while it is mapped ends the process, as with every mapped file; put a new file in its place instead.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import logging
import mmap
import operator
import os
import struct
import threading
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from plait.atomic import atomic_path, write_atomic
from plait.errors import ConfigError, DataError

__all__ = ["MAX_RECORD_BYTES", "RecordFile", "TFRecordWriter", "expand", "read_records", "shard"]

log = logging.getLogger("plait")

MAX_RECORD_BYTES = 256 << 20
"""The longest record that is read, unless another limit is given."""

_Path: TypeAlias = str | os.PathLike[str]
_Bytes: TypeAlias = NDArray[np.uint8]
_Kind: TypeAlias = Literal["GZIP", "ZLIB"] | None
_Given: TypeAlias = Literal["auto", "GZIP", "ZLIB"] | None

_HEADER = struct.Struct("<QI")
_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_FRAME = _HEADER.size + _CRC.size
_WINDOWS = {"GZIP": 31, "ZLIB": 15}  # zlib's names for the two formats
_GZIP_MAGIC = b"\x1f\x8b"
_KINDS: tuple[_Kind, ...] = (None, "GZIP", "ZLIB")
_CHUNK_BYTES = 32 << 10  # of the compressed file, at a time
_PIECE_BYTES = 256 << 10  # of what comes out of it, at most
_HELD_BYTES = 512 << 20
_HELD_OVERHEAD = 128  # about what Python takes for a record that is held, however short
_MAX_MAPPED = 256  # every mapped file takes a file descriptor, and a process often has 1024
_MOST_INFLATED = 6  # a byte is 1032 at most when it is not compressed any more, so 64 records
_INDEX = struct.Struct("<8sQqBQ")
_INDEX_MAGIC = b"plaitix1"


class TFRecordWriter:
    """Writes one file, in a `with` block; the file is there, whole, when the block ends well.

    with TFRecordWriter("train-00000.tfrecord") as writer:
        writer.write(make_example({"label": 3}))
    """

    def __init__(self, path: _Path, compression: _Kind = None) -> None:
        if compression not in _KINDS:
            raise ConfigError(f"compression is {compression!r}; write None, 'GZIP' or 'ZLIB'")
        self.path = os.fspath(path)
        self.compression = compression
        self._file: IO[bytes] | None = None
        self._spoilt = False

    def write(self, record: bytes | bytearray | memoryview) -> None:
        if self._file is None:
            raise DataError(f"{self.path} is not open; write inside `with TFRecordWriter(path) as writer:`")
        if not isinstance(record, (bytes, bytearray, memoryview)):
            raise DataError(
                f"a record is bytes, got a {type(record).__name__}; write make_example({{...}}), or encode it yourself"
            )
        body = bytes(record)
        length = _LENGTH.pack(len(body))
        frame = b"".join([length, _CRC.pack(_masked(length)), body, _CRC.pack(_masked(body))])
        try:
            self._file.write(self._deflate.compress(frame) if self._deflate else frame)
        except BaseException:
            self._spoilt = True  # a part of the record may be on disk, even if somebody catches the error
            raise

    def __enter__(self) -> TFRecordWriter:
        if self._file is not None:
            raise DataError(f"{self.path} is being written already; one `with` block, one file")
        self._block = self._writing()
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> None:  # noqa: PYI036 - handed on as they come
        self._block.__exit__(*error)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[TFRecordWriter]:
        self._deflate = zlib.compressobj(wbits=_WINDOWS[self.compression]) if self.compression else None
        self._spoilt = False
        with atomic_path(self.path) as temporary, temporary.open("wb") as file:
            self._file = file
            try:
                yield self
                if self._deflate:
                    file.write(self._deflate.flush())
            finally:
                self._file = None
            if self._spoilt:
                raise DataError(f"{self.path} is not kept: one of its records could not be written; write it anew")


class RecordFile:
    """The records of one file by number: `len(file)`, `file[3]`. Several threads may read at once.

    Where the records of a plain file begin is found in one pass over their headers, and kept in a small file beside it
    (or in `index_dir`), so that the next start needs none; an index that does not fit the file is made anew.

    A compressed file can only be read forwards: what is passed over on the way to a record is held until it is asked
    for, up to `held_bytes`; a record that was given already is reached again from the beginning. Its records are
    counted by reading it once; the index keeps the count.

    Args:
        path: A local file.
        compression: None, "GZIP", "ZLIB", or "auto": look at the file.
        check: Whether the CRC of the bytes is checked at each read; that of the length always is.
        max_record_bytes: A longer record is taken for damage.
        index_dir: Where the index is kept; None: beside the file.
        records: Which records these are, as `shard` gives it: `slice(1, None, 3)` is every third from the second on.
        held_bytes: How much of a compressed file may be held.

    """

    def __init__(
        self,
        path: _Path,
        *,
        compression: _Given = "auto",
        check: bool = True,
        max_record_bytes: int = MAX_RECORD_BYTES,
        index_dir: _Path | None = None,
        records: slice = slice(None),
        held_bytes: int = _HELD_BYTES,
    ) -> None:
        self.path = os.fspath(path)
        self._check = check
        self._limit = max_record_bytes
        self._mapped = _Mapped(self.path)
        kind = _known(compression)
        kept = _read_index(_index_path(self.path, index_dir), self._mapped.stamp)
        if kept is None or kind not in ("auto", kept[0]):
            kept = _make_index(self._mapped, kind, max_record_bytes)
            _write_index(_index_path(self.path, index_dir), self._mapped.stamp, *kept)
        self.compression, self.total, self._offsets = kept
        """How the file is compressed, the records in it, and where they begin."""
        self.numbers = range(self.total)[records]
        """Which of the file's records these are."""
        self._forward = _Forward(self.path, self._stream, self.numbers, held_bytes) if self.compression else None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, position: int) -> memoryview | bytes:
        try:
            number = self.numbers[operator.index(position)]
        except IndexError:
            raise IndexError(f"{self.path}: no record {position}, there are {len(self)}") from None
        if self._forward is not None:
            return self._forward.get(number)
        data, offset = self._mapped(), int(self._offsets[number])
        end = _end(data, self.path, number, offset, self._limit)
        return _body(data, self.path, number, offset, end, self._check)

    def _stream(self) -> Iterator[bytes]:
        return _inflated_records(self._mapped, self.compression or "", self._check, self._limit)


def read_records(
    path: _Path,
    *,
    compression: _Given = "auto",
    start: int = 0,
    check: bool = True,
    max_record_bytes: int = MAX_RECORD_BYTES,
    index_dir: _Path | None = None,
) -> Iterator[memoryview | bytes]:
    """The records of a local file in order, from number `start` on; the arguments are those of `RecordFile`.

    No index is made; one that is there is used to get to `start`.
    """
    if start < 0:
        raise ConfigError(f"start is {start}; it has to be 0 or more")
    mapped = _Mapped(os.fspath(path))
    given = _known(compression)
    kind = _detect(mapped()) if given == "auto" else given
    if kind is not None:
        return _skipped(mapped.path, _inflated_records(mapped, kind, check, max_record_bytes), start)
    kept = _read_index(_index_path(mapped.path, index_dir), mapped.stamp) if start else None
    if kept is not None and kept[0] is None and start < kept[1]:
        return _plain_records(mapped, check, max_record_bytes, start, int(kept[2][start]))
    offset = 0
    for number in range(start):
        if offset >= mapped.stamp[0]:
            raise _too_few(mapped.path, number, start)
        offset = _end(mapped(), mapped.path, number, offset, max_record_bytes) + _CRC.size
    return _plain_records(mapped, check, max_record_bytes, start, offset)


def _skipped(path: str, records: Iterator[bytes], start: int) -> Iterator[bytes]:
    dropped = sum(1 for _ in itertools.islice(records, start))
    if dropped < start:
        raise _too_few(path, dropped, start)
    return records


def _too_few(path: str, count: int, start: int) -> DataError:
    return DataError(f"{path} has {count} records, so it cannot be read from record {start} on; give the file that was")


def expand(*patterns: _Path) -> list[str]:
    """The files that the patterns name, those of each pattern sorted, each file once.

    A name that is there is taken as it is, whatever signs are in it. Hidden files, so every index, need their dot.
    """
    found: dict[str, None] = {}
    for pattern in [os.fspath(pattern) for pattern in patterns]:
        names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - strings in, strings out
        files = [name for name in names if Path(name).is_file()]
        if not files:
            hint = f"it is a directory: write {pattern.rstrip('/')}/*" if Path(pattern).is_dir() else "look at the path"
            raise DataError(f"no file matches {pattern!r}; {hint}")
        found.update(dict.fromkeys(files))
    return list(found)


def shard(files: Sequence[str], index: int, count: int) -> list[tuple[str, slice]]:
    """What worker `index` of `count` reads: files, and of each the records, for `RecordFile(file, records=...)`.

    Files are dealt out whole where there is one for each worker at least, record by record where there are fewer.

    >>> shard(["a", "b", "c"], 0, 2)
    [('a', slice(None, None, None)), ('c', slice(None, None, None))]
    >>> shard(["a"], 1, 2)
    [('a', slice(1, None, 2))]
    """
    if not 0 <= index < count:
        raise ConfigError(f"there is no worker {index} of {count}; they are numbered from 0 to count - 1")
    if len(files) >= count:
        return [(file, slice(None)) for file in files[index::count]]
    return [(file, slice(index, None, count)) for file in files]


class _Mapped:
    """The bytes of a file, mapped when they are asked for. Of all files only the newest few stay mapped."""

    _newest: ClassVar[deque[weakref.ref[_Mapped]]] = deque()

    def __init__(self, path: str) -> None:
        self.path = path
        self._data: _Bytes | None
        self._data, self.stamp = _map(path)
        """The stamp is size and time of change: another stamp, another file."""
        self._enlist()

    def __call__(self) -> _Bytes:
        data = self._data
        if data is not None:
            return data
        data, stamp = _map(self.path)
        if stamp != self.stamp:
            raise DataError(f"{self.path} was changed while it was read; open it anew")
        self._data = data
        self._enlist()
        return data

    def _enlist(self) -> None:
        newest = self._newest
        newest.append(weakref.ref(self))
        if len(newest) > _MAX_MAPPED:
            oldest = newest.popleft()()
            if oldest is not None:
                oldest._data = None  # noqa: SLF001 - one of us; views that are in use keep their memory


def _map(path: str) -> tuple[_Bytes, tuple[int, int]]:
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            # an empty file cannot be mapped
            raw = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ) if status.st_size else b""
    except (OSError, ValueError) as error:  # ValueError: the file became shorter in between
        raise DataError(f"{path} cannot be read: {error}; give the path of a local file") from error
    return np.frombuffer(raw, np.uint8), (status.st_size, status.st_mtime_ns)


def _masked(data: bytes | _Bytes) -> int:
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _broken(path: str, number: int, offset: int, what: str) -> DataError:
    return DataError(f"{path}: record {number} at byte {offset} {what}")


def _length(head: bytes, path: str, number: int, offset: int, limit: int, left: int | None = None) -> int:
    """The length that a header names, once it is known that so many bytes may be, and can be, there."""
    if len(head) < _HEADER.size:
        what = f"is cut short: {len(head)} bytes are left, a header takes {_HEADER.size}; make the file anew"
        raise _broken(path, number, offset, what)
    length: int
    length, crc = _HEADER.unpack(head)
    if _masked(head[:8]) != crc:
        what = "has a length whose CRC is wrong: the file is damaged, is no TFRecord file, or `compression` is wrong"
        raise _broken(path, number, offset, what)
    if left is not None and length > left:
        what = f"is cut short: {length} bytes long, but {max(left, 0)} are left; make the file anew"
        raise _broken(path, number, offset, what)
    if length > limit:
        what = f"is {length} bytes long and the limit is {limit}; write max_record_bytes={length} if that is right"
        raise _broken(path, number, offset, what)
    return length


def _wrong_body(path: str, number: int, offset: int) -> DataError:
    return _broken(
        path, number, offset, "has bytes whose CRC is wrong; make the file anew, or read it with check=False"
    )


def _end(data: _Bytes, path: str, number: int, offset: int, limit: int) -> int:
    """Where the bytes of the record at `offset` end."""
    begin = offset + _HEADER.size
    return begin + _length(data[offset:begin].tobytes(), path, number, offset, limit, len(data) - offset - _FRAME)


def _body(data: _Bytes, path: str, number: int, offset: int, end: int, check: bool) -> memoryview:
    body = data[offset + _HEADER.size : end]
    if check and _masked(body) != _CRC.unpack(data[end : end + _CRC.size].tobytes())[0]:
        raise _wrong_body(path, number, offset)
    return body.data


def _plain_records(mapped: _Mapped, check: bool, limit: int, number: int, offset: int) -> Iterator[memoryview]:
    data, path = mapped(), mapped.path
    while offset < len(data):
        end = _end(data, path, number, offset, limit)
        yield _body(data, path, number, offset, end, check)
        number, offset = number + 1, end + _CRC.size


def _inflated_records(mapped: _Mapped, kind: str, check: bool, limit: int) -> Iterator[bytes]:
    inflated, path, number = _Inflated(mapped, kind), mapped.path, 0
    while head := inflated.take(_HEADER.size):
        offset = inflated.position - len(head)
        length = _length(head, path, number, offset, limit)
        body, crc = inflated.take(length), inflated.take(_CRC.size)
        if len(crc) < _CRC.size:
            raise _broken(path, number, offset, f"is cut short: {len(body)} of {length} bytes; make the file anew")
        if check and _masked(body) != _CRC.unpack(crc)[0]:
            raise _wrong_body(path, number, offset)
        yield body
        number += 1


class _Inflated:
    """What comes out of a compressed file, forwards; never more of it in memory than was asked for."""

    def __init__(self, mapped: _Mapped, kind: str) -> None:
        self.position = 0
        self._pieces = _inflate(mapped, kind)
        self._piece = b""
        self._used = 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes, or all that are left."""
        taken = self._piece[self._used : self._used + size]
        self._used += len(taken)
        if len(taken) < size:
            taken = b"".join(self._more(taken, size))
        self.position += len(taken)
        return taken

    def _more(self, taken: bytes, size: int) -> Iterator[bytes]:
        while True:
            yield taken
            size -= len(taken)
            if not size:
                return
            self._piece, self._used = next(self._pieces, b""), 0
            if not self._piece:
                return
            taken = self._piece[:size]
            self._used = len(taken)


def _inflate(mapped: _Mapped, kind: str) -> Iterator[bytes]:
    """Pieces of bounded size; GZIP files may be several behind each other."""
    path, size, position = mapped.path, mapped.stamp[0], 0
    while position < size:
        if position and (kind != "GZIP" or mapped()[position : position + 2].tobytes() != _GZIP_MAGIC):
            raise DataError(f"{path} has {size - position} trailing bytes behind its {kind} stream; remove them")
        engine, fed, ended = zlib.decompressobj(_WINDOWS[kind]), b"", False
        while not engine.eof:
            if not fed:
                # the file is asked for anew at each chunk, so that a stream that rests keeps no file mapped
                fed = mapped()[position : position + _CHUNK_BYTES].tobytes()
                position += len(fed)
                ended = not fed
            try:
                piece = engine.decompress(fed, _PIECE_BYTES)
            except zlib.error as error:
                raise DataError(f"{path} is damaged near byte {position} of its {kind} stream: {error}") from None
            fed = engine.unconsumed_tail
            if piece:
                yield piece
            elif ended:
                raise DataError(f"{path} is cut short: its {kind} stream does not end; make the file anew")
        position -= len(engine.unused_data)


class _Forward:
    """Records of a stream by number: those passed over are held until they are asked for."""

    def __init__(self, path: str, stream: Callable[[], Iterator[bytes]], wanted: range, limit: int) -> None:
        self._path = path
        self._open = stream
        self._wanted = wanted
        self._limit = limit
        self._lock = threading.Lock()
        self._rewind()

    def get(self, number: int) -> bytes:
        with self._lock:
            if number in self._held:
                record = self._held.pop(number)
                self._size -= len(record) + _HELD_OVERHEAD
                return record
            if number < self._next:
                self._warn_if_dropped(number)
                self._rewind()
            try:
                return self._advance(number)
            except BaseException:
                self._rewind()
                raise

    def _rewind(self) -> None:
        self._stream = self._open()
        self._next = 0
        self._held: dict[int, bytes] = {}
        self._size = 0
        self._dropped = -1

    def _warn_if_dropped(self, number: int) -> None:
        if number <= self._dropped:
            log.warning(
                "%s is compressed, and is read from its beginning again for record %d: more than %d bytes would have to"
                " be held for this order; write a smaller shuffle_buffer_size, or use files without compression",
                self._path,
                number,
                self._limit,
            )

    def _advance(self, number: int) -> bytes:
        for record in self._stream:
            passed, self._next = self._next, self._next + 1
            if passed == number:
                return record
            if passed in self._wanted:
                self._hold(passed, record)
        raise DataError(f"{self._path} ends after {self._next} records, before record {number}; remove its index")

    def _hold(self, number: int, record: bytes) -> None:
        """Keep a record that was passed over. Beyond the limit the first go: after a resume nobody asks for them."""
        self._held[number] = record
        self._size += len(record) + _HELD_OVERHEAD
        while self._size > self._limit:
            self._dropped = max(self._dropped, oldest := next(iter(self._held)))
            self._size -= len(self._held.pop(oldest)) + _HELD_OVERHEAD


def _known(compression: _Given) -> _Given:
    if compression != "auto" and compression not in _KINDS:
        raise ConfigError(f"compression is {compression!r}; write 'auto', None, 'GZIP' or 'ZLIB'")
    return compression


def _detect(data: _Bytes) -> _Kind:
    """Plain, if the first bytes are a length and its CRC, which are so by chance once in 2**32 files."""
    head = data[: _HEADER.size].tobytes()
    if len(head) == _HEADER.size and _masked(head[:8]) == _HEADER.unpack(head)[1]:
        return None
    if head.startswith(_GZIP_MAGIC):
        return "GZIP"
    # a zlib header: method 8, a window that exists, no dictionary, and a number that 31 divides
    looks = len(head) > 1 and head[0] & 15 == 8 and head[0] < 0x80 and not head[1] & 32
    return "ZLIB" if looks and int.from_bytes(head[:2], "big") % 31 == 0 else None


_Index: TypeAlias = tuple[_Kind, int, NDArray[np.uint64]]
"""How a file is compressed, how many records it has, and, if it is plain, where they begin."""


def _make_index(mapped: _Mapped, compression: _Given, limit: int) -> _Index:
    data = mapped()
    kind = _detect(data) if compression == "auto" else compression
    offsets, offset = array("Q"), 0
    if kind is not None:
        count = sum(1 for _ in _inflated_records(mapped, kind, False, limit))
        return kind, count, np.empty(0, np.uint64)
    while offset < len(data):
        offsets.append(offset)
        offset = _end(data, mapped.path, len(offsets) - 1, offset, limit) + _CRC.size
    return kind, len(offsets), np.array(offsets, np.uint64)


def _index_path(path: str, index_dir: _Path | None) -> Path:
    """Beside the file, hidden from patterns; in a directory of indexes, files of one name have one each."""
    file = Path(os.path.abspath(path))  # noqa: PTH100 - links stay links, so that an index stays beside its name
    if index_dir is None:
        return file.with_name(f".{file.name}.index")
    return Path(index_dir) / f"{file.name}-{hashlib.sha256(os.fsencode(file)).hexdigest()[:16]}.index"


def _read_index(place: Path, stamp: tuple[int, int]) -> _Index | None:
    """The index that was kept; None where there is none, or one that is torn, altered or of another file."""
    try:
        most = _INDEX.size + stamp[0] // _FRAME * 8 + _CRC.size
        raw = place.read_bytes() if place.stat().st_size <= most else b""
    except OSError:
        return None
    if len(raw) < _INDEX.size + _CRC.size or _CRC.pack(_masked(raw[: -_CRC.size])) != raw[-_CRC.size :]:
        return None
    magic, size, changed, kind, count = _INDEX.unpack_from(raw)
    listed = 0 if kind else count
    if magic != _INDEX_MAGIC or (size, changed) != stamp or kind >= len(_KINDS):
        return None
    if len(raw) != _INDEX.size + listed * 8 + _CRC.size or count > size << _MOST_INFLATED:
        return None
    return _KINDS[kind], count, np.frombuffer(raw, "<u8", listed, _INDEX.size)


def _write_index(place: Path, stamp: tuple[int, int], kind: _Kind, count: int, offsets: NDArray[np.uint64]) -> None:
    raw = _INDEX.pack(_INDEX_MAGIC, *stamp, _KINDS.index(kind), count) + offsets.astype("<u8").tobytes()
    with contextlib.suppress(OSError):  # a place that cannot be written: the index is made again next time
        write_atomic(place, raw + _CRC.pack(_masked(raw)))
