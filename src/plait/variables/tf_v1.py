"""TensorFlow's checkpoints of the older kind (V1), as TF-Slim's published weights are, read without TensorFlow.

Such a checkpoint is one file, DIR/inception_v3.ckpt, or several, DIR/model.ckpt-00000-of-00002. Each is a sorted table:

    ""                    the names, types, shapes and slices of the tensors in this file
    name and slice        the numbers of a slice; a tensor that is not partitioned is one slice

Names and layouts are those of the newer kind, see `tf_bundle`.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import CheckpointError
from plait.variables.tf_bundle import (
    DTYPES,
    Extents,
    Place,
    TensorInfo,
    check_version,
    choose,
    covers_all,
    is_file_of_bundle,
    named_newest,
    parse_shape,
    parse_slice,
    place_slices,
    slice_key,
)
from plait.variables.tf_table import LARGEST_GAIN, Table, is_table, read_message, reading

__all__ = ["is_v1", "list_v1", "read_v1"]

_SHARD = re.compile(r"-(?:\d{5}|\?{5})-of-(\d{5})$")
_MAX_BLOCK = 1 << 32
"""Bytes of a block unpacked. TensorFlow keeps a slice, which is never cut into blocks, under half of that."""

_CONTENT = 4
_FIXED = {1: (5, "<f4"), 2: (6, "<f8")}
_PACKED = {
    3: (7, "<i4"), 4: (7, "u1"), 5: (7, "<i2"), 6: (7, "i1"), 9: (10, "<i8"), 10: (11, "?"), 14: (13, "<u2"),
    19: (13, "<u2"),
}  # fmt: skip
"""By type: the field of TensorProto that has its numbers, as they are or seven bits a byte, and what they become."""
_KINDS = _FIXED | _PACKED

_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class _Variable(TensorInfo):
    pieces: list[tuple[Path, Extents]]
    """Its slices, and the files that they are in."""


@dataclass(frozen=True)
class _Piece:
    name: str
    code: int
    extents: Extents
    place: Place

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(side.stop - side.start for side in self.place)


def is_v1(path: str | os.PathLike[str]) -> bool:
    """Whether `path` names a checkpoint of the older kind: its file, one of its files, what their names begin with.

    Of a directory: whether one is the newest, by the file `checkpoint`, or the only.
    """
    try:
        return bool(_find_files(Path(path)))
    except OSError:
        return False


def list_v1(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Every tensor by its name, also those that are no numbers; the numbers are not looked at."""
    return dict(_load(path))


