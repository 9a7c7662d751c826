"""Writes TensorFlow's bundles for the tests, whole or with one thing wrong."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import google_crc32c
import torch

CODES = {
    torch.float32: 1, torch.float64: 2, torch.int32: 3, torch.uint8: 4, torch.int16: 5, torch.int8: 6,
    torch.int64: 9, torch.bool: 10, torch.bfloat16: 14, torch.float16: 19,
}  # fmt: skip
MAGIC = 0xDB4775248B80FB57
Row = tuple[bytes, bytes]


def masked(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def varint(number: int) -> bytes:
    number %= 2**64
    out = b""
    while number > 127:
        out += bytes([number % 128 + 128])
        number //= 128
    return out + bytes([number])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number * 8) + varint(value)
    return varint(number * 8 + 2) + varint(len(value)) + value


def header(shards: int = 1, big_endian: int = 0, needs: int = 0) -> bytes:
    return field(1, shards) + field(2, big_endian) + field(3, field(1, 1) + field(2, needs))


def entry(
    code: int,
    shape: Iterable[int] = (),
    *,
    data: bytes = b"",
    size: int | None = None,
    shard: int = 0,
    offset: int = 0,
    slices: Iterable[Iterable[tuple[int, int]]] = (),
) -> bytes:
    dims = b"".join(field(2, field(1, n)) for n in shape)
    place = field(3, shard) + field(4, offset) + field(5, len(data) if size is None else size)
    checksum = varint(6 * 8 + 5) + struct.pack("<I", masked(data))
    return field(1, code) + field(2, dims) + place + checksum + b"".join(field(7, _slice(s)) for s in slices)


def _slice(extents: Iterable[tuple[int, int]]) -> bytes:
    """A length of -1 means all: nothing is written then."""
    return b"".join(field(1, b"" if n < 0 else field(1, start) + field(2, n)) for start, n in extents)


def slice_key(name: str, extents: list[tuple[int, int]]) -> bytes:
    """Of numbers under 64, which are one byte each."""
    numbers = bytes((n % 256) ^ 0x80 for extent in extents for n in extent)
    rank = bytes([1, len(extents)]) if extents else b"\0"
    return b"\0" + name.encode() + b"\0\1" + rank + numbers


def block(rows: Iterable[Row], restart_every: int = 16) -> bytes:
    out, restarts, last = b"", [], b""
    for index, (key, value) in enumerate(rows):
        shared = 0
        if index % restart_every == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    return out + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def sealed(contents: bytes, kind: int = 0) -> bytes:
    return contents + bytes([kind]) + struct.pack("<I", masked(contents + bytes([kind])))


def table(rows: Iterable[Row], *, rows_each: int = 4, kind: int = 0) -> bytes:
    """Rows as they come, also in the wrong order."""
    rows = list(rows)
    groups = [rows[at : at + rows_each] for at in range(0, len(rows), rows_each)]
    return assemble([(group[-1][0], block(group, 3)) for group in groups], kind)


def assemble(blocks: Iterable[Row], kind: int = 0) -> bytes:
    """A table of ready blocks, each with its last key."""
    out, handles = b"", []
    for key, contents in blocks:
        handles.append((key, varint(len(out)) + varint(len(contents))))
        out += sealed(contents, kind)
    meta, index = block([]), block(handles, 1)
    footer = varint(len(out)) + varint(len(meta))
    out += sealed(meta)
    footer += varint(len(out)) + varint(len(index))
    return out + sealed(index) + footer.ljust(40, b"\0") + struct.pack("<Q", MAGIC)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def bundle_rows(
    tensors: Mapping[str, torch.Tensor], shards: int = 1, parts: Mapping[str, int] | None = None
) -> tuple[dict[bytes, bytes], list[bytes]]:
    """The table's rows and the shards' bytes; `parts` says into how many slices of rows a tensor is cut."""
    rows, data = {b"": header(shards)}, [b""] * shards

    def place(key: bytes, tensor: torch.Tensor) -> None:
        shard, content = len(rows) % shards, raw(tensor)
        code = CODES[tensor.dtype]
        rows[key] = entry(code, tensor.shape, data=content, shard=shard, offset=len(data[shard]))
        data[shard] += content

    for name, tensor in tensors.items():
        if name not in (parts or {}):
            place(name.encode(), tensor)
            continue
        slices, start = [], 0
        for piece in tensor.chunk((parts or {})[name]):
            slices.append([(start, len(piece)), *[(0, -1)] * (tensor.dim() - 1)])
            place(slice_key(name, slices[-1]), piece)
            start += len(piece)
        rows[name.encode()] = entry(CODES[tensor.dtype], tensor.shape, slices=slices)
    return rows, data


def write_files(prefix: Path, rows: Mapping[bytes, bytes], data: list[bytes]) -> Path:
    Path(f"{prefix}.index").write_bytes(table(sorted(rows.items())))
    for number, content in enumerate(data):
        Path(f"{prefix}.data-{number:05d}-of-{len(data):05d}").write_bytes(content)
    return prefix


def write_bundle(
    prefix: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1, parts: Mapping[str, int] | None = None
) -> Path:
    return write_files(prefix, *bundle_rows(tensors, shards, parts))
