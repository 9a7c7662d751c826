"""TensorFlow's checkpoints (V2, "bundles"), read without TensorFlow.

A bundle is a prefix, such as DIR/model.ckpt-1234, and files whose names begin with it:

    .index                    a sorted table: name -> type, shape, place and checksum of a tensor
    .data-00000-of-00001      the tensors' bytes, in one or more shards

Names stay what TensorFlow calls them; plait's networks use slim's, so they are the same. What differs is the order of
a weight's dimensions, which `to_torch_layout` changes by the last part of the name:

    weights, kernel, pointwise_weights, pointwise_kernel    (H, W, in, out) -> (out, in, H, W);  (in, out) -> (out, in)
    depthwise_weights, depthwise_kernel                     (H, W, C, M) -> (C * M, 1, H, W)
    linear_model/COLUMN/weights, everything else            as it is

The rows of a linear_model's weights are ids, as in a table, and `plait.feature_column` has them so.

No dimension is added or dropped: a dense layer that slim writes as a 1 x 1 convolution stays one. An optimizer's slots
and moving averages ("conv1/weights/Momentum") are laid out like the variable that they belong to.

Checkpoints of the older kind are read by `tf_v1`, with what both have: types, shapes, slices and their keys.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plait.errors import CheckpointError
from plait.variables.tf_table import Table, masked_crc, read_message, reading

__all__ = [
    "DTYPES",
    "Entry",
    "Extents",
    "Place",
    "TensorInfo",
    "check_version",
    "choose",
    "covers_all",
    "is_bundle",
    "is_file_of_bundle",
    "list_bundle",
    "named_newest",
    "parse_shape",
    "parse_slice",
    "place_slices",
    "read_bundle",
    "slice_key",
    "to_torch_layout",
]

log = logging.getLogger("plait")

_FILE = re.compile(r"\.(index|data-\d{5}-of-\d{5})$")
_MAX_INDEX = 256 << 20
"""Bytes of an index, as a file and unpacked."""
_MAX_STATE = 16 << 20
_MAX_RANK = 32
_READS_VERSION = 1
_ATTRIBUTE = "/.ATTRIBUTES/VARIABLE_VALUE"
"""What tf.train.Checkpoint puts behind a variable's path."""

DTYPES = {
    1: torch.float32, 2: torch.float64, 3: torch.int32, 4: torch.uint8, 5: torch.int16, 6: torch.int8,
    9: torch.int64, 10: torch.bool, 14: torch.bfloat16, 19: torch.float16,
}  # fmt: skip
"""TensorFlow's numbers for types."""
_OTHER_DTYPES = {
    7: "string", 8: "complex64", 17: "uint16", 18: "complex128", 20: "resource", 21: "variant", 22: "uint32",
    23: "uint64",
}  # fmt: skip

_DENSE = {"weights", "kernel", "pointwise_weights", "pointwise_kernel"}
_LINEAR_MODEL = re.compile(r"linear_model(_\d+)?")
_DEPTHWISE = {"depthwise_weights", "depthwise_kernel"}
_SLOTS = {
    "Adadelta", "Adadelta_1", "Adagrad", "Adam", "Adam_1", "ExponentialMovingAverage", "Ftrl", "Ftrl_1", "Momentum",
    "RMSProp", "RMSProp_1", "RMSProp_2",
}  # fmt: skip


Extents = tuple[tuple[int, int], ...]
"""A slice of a tensor: (start, length) by dimension; length -1 for all of it."""
Place = tuple[slice, ...]
"""The same, as Python writes it."""


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint tells of one tensor."""

    code: int
    """Its type, as TensorFlow numbers them."""
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        known = DTYPES.get(self.code)
        return _OTHER_DTYPES.get(self.code, f"type {self.code}") if known is None else str(known).removeprefix("torch.")

    @property
    def readable(self) -> bool:
        return self.code in DTYPES

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in memory; 0 of one that cannot be read."""
        return math.prod(self.shape) * DTYPES[self.code].itemsize if self.readable else 0


@dataclass(frozen=True)
class Entry(TensorInfo):
    """What the index says of one tensor."""

    shard: int
    offset: int
    size: int
    """Bytes in the shard; 0 where the tensor lies in slices."""
    checksum: int
    slices: tuple[Extents, ...] = ()
    """Of a partitioned variable."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in memory; of one that cannot be read, on disk."""
        return super().nbytes if self.readable else self.size


