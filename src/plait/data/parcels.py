"""Values of samples as bytes, from one process of ours to another, and back: JSON, and the memory of arrays behind it.

Nothing in it is ever run as code, as a pickle would be.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch

from plait.errors import DataError

__all__ = ["pack", "unpack"]

_LENGTH = struct.Struct("<Q")
_PLAIN = (type(None), bool, int, float, str)
_KINDS = "biufcUSmM"
"""Of arrays: what has no references in it, and no fields."""


def pack(value: Any) -> bytes:
    """A value as bytes: numbers, text, bytes, arrays, tensors, `...`, and lists, tuples and dicts of these.

    >>> unpack(pack({"label": 3, "box": (0.5, np.float32(1)), "name": ["a"]}))
    {'label': 3, 'box': (0.5, np.float32(1.0)), 'name': ['a']}
    """
    pieces: list[bytes] = []
    text = json.dumps(_packed(value, pieces)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *pieces])


def unpack(data: bytes) -> Any:
    """What was packed; arrays and tensors have memory of their own."""
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    return _unpacked(json.loads(data[_LENGTH.size : end]), _Pieces(data, end))


class _Pieces:
    """The bytes behind the JSON, taken in the order in which they were put there."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data, self._start = data, start

    def take(self, length: int) -> bytearray:
        piece = bytearray(memoryview(self._data)[self._start : self._start + length])
        self._start += length
        return piece


def _packed(value: Any, pieces: list[bytes]) -> Any:
    """Lists are lists in the JSON; all else that JSON does not know is an object of one key, its kind."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [_packed(item, pieces) for item in value]
    if type(value) is tuple:
        return {"tuple": [_packed(item, pieces) for item in value]}
    if type(value) is dict:
        return {"dict": [[_packed(key, pieces), _packed(item, pieces)] for key, item in value.items()]}
    if value is ...:
        return {"...": None}
    if isinstance(value, (bytes, bytearray, memoryview)):
        pieces.append(bytes(value))
        return {"bytearray" if isinstance(value, bytearray) else "bytes": len(pieces[-1])}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in _KINDS:
        pieces.append(value.tobytes())
        facts = [value.dtype.str, list(value.shape), len(pieces[-1])]
        return {"array" if isinstance(value, np.ndarray) else "scalar": facts}
    if type(value) is torch.Tensor and value.layout == torch.strided and value.device.type == "cpu":
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        pieces.append(flat.numpy().tobytes())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), len(pieces[-1])]}
    raise DataError(
        f"a sample has a {type(value).__name__}, which one process cannot give to another: map it to a tensor, array,"
        " number or text, or leave reader_class=ForkedReader out"
    )


def _unpacked(node: Any, pieces: _Pieces) -> Any:
    if isinstance(node, list):
        return [_unpacked(item, pieces) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, facts),) = node.items()
    if kind == "tuple":
        return tuple(_unpacked(item, pieces) for item in facts)
    if kind == "dict":
        return {_unpacked(key, pieces): _unpacked(item, pieces) for key, item in facts}
    if kind == "...":
        return ...
    if kind in ("bytes", "bytearray"):
        return bytes(pieces.take(facts)) if kind == "bytes" else pieces.take(facts)
    dtype, shape, length = facts
    piece = pieces.take(length)
    if kind == "tensor":
        empty = torch.empty(shape, dtype=getattr(torch, dtype))
        return torch.frombuffer(piece, dtype=empty.dtype).reshape(shape) if length else empty
    array = np.frombuffer(piece, dtype).reshape(shape) if length else np.empty(shape, dtype)
    return array if kind == "array" else array[()]
