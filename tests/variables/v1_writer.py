"""Writes TensorFlow's checkpoints of the older kind for the tests, whole or with one thing wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

SPEC = importlib.util.spec_from_file_location("bundle_writer", Path(__file__).with_name("bundle_writer.py"))
base = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(base)

FIELDS = {
    torch.float32: 5, torch.float64: 6, torch.int32: 7, torch.uint8: 7, torch.int16: 7, torch.int8: 7,
    torch.int64: 10, torch.bool: 11, torch.bfloat16: 13, torch.float16: 13,
}  # fmt: skip
Extents = list[tuple[int, int]]


def snap(data: bytes) -> bytes:
    """Compress with Snappy: the longest of the matches that four bytes are known to begin, if there is one."""
    out, seen, at, kept = base.varint(len(data)), {}, 0, 0
    while at < len(data):
        before = seen.get(data[at : at + 4]) if at + 4 <= len(data) else None
        seen[data[at : at + 4]] = at
        if before is None:
            at += 1
            continue
        size = 4
        while size < 64 and at + size < len(data) and data[before + size] == data[at + size]:
            size += 1
        out += literal(data[kept:at]) + copy(at - before, size)
        at += size
        kept = at
    return out + literal(data[kept:])


def literal(data: bytes) -> bytes:
    if len(data) <= 60:
        return bytes([(len(data) - 1) << 2]) + data if data else b""
    wide = ((len(data) - 1).bit_length() + 7) // 8
    return bytes([(59 + wide) << 2]) + (len(data) - 1).to_bytes(wide, "little") + data


def copy(offset: int, size: int) -> bytes:
    if offset < 2048 and 4 <= size <= 11:
        return bytes([(offset >> 8) << 5 | (size - 4) << 2 | 1, offset & 255])
    wide = 2 if offset < 65536 else 4
    return bytes([(size - 1) << 2 | (wide // 2 + 1)]) + offset.to_bytes(wide, "little")


def content(tensor: torch.Tensor) -> bytes:
    """A TensorProto with the numbers in the list for their type."""
    if tensor.dtype in (torch.float32, torch.float64):
        return base.field(FIELDS[tensor.dtype], base.raw(tensor))
    if tensor.dtype in (torch.float16, torch.bfloat16):
        numbers = [bits % 2**16 for bits in tensor.contiguous().view(torch.int16).flatten().tolist()]
    else:
        numbers = tensor.flatten().long().tolist()
    return base.field(FIELDS[tensor.dtype], b"".join(map(base.varint, numbers)))


def saved(name: str, extents: Extents, proto: bytes) -> bytes:
    return base.field(2, base.field(1, name.encode()) + base.field(2, base._slice(extents)) + base.field(3, proto))


def listed(name: str, shape: Iterable[int], code: int, slices: Iterable[Extents]) -> bytes:
    dims = b"".join(base.field(2, base.field(1, n)) for n in shape)
    return (
        base.field(1, name.encode())
        + base.field(2, dims)
        + base.field(3, code)
        + b"".join(base.field(4, base._slice(extents)) for extents in slices)
    )


def meta(entries: Iterable[bytes], needs: int = 0) -> bytes:
    version = base.field(1, 1) + base.field(2, needs)
    return base.field(1, b"".join(base.field(1, entry) for entry in entries) + base.field(2, version))


def rows_of(tensors: Mapping[str, torch.Tensor], parts: Mapping[str, int], files: int = 1) -> list[dict[bytes, bytes]]:
    """The rows of each file; `parts` says into how many slices of rows a tensor is cut, which go round the files."""
    rows, lists = [{} for _ in range(files)], [[] for _ in range(files)]
    for number, (name, tensor) in enumerate(tensors.items()):
        slices, start = [[] for _ in range(files)], 0
        pieces = tensor.chunk(parts[name]) if name in parts else [tensor]
        for turn, piece in enumerate(pieces):
            extents = [(0, -1)] * tensor.dim()
            if name in parts:
                extents[0] = (start, len(piece))
                start += len(piece)
            file = (number + turn) % files
            slices[file].append(extents)
            rows[file][base.slice_key(name, extents)] = saved(name, extents, content(piece))
        for file, found in enumerate(slices):
            if found:
                lists[file].append(listed(name, tensor.shape, base.CODES[tensor.dtype], found))
    return [{b"": meta(entries), **found} for entries, found in zip(lists, rows, strict=True)]


def table(rows: Mapping[bytes, bytes], *, compress: bool = False, rows_each: int = 4) -> bytes:
    ordered = sorted(rows.items())
    groups = [ordered[at : at + rows_each] for at in range(0, len(ordered), rows_each)]
    blocks = [(group[-1][0], base.block(group, 3)) for group in groups]
    return base.assemble([(key, snap(block)) for key, block in blocks], 1) if compress else base.assemble(blocks)


def write_v1(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    parts: Mapping[str, int] | None = None,
    *,
    files: int = 1,
    compress: bool = False,
) -> Path:
    """One file, or several beginning with `path`."""
    every = rows_of(tensors, parts or {}, files)
    for number, rows in enumerate(every):
        file = path if files == 1 else Path(f"{path}-{number:05d}-of-{files:05d}")
        file.write_bytes(table(rows, compress=compress))
    return path