def read_v1(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The tensors in TensorFlow's layout, checked; strings and the like are passed over, with a note."""
    variables = _load(path)
    wanted = {name: variables[name] for name in choose(Path(path), variables, names)}
    by_file = _pieces_by_file(Path(path), wanted)
    for file, pieces in by_file.items():
        _check_room(file, pieces)
    with reading(Path(path)):
        whole = {name: _empty(name, variable) for name, variable in wanted.items()}
    for file, pieces in by_file.items():
        with reading(file):
            for piece, numbers in _read_pieces(file, pieces):
                whole[piece.name][piece.place] = numbers
    return {name: _to_tensor(whole.pop(name), variable) for name, variable in wanted.items()}


def _find_files(path: Path) -> list[Path]:
    return _find_newest(path) if path.is_dir() else _find_of_name(path)


def _find_of_name(path: Path) -> list[Path]:
    if is_file_of_bundle(path) or Path(f"{path}.index").is_file():
        return []
    if is_table(path):
        return _shards(path) or [path]
    shards = _shards(path) if "?" in path.name else _shards_of_prefix(path)
    return shards if any(map(is_table, shards)) else []


def _find_newest(directory: Path) -> list[Path]:
    named = named_newest(directory)
    if named:
        # a directory that was moved still has the path where it was written
        return _find_of_name(named) or _find_of_name(directory / named.name)
    if next(directory.glob("*.index"), None):
        return []
    found = {tuple(_shards(file) or [file]) for file in directory.glob("*.ckpt*") if is_table(file)}
    return list(found.pop()) if len(found) == 1 else []


def _shards(path: Path) -> list[Path]:
    """All files of which `path` is one, or which it stands for with question marks."""
    hit = _SHARD.search(path.name)
    if not hit:
        return []
    return [path.with_name(f"{path.name[: hit.start()]}-{number:05d}-of-{hit[1]}") for number in range(int(hit[1]))]


def _shards_of_prefix(prefix: Path) -> list[Path]:
    found = [file for file in prefix.parent.glob(f"{glob.escape(prefix.name)}-*-of-*") if is_table(file)]
    sets = {tuple(_shards(file)) for file in found if _SHARD.sub("", file.name) == prefix.name} - {()}
    return list(sets.pop()) if len(sets) == 1 else []


def _load(path: str | os.PathLike[str]) -> dict[str, _Variable]:
    with reading(Path(path)):
        files = _find_files(Path(path))
    if not files:
        raise CheckpointError(f"{path} is no TensorFlow checkpoint of the older kind (V1); write the path of its file")
    variables: dict[str, _Variable] = {}
    for file in files:
        with reading(file):
            for name, found in _contents(file):
                known = variables.setdefault(name, found)
                if (known.code, known.shape) != (found.code, found.shape):
                    raise CheckpointError(
                        f"{name!r} is {found.dtype} {found.shape} here, {known.dtype} {known.shape} before"
                    )
                if known is not found:
                    known.pieces.extend(found.pieces)
    return variables


def _contents(file: Path) -> Iterator[tuple[str, _Variable]]:
    with file.open("rb") as stream:
        value = dict(Table(stream, _MAX_BLOCK).find([b""])).get(b"")
    metas = read_message(value)[1].get(1, []) if value is not None else []
    if not metas:
        raise CheckpointError("does not tell what is in it, so it is no checkpoint")
    for meta in metas:
        tensors = read_message(meta)[1]
        check_version(tensors.get(2, []))
        for tensor in tensors.get(1, []):
            numbers, nested = read_message(tensor)
            name = _text(nested.get(1, []))
            pieces = [(file, parse_slice(piece)) for piece in nested.get(4, [])]
            yield name, _Variable(numbers.get(3, 0), parse_shape(repr(name), nested.get(2, [])), pieces)


def _text(found: list[memoryview]) -> str:
    return bytes(found[-1]).decode() if found else ""


def _pieces_by_file(path: Path, wanted: dict[str, _Variable]) -> dict[Path, dict[bytes, _Piece]]:
    """What is to be read of each file, by its key there."""
    found: dict[Path, dict[bytes, _Piece]] = {}
    for name, variable in wanted.items():
        with reading(path):
            places = place_slices(name, variable.shape, [extents for _, extents in variable.pieces])
        for (file, extents), place in zip(variable.pieces, places, strict=True):
            piece = _Piece(name, variable.code, extents, place)
            found.setdefault(file, {})[slice_key(name, extents)] = piece
    return found


def _check_room(file: Path, pieces: dict[bytes, _Piece]) -> None:
    """The file is long enough for what is asked of it, before any memory is taken."""
    with reading(file):
        size = file.stat().st_size
        needed = sum(math.prod(piece.shape) * _least_bytes(piece.code) for piece in pieces.values())
        if needed > LARGEST_GAIN * size:
            raise CheckpointError(f"has {size} bytes, but tells of {needed} or more of numbers")


def _least_bytes(code: int) -> int:
    return np.dtype(_FIXED[code][1]).itemsize if code in _FIXED else 1


def _empty(name: str, variable: _Variable) -> _Array:
    if len(variable.pieces) > 1:
        places = place_slices(name, variable.shape, [extents for _, extents in variable.pieces])
        if not covers_all(variable.shape, places):
            raise CheckpointError(f"the slices of {name!r} overlap and leave gaps")
    return np.empty(variable.shape, _KINDS[variable.code][1])


def _to_tensor(array: _Array, variable: _Variable) -> Tensor:
    tensor, dtype = torch.from_numpy(array), DTYPES[variable.code]
    return tensor if tensor.dtype == dtype else tensor.view(dtype)  # halves are kept as their bits


def _read_pieces(file: Path, pieces: dict[bytes, _Piece]) -> Iterator[tuple[_Piece, _Array]]:
    missing = dict(pieces)
    with file.open("rb") as stream:
        for key, value in Table(stream, _MAX_BLOCK).find(pieces):
            piece = missing.pop(key)
            yield piece, _read_piece(piece, value)
    if missing:
        first = next(iter(missing.values()))
        raise CheckpointError(f"{first.name!r} has a slice {first.extents} that is listed, but not there")


def _read_piece(piece: _Piece, value: memoryview) -> _Array:
    saved = [read_message(data)[1] for data in read_message(value)[1].get(2, [])]
    fields = saved[-1] if saved else {}
    name, extents = _text(fields.get(1, [])), [parse_slice(found) for found in fields.get(2, [])]
    if name != piece.name or extents != [piece.extents]:
        raise CheckpointError(f"where {piece.name!r} {piece.extents} should be, there is {name!r} {extents}")
    nested = read_message(fields[3][-1])[1] if 3 in fields else {}
    try:
        return _numbers(nested, piece.code, math.prod(piece.shape)).reshape(piece.shape)
    except CheckpointError as error:
        raise CheckpointError(f"{piece.name!r}: {error}") from error


def _numbers(nested: dict[int, list[memoryview]], code: int, count: int) -> _Array:
    """The numbers of a TensorProto, of which there must be `count`."""
    field, kind = _KINDS[code]
    if _CONTENT in nested:
        return _plain(nested[_CONTENT], np.dtype(kind), count)
    if code in _FIXED:
        return _plain(nested.get(field, []), np.dtype(kind), count)
    return _narrow(_unpack(b"".join(nested.get(field, [])), count), np.dtype(kind))


def _plain(found: list[memoryview], dtype: np.dtype[Any], count: int) -> _Array:
    size = sum(map(len, found))
    if size != count * dtype.itemsize:
        raise CheckpointError(f"has {size} bytes of numbers, {count * dtype.itemsize} are needed")
    array = np.frombuffer(found[0] if len(found) == 1 else b"".join(found), np.uint8)
    return array.view(dtype) if dtype.kind != "b" else np.not_equal(array, 0)


def _unpack(packed: bytes, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Numbers of seven bits a byte, all at once."""
    octets = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if len(ends) != count or (octets[-1:] >= 0x80).any():
        raise CheckpointError(f"has {len(ends)} numbers, {count} are needed")
    starts = np.concatenate([np.zeros(min(count, 1), np.int64), ends[:-1] + 1])
    lengths = ends - starts + 1
    longest = int(lengths.max(initial=0))
    if longest > 10:
        raise CheckpointError("a number in it does not end")
    values = np.zeros(count, np.uint64)
    for at in range(longest):
        more = lengths > at
        values[more] |= (octets[starts[more] + at] & 0x7F).astype(np.uint64) << np.uint64(7 * at)
    return values.view(np.int64)


def _narrow(values: np.ndarray[tuple[int], np.dtype[np.int64]], dtype: np.dtype[Any]) -> _Array:
    if dtype.kind == "b":
        return np.not_equal(values, 0)
    limits = np.iinfo(dtype)
    if values.size and not limits.min <= values.min() <= values.max() <= limits.max:
        raise CheckpointError(f"has numbers that are no {dtype}")
    return values.astype(dtype)
