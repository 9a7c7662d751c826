"""Messages between workers and servers: one frame of JSON, and one raw frame for each tensor.

The first frame is UTF-8 JSON, `[version, kind, number, head, [[dtype, shape], ...]]`; `number` pairs an answer with
its request. The bytes of a tensor are those in memory (little-endian on every machine that torch runs on).
Nothing is unpickled, and nothing is allocated by what a header claims: a tensor lies over the frame that came.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from plait.errors import ClusterError

__all__ = ["MAX_HEADER", "MAX_TENSORS", "Buffer", "Message", "WireError", "decode", "encode"]

VERSION = 1
MAX_HEADER = 1 << 22
"""Bytes of JSON in a message."""
MAX_TENSORS = 1 << 15
MAX_DEPTH = 32
MAX_DIMENSIONS = 16
MAX_KIND = 32
MAX_NUMBER = 1 << 53

Buffer: TypeAlias = Any
"""Anything with Python's buffer protocol: bytes, an array of NumPy, a frame of ZeroMQ."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Message(NamedTuple):
    """What one process tells another.

    Tensors that came over the wire lie over the received frames: read them, and clone what you want to change.
    """

    kind: str
    head: dict[str, Any]
    tensors: list[Tensor]
    number: int


class WireError(ClusterError):
    """Frames that are no message of ours; `number` is the message's, where that much could be read."""

    def __init__(self, text: str, number: int | None = None) -> None:
        super().__init__(text)
        self.number = number


def encode(kind: str, head: dict[str, Any], tensors: Sequence[Tensor] = (), *, number: int = 0) -> list[Buffer]:
    """The frames of a message. Those of tensors share their memory, so leave it alone until they are sent."""
    if len(tensors) > MAX_TENSORS:
        raise WireError(f"{len(tensors)} tensors in one {kind!r}: {MAX_TENSORS} is the most; send several")
    if unknown := [str(tensor.dtype) for tensor in tensors if tensor.dtype not in _NAMES]:
        raise WireError(f"{kind!r}: a tensor of {unknown[0]} cannot be sent: send one of {', '.join(_DTYPES)}")
    arrays = [_array(tensor, kind) for tensor in tensors]
    specs = [(_NAMES[tensor.dtype], tensor.shape) for tensor in tensors]
    try:
        header = _encoder((VERSION, kind, number, head, specs)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"the head of {kind!r} is not fit for JSON ({error}): write finite numbers and text") from error
    if len(header) > MAX_HEADER:
        raise WireError(f"the head of {kind!r} has {len(header)} bytes: {MAX_HEADER} is the most; send tensors instead")
    return [header, *arrays]


def decode(frames: Sequence[Buffer]) -> Message:
    """The message of these frames; WireError when they are anything else."""
    if not frames:
        raise WireError("a message without frames")
    version, kind, number, head, specs = _header(frames[0])
    if type(number) is not int or not 0 <= number <= MAX_NUMBER:
        raise WireError("a message whose number is none")
    if version != VERSION:
        raise WireError(f"a message of version {version!r:.20}: this plait speaks {VERSION}, use the same", number)
    if type(kind) is not str or len(kind) > MAX_KIND or not kind.isidentifier():
        raise WireError("a message whose kind is no short word", number)
    if type(head) is not dict:
        raise WireError(f"{kind!r} has a head that is no object", number)
    if type(specs) is not list or len(specs) != len(frames) - 1 or len(specs) > MAX_TENSORS:
        raise WireError(f"{kind!r} came with {len(frames) - 1} tensors, not those that its header lists", number)
    tensors = [_tensor(spec, frame, kind, number) for spec, frame in zip(specs, frames[1:], strict=True)]
    return Message(kind, head, tensors, number)


def _array(tensor: Tensor, kind: str) -> Buffer:
    try:
        tensor = tensor.detach().contiguous()
        # NumPy has no bfloat16; the bits are what travels.
        return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    except (TypeError, RuntimeError) as error:
        raise WireError(
            f"{kind!r}: a tensor of {tensor.dtype} on {tensor.device}, {tensor.layout}, cannot be sent: "
            "send dense ones in the CPU's memory"
        ) from error


def _header(frame: Buffer) -> list[Any]:
    data = memoryview(frame)
    if data.nbytes > MAX_HEADER:
        raise WireError(f"a header of {data.nbytes} bytes: {MAX_HEADER} is the most")
    try:
        text = str(data, "utf-8")
        parts = _decoder(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a header that is not JSON: {type(error).__name__}") from error
    if type(parts) is not list or len(parts) != 5:
        raise WireError("a header that is no list of five")
    # So few brackets cannot lie deeper; most headers have no more, and are not walked through.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(parts)
    return parts


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for inner in level
            for item in (inner.values() if type(inner) is dict else inner)
            if type(item) in (dict, list)
        ]
        if not level:
            return
    raise WireError(f"a header whose values lie more than {MAX_DEPTH} deep")


def _tensor(spec: Any, frame: Buffer, kind: str, number: int) -> Tensor:
    if type(spec) is not list or len(spec) != 2 or type(spec[0]) is not str or spec[0] not in _DTYPES:
        raise WireError(f"{kind!r} has a tensor whose type is not known", number)
    dtype, shape = _DTYPES[spec[0]], spec[1]
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise WireError(f"{kind!r} has a tensor whose shape is none", number)
    for length in shape:
        if type(length) is not int or not 0 <= length <= MAX_NUMBER:
            raise WireError(f"{kind!r} has a tensor whose shape is none", number)
    size = memoryview(frame).nbytes
    if math.prod(shape) * dtype.itemsize != size:
        raise WireError(f"{kind!r} has a tensor of {size} bytes, which is not its {spec[0]} {shape}", number)
    if size == 0:
        return _empty(shape, dtype, kind, number)
    flat = _over(frame, dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def _empty(shape: list[int], dtype: torch.dtype, kind: str, number: int) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:  # the lengths beside the 0 are too much even for a product
        raise WireError(f"{kind!r} has an empty tensor of shape {shape}, which is too long", number) from error


def _over(frame: Buffer, dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:  # torch trusts that a bool is 0 or 1; a peer's bytes may be others
        return _over(frame, torch.uint8) != 0
    if isinstance(frame, bytes):  # torch warns of memory that may not be written
        frame = bytearray(frame)
    tensor = torch.frombuffer(frame, dtype=dtype)
    # A small frame may begin anywhere in the socket's buffer.
    return torch.frombuffer(bytearray(frame), dtype=dtype) if tensor.data_ptr() % dtype.itemsize else tensor


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text:.20} is not a finite number")


_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_not_finite).decode