@dataclass(frozen=True)
class _Bundle:
    prefix: Path
    shards: int
    entries: Mapping[str, Entry]
    parts: Mapping[bytes, Entry]
    """The slices of partitioned variables, by their keys in the table."""

    def shard(self, number: int) -> Path:
        return Path(f"{self.prefix}.data-{number:05d}-of-{self.shards:05d}")


def is_bundle(path: str | os.PathLike[str]) -> bool:
    """Whether `path` names a bundle: its prefix, a file of it, or a directory where one is the newest or the only."""
    try:
        return _find_prefix(Path(path)) is not None
    except OSError:
        return False


def list_bundle(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """Every tensor by its name, also those that are no numbers; the data are not looked at."""
    return dict(_load(path).entries)


def read_bundle(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a bundle in TensorFlow's layout, checked; strings and the like are passed over, with a note."""
    bundle = _load(path)
    wanted = choose(bundle.prefix, bundle.entries, names)
    _check_room(bundle, wanted)
    return {name: _read_tensor(bundle, name, bundle.entries[name]) for name in wanted}


def to_torch_layout(name: str, array: Tensor) -> Tensor:
    """`array` with its dimensions in torch's order, by what the variable's name ends with."""
    parts = name.removesuffix(_ATTRIBUTE).split("/")
    leaf = parts[-2] if parts[-1] in _SLOTS and len(parts) > 1 else parts[-1]
    if leaf in _DENSE and array.dim() == 4:
        return array.permute(3, 2, 0, 1).contiguous()
    if leaf in _DENSE and array.dim() == 2:
        of_columns = leaf == "weights" and any(_LINEAR_MODEL.fullmatch(part) for part in parts)
        return array if of_columns else array.t().contiguous()
    if leaf in _DEPTHWISE and array.dim() == 4:
        height, width, channels, multiplier = array.shape
        return array.permute(2, 3, 0, 1).reshape(channels * multiplier, 1, height, width)
    return array


def is_file_of_bundle(path: str | os.PathLike[str]) -> bool:
    """Whether a bundle would call one of its files so."""
    return _FILE.search(os.fspath(path)) is not None


def named_newest(directory: Path) -> Path | None:
    """What the file `checkpoint` that TensorFlow's Saver writes beside its checkpoints calls the newest."""
    state = directory / "checkpoint"
    if not state.is_file() or state.stat().st_size > _MAX_STATE:
        return None
    found = re.search(rb'^\s*model_checkpoint_path\s*:\s*"((?:[^"\\\n]|\\.)*)"', state.read_bytes(), re.MULTILINE)
    return directory / os.fsdecode(_unescape(found[1])) if found else None


def choose(path: Path, entries: Mapping[str, TensorInfo], names: Iterable[str] | None) -> list[str]:
    """`names`, which must be there as numbers; without any, all that are numbers, with a note on the others."""
    if names is not None:
        return _named(path, entries, names)
    others = [f"{name!r} ({entry.dtype})" for name, entry in entries.items() if not entry.readable]
    if others:
        log.info("%s: passed over what torch has no numbers for: %s", path, ", ".join(others))
    return [name for name, entry in entries.items() if entry.readable]


def check_version(found: Iterable[memoryview]) -> None:
    """Refuse what a newer TensorFlow wrote for newer readers only."""
    for version in found:
        needs = read_message(version)[0].get(2, 0)
        if needs > _READS_VERSION:
            raise CheckpointError(f"needs a reader of version {needs}, plait reads {_READS_VERSION}")


def parse_shape(name: str, found: Iterable[memoryview]) -> tuple[int, ...]:
    """The lengths of a tensor's dimensions, such as there are."""
    dimensions = [dimension for shape in found for dimension in read_message(shape)[1].get(2, [])]
    shape = tuple(read_message(dimension)[0].get(1, 0) for dimension in dimensions[: _MAX_RANK + 1])
    if len(shape) > _MAX_RANK or min(shape, default=0) < 0 or math.prod(n or 1 for n in shape) >= 1 << 56:
        raise CheckpointError(f"{name} has the shape {shape}, which no tensor has")
    return shape


def parse_slice(data: memoryview) -> Extents:
    """One slice of a tensor."""
    extents = [read_message(extent)[0] for extent in read_message(data)[1].get(1, [])]
    return tuple((extent.get(1, 0), extent.get(2, -1)) for extent in extents)


def place_slices(name: str, shape: tuple[int, ...], slices: Sequence[Extents]) -> list[Place]:
    """Where the slices of a tensor belong; together they have as many numbers as it has."""
    places = []
    for extents in slices:
        pairs = zip(extents, shape, strict=False)
        place = tuple(slice(at, at + length) if length >= 0 else slice(0, size) for (at, length), size in pairs)
        inside = all(0 <= piece.start <= piece.stop <= size for piece, size in zip(place, shape, strict=False))
        if len(extents) != len(shape) or not inside:
            raise CheckpointError(f"{name!r} of the shape {shape} has a slice {extents} that does not fit it")
        places.append(place)
    if sum(math.prod(piece.stop - piece.start for piece in place) for place in places) != math.prod(shape):
        raise CheckpointError(f"the slices of {name!r} have more or fewer numbers than its shape {shape}")
    return places


def covers_all(shape: tuple[int, ...], places: Sequence[Place]) -> bool:
    """Whether the slices leave no gap."""
    filled = np.zeros(shape, bool)
    for place in places:
        filled[place] = True
    return bool(filled.all())


def slice_key(name: str, extents: Iterable[tuple[int, int]]) -> bytes:
    """The table's key of a slice, in TensorFlow's code that sorts as the numbers and names in it do."""
    numbers = [number for extent in extents for number in extent]
    text = name.encode().replace(b"\0", b"\0\xff")  # so that the two bytes that end it are not in it
    rank = len(numbers) // 2
    return b"\0" + text + b"\0\1" + (bytes([1, rank]) if rank else b"\0") + b"".join(map(_ordered, numbers))


def _find_prefix(path: Path) -> Path | None:
    if path.is_dir():
        return _newest(path)
    prefix = Path(_FILE.sub("", os.fspath(path)))
    return prefix if _index(prefix).is_file() else None


def _index(prefix: Path) -> Path:
    return Path(f"{prefix}.index")


def _newest(directory: Path) -> Path | None:
    """What the directory's file `checkpoint` calls the newest; without one, the only bundle there."""
    named = named_newest(directory)
    if named:
        # a directory that was moved still has the path where it was written
        return named if _index(named).is_file() else directory / named.name
    indexes = list(directory.glob("*.index"))
    return indexes[0].with_suffix("") if len(indexes) == 1 else None


def _unescape(text: bytes) -> bytes:
    def plain(hit: re.Match[bytes]) -> bytes:
        return bytes([int(hit[1], 8) & 0xFF]) if hit[1] else hit[2]

    return re.sub(rb"\\(?:([0-7]{1,3})|(.))", plain, text)


def _load(path: str | os.PathLike[str]) -> _Bundle:
    with reading(Path(path)):
        prefix = _find_prefix(Path(path))
    if prefix is None:
        raise CheckpointError(
            f"{path} is no TensorFlow checkpoint; write its prefix, such as DIR/model.ckpt-1234 where"
            " DIR/model.ckpt-1234.index is, or a directory whose file `checkpoint` names the newest"
        )
    file = _index(prefix)
    with reading(file):
        if not file.is_file():
            raise CheckpointError("is named by the file `checkpoint` next to it, but is not there")
        if file.stat().st_size > _MAX_INDEX:
            raise CheckpointError(f"has {file.stat().st_size} bytes, {_MAX_INDEX} are allowed")
        with file.open("rb") as stream:
            rows = dict(Table(stream, _MAX_INDEX).rows())
        return _parse_index(prefix, rows)


def _parse_index(prefix: Path, rows: dict[bytes, memoryview]) -> _Bundle:
    if b"" not in rows:
        raise CheckpointError("has no header, so it is no checkpoint's index")
    shards = _parse_header(rows.pop(b""))
    entries, parts = {}, {}
    for key, value in rows.items():
        # a name never begins with a zero byte; the keys of slices do
        if key.startswith(b"\0"):
            parts[key] = _parse_entry(repr(key), value, shards)
        else:
            name = key.decode()
            entries[name] = _parse_entry(repr(name), value, shards)
    return _Bundle(prefix, shards, entries, parts)


def _parse_header(data: memoryview) -> int:
    """The number of shards."""
    numbers, nested = read_message(data)
    shards, big_endian = numbers.get(1, 0), numbers.get(2, 0)
    if big_endian:
        raise CheckpointError("was written on a big-endian machine; save it again on a little-endian one")
    if not 0 < shards < 100_000:
        raise CheckpointError(f"names {shards} shards of data")
    check_version(nested.get(3, []))
    return shards


def _parse_entry(name: str, data: memoryview, shards: int) -> Entry:
    numbers, nested = read_message(data)
    shape = parse_shape(name, nested.get(2, []))
    slices = tuple(parse_slice(piece) for piece in nested.get(7, []))
    shard, offset, size = (numbers.get(field, 0) for field in (3, 4, 5))
    entry = Entry(numbers.get(1, 0), shape, shard, offset, size, numbers.get(6, 0), slices)
    if not 0 <= shard < shards or offset < 0 or size < 0:
        raise CheckpointError(f"{name} lies in shard {shard} of {shards}, {size} bytes at {offset}: no such place")
    if entry.readable and not slices and size != entry.nbytes:
        raise CheckpointError(f"{name} has {size} bytes, but {entry.dtype} of the shape {shape} has {entry.nbytes}")
    return entry


def _named(path: Path, entries: Mapping[str, TensorInfo], names: Iterable[str]) -> list[str]:
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in entries:
            some = ", ".join(map(repr, list(entries)[:5]))
            raise CheckpointError(f"{path} has no variable {name!r}; it has {some or 'none'}")
        if not entries[name].readable:
            raise CheckpointError(f"{path} has {name!r} as {entries[name].dtype}, which cannot be read")
    return wanted


def _check_room(bundle: _Bundle, names: Iterable[str]) -> None:
    """Every shard is there and long enough for what is asked of it, before any memory is taken."""
    asked: dict[int, int] = {}
    ends: dict[int, int] = {}
    for name in names:
        entry = bundle.entries[name]
        with reading(_index(bundle.prefix)):
            pieces = [part for _, part in _parts(bundle, name, entry)] if entry.slices else [entry]
        for piece in pieces:
            asked[piece.shard] = asked.get(piece.shard, 0) + piece.size
            ends[piece.shard] = max(ends.get(piece.shard, 0), piece.offset + piece.size)
    for number, size in asked.items():
        file = bundle.shard(number)
        with reading(file):
            length = file.stat().st_size
            needed = max(size, ends[number])
            if needed > length:
                raise CheckpointError(f"has {length} bytes, the index tells of {needed}: it was cut, or is of another")


def _read_tensor(bundle: _Bundle, name: str, entry: Entry) -> Tensor:
    if not entry.slices:
        return _read_piece(bundle, name, entry)
    parts = _parts(bundle, name, entry)
    if not covers_all(entry.shape, [place for place, _ in parts]):
        raise CheckpointError(f"{_index(bundle.prefix)}: the slices of {name!r} overlap and leave gaps")
    whole = torch.empty(entry.shape, dtype=DTYPES[entry.code])
    for place, part in parts:
        whole[place] = _read_piece(bundle, name, part)
    return whole


def _read_piece(bundle: _Bundle, name: str, entry: Entry) -> Tensor:
    file = bundle.shard(entry.shard)
    with reading(file):
        raw = np.fromfile(file, np.uint8, entry.size, offset=entry.offset)
        if raw.size != entry.size or masked_crc(raw) != entry.checksum:
            raise CheckpointError(f"{name!r} was altered, the checksum of its {entry.size} bytes is not the index's")
    dtype, flat = DTYPES[entry.code], torch.from_numpy(raw)
    if dtype is torch.bool:  # any byte but 0 is true, also one that torch would not write
        return flat.ne(0).reshape(entry.shape)
    return flat.view(dtype).reshape(entry.shape) if entry.size else torch.empty(entry.shape, dtype=dtype)


def _parts(bundle: _Bundle, name: str, entry: Entry) -> list[tuple[Place, Entry]]:
    """The slices of a partitioned variable and where each belongs."""
    found = []
    for extents, place in zip(entry.slices, place_slices(name, entry.shape, entry.slices), strict=True):
        part = bundle.parts.get(slice_key(name, extents))
        if part is None:
            raise CheckpointError(f"{name!r} has a slice {extents} that is not in the index")
        shape = tuple(piece.stop - piece.start for piece in place)
        if (part.code, part.shape, part.slices) != (entry.code, shape, ()):
            raise CheckpointError(f"{name!r} of the shape {entry.shape} has a slice {extents} that does not fit it")
        found.append((place, part))
    return found


def _ordered(number: int) -> bytes:
    """A signed number: as many one-bits as it has bytes, then its own bits; all turned over where it is negative."""
    magnitude = ~number if number < 0 else number
    length = magnitude.bit_length() // 7 + 1
    ones = ((1 << length) - 1) << (7 * length)
    return ((number % (1 << (8 * length))) ^ ones).to_bytes(length, "big")
