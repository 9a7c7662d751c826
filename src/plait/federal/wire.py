"""One message between two parties as bytes, and back; docs/federal-wire.md has the layout.

A frame is a header of 64 bytes, a description, padded to a multiple of 16, and a payload. What `decode` would refuse,
the encoders refuse. No error holds anything of a frame's contents.
"""

from __future__ import annotations

import enum
import json
import math
import re
import struct
import sys
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from plait.errors import FederalError
from plait.federal.precision import narrow, narrows, widen

__all__ = [
    "DTYPES",
    "HEADER_BYTES",
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_DIMENSIONS",
    "MAX_TEXT_BYTES",
    "MAX_VALUES",
    "MAX_WORD_BYTES",
    "VERSION",
    "Frame",
    "FrameError",
    "Kind",
    "VersionError",
    "decode",
    "dump_words",
    "encode_json",
    "encode_tensor",
]

VERSION = 1
HEADER_BYTES = 64
MAX_BYTES = 1 << 30
"""Of a frame, and of the tensor that is made of it."""
MAX_TEXT_BYTES = 48 << 10
"""JSON in a description."""
MAX_WORD_BYTES = 16 << 20
"""JSON in a payload."""
MAX_DEPTH = 64
"""Lists and objects inside each other, in JSON."""
MAX_VALUES = 1 << 20
"""In JSON, counted by its commas; a value of two bytes takes up to a hundred in memory."""
MAX_DIMENSIONS = 16
DTYPES = {
    1: torch.float64,
    2: torch.float32,
    3: torch.float16,
    4: torch.bfloat16,
    5: torch.int64,
    6: torch.int32,
    7: torch.int16,
    8: torch.int8,
    9: torch.uint8,
    10: torch.bool,
}
"""By the numbers that they have on the wire."""

_MAGIC = b"PLT"
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_HEADER = struct.Struct("<3sBBBHQQQQQII8x")
_HEAD_CHECK = struct.Struct("<I")
_HEAD_CHECK_AT = 52
_ALIGNMENT = 16
_TENSOR = struct.Struct("<IQBBBBf")
_MAX_HEAD = 256  # header and description of a tensor take no more
_CHECKSUM = 1  # flag of the header
_GRADIENT, _ABSENT, _WORDS = 1, 2, 4  # flags of a tensor
_STRING = re.compile(rb'"[^"]*"?')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_BRACKET = bytes.maketrans(b"{}", b"[]")


class FrameError(FederalError):
    """A frame is not what it has to be, or a message cannot become one."""


class VersionError(FrameError):
    """The other party writes frames of another version."""

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"the other party writes frames of version {theirs}, this one of version {VERSION}: install the same plait"
        )
        self.theirs = theirs


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    TENSOR = 2
    WORD = 3
    ACK = 4
    FAIL = 5
    BYE = 6


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(slots=True)
class Frame:
    """A message that came. `repr` shows none of its contents."""

    kind: Kind
    session: int
    number: int
    """0: not numbered."""
    received: int
    """Its sender has every number up to this one."""
    consumed: int
    """Bytes of numbered frames that its sender has done with: credit for the window."""
    value: Any = field(default=None, repr=False)
    """What the JSON says; of a WORD, its value."""
    topic: str = ""
    slot: int = 0
    turn: int = 0
    gradient: bool = False
    tensor: Tensor | None = field(default=None, repr=False)
    """On the memory of the frame. None in a TENSOR: absent, a gradient that is zero."""
    words: list[tuple[str, Any]] = field(default_factory=list, repr=False)
    """What rides on a TENSOR: topics and values, and"""
    riding: int = 0
    """how many bytes they have."""


def encode_json(
    kind: Kind,
    value: Any,
    *,
    session: int,
    number: int = 0,
    received: int = 0,
    consumed: int = 0,
    topic: str = "",
    checksum: bool = False,
) -> bytes:
    """A frame of any kind but TENSOR. A WORD has a topic; an ACK has no value."""
    counts = (session, number, received, consumed)
    if kind == Kind.ACK:
        return _join(kind, counts, b"", b"", checksum=checksum)
    text = _dump({"topic": topic, "value": value} if kind == Kind.WORD else value, topic or kind.name)
    payload = b""
    if kind == Kind.WORD and len(text) > MAX_TEXT_BYTES:
        text, payload = _dump({"topic": topic}, "topic"), _dump(value, topic)
    if len(text) > MAX_TEXT_BYTES or len(payload) > MAX_WORD_BYTES:
        limit = MAX_WORD_BYTES if payload else MAX_TEXT_BYTES
        raise FrameError(
            f"{topic or kind.name}: {len(payload or text)} bytes of JSON, and {limit} may be sent: say less"
        )
    return _join(kind, counts, text, payload, checksum=checksum)


def encode_tensor(
    slot: int,
    turn: int,
    tensor: Tensor | None,
    *,
    session: int,
    number: int,
    received: int,
    consumed: int,
    gradient: bool = False,
    precision: str | None = None,
    words: bytes = b"",
    checksum: bool = False,
) -> bytes:
    """A TENSOR frame of a tensor on the CPU, copied once if it is contiguous. None: a gradient that is zero.

    `words`, from `dump_words`, ride on it: what is to be said soon, and would be a message of its own otherwise.
    """
    _check_host()
    counts = (session, number, received, consumed)
    flags = (_GRADIENT if gradient else 0) | (_WORDS if words else 0)
    if tensor is None:
        absent = _TENSOR.pack(slot, turn, flags | _ABSENT, 0, 0, 0, 0.0)
        return _join(Kind.TENSOR, counts, absent + words, b"", checksum=checksum)
    code = _CODES.get(tensor.dtype, 0)
    if not code or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise FrameError(
            f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be sent: send a dense one on "
            f"the CPU, of {', '.join(str(dtype).removeprefix('torch.') for dtype in _CODES)}"
        )
    _check_shape(tensor.shape, tensor.dtype, MAX_BYTES - _MAX_HEAD)
    wire, scale = narrow(tensor.detach(), precision)
    description = _TENSOR.pack(slot, turn, flags, _CODES[wire.dtype], code, tensor.ndim, scale)
    description += struct.pack(f"<{tensor.ndim}Q", *tensor.shape) + words
    # one without elements may have strides that cannot be seen as bytes
    elements = wire.resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().data if wire.numel() else b""
    return _join(Kind.TENSOR, counts, description, elements, checksum=checksum)


def dump_words(words: Sequence[tuple[str, Any]]) -> bytes:
    """Words that ride on a tensor, as text."""
    text = _dump([[topic, value] for topic, value in words], "words")
    if len(text) > MAX_TEXT_BYTES:
        raise FrameError(f"{len(text)} bytes of JSON on a tensor, and {MAX_TEXT_BYTES} may ride on it: say less")
    return text


def decode(data: bytes, *, max_bytes: int = MAX_BYTES) -> Frame:
    """The frame in `data`; all of it is checked before anything is made, and FrameError says what is wrong.

    A tensor is not copied: it keeps `data` alive, and who changes it in place changes `data`.
    """
    kind, counts, begin, end = _open(data, max_bytes)
    session, number, received, consumed = counts
    frame = Frame(kind, session, number, received, consumed)
    if kind == Kind.TENSOR:
        _read_tensor(frame, data, begin, end, max_bytes)
    elif kind == Kind.ACK:
        if len(data) != HEADER_BYTES:
            raise FrameError(f"an ACK has {len(data) - HEADER_BYTES} bytes after its header, and may have none")
    else:
        _read_json(frame, data, begin, end)
    return frame


def _join(
    kind: Kind, counts: tuple[int, int, int, int], description: bytes, payload: bytes | memoryview, *, checksum: bool
) -> bytes:
    head = bytearray(HEADER_BYTES)
    payload_check = zlib.crc32(payload) if checksum else 0
    flags = _CHECKSUM if checksum else 0
    sizes = (len(payload), payload_check, 0)
    _HEADER.pack_into(head, 0, _MAGIC, VERSION, kind, flags, len(description), *counts, *sizes)
    description += bytes(-len(description) % _ALIGNMENT)
    _HEAD_CHECK.pack_into(head, _HEAD_CHECK_AT, zlib.crc32(description, zlib.crc32(head)))
    return b"".join((head, description, payload))


def _open(data: bytes, max_bytes: int) -> tuple[Kind, tuple[int, int, int, int], int, int]:
    """What the header says, and where the payload begins and the description, without its padding, ends."""
    if data[:3] != _MAGIC or len(data) <= len(_MAGIC):
        raise FrameError(f"{len(data)} bytes that do not begin as a frame does: the other side is no plait")
    if data[3] != VERSION:
        raise VersionError(data[3])
    if not HEADER_BYTES <= len(data) <= max_bytes:
        raise FrameError(f"a frame of {len(data)} bytes: it has {HEADER_BYTES} at least and {max_bytes} at most")
    _, _, code, flags, described, *counts, length, payload_check, head_check = _HEADER.unpack_from(data)
    end = HEADER_BYTES + described
    begin = end + -end % _ALIGNMENT
    if len(data) != begin + length:
        raise FrameError(
            f"a frame of {len(data)} bytes, and by its header it has {begin + length}: it was cut or mixed up"
        )
    head = data[:begin]
    unchecked = zlib.crc32(head[_HEAD_CHECK_AT + 4 :], zlib.crc32(bytes(4), zlib.crc32(head[:_HEAD_CHECK_AT])))
    if unchecked != head_check:
        raise FrameError("the checksum of a frame's header is wrong: it was altered on its way")
    if flags & ~_CHECKSUM or any(head[_HEAD_CHECK_AT + 4 : HEADER_BYTES]) or any(head[end:]):
        raise FrameError("a frame has something where version 1 has zeros: its flags, reserved bytes, or padding")
    if code not in _KINDS:
        raise FrameError(f"a frame of kind {code}, and there are 1 to {len(_KINDS)}")
    if payload_check != (zlib.crc32(memoryview(data)[begin:]) if flags & _CHECKSUM else 0):
        raise FrameError("the checksum of a frame's payload is wrong: it was altered on its way")
    session, number, received, consumed = counts
    return _KINDS[code], (session, number, received, consumed), begin, end


def _read_tensor(frame: Frame, data: bytes, begin: int, end: int, max_bytes: int) -> None:
    _check_host()
    if end - HEADER_BYTES < _TENSOR.size:
        raise FrameError(f"the description of a tensor has {end - HEADER_BYTES} bytes: it has {_TENSOR.size} at least")
    frame.slot, frame.turn, flags, wire, code, ndim, scale = _TENSOR.unpack_from(data, HEADER_BYTES)
    sizes_end = HEADER_BYTES + _TENSOR.size + 8 * ndim
    fits = sizes_end < end <= sizes_end + MAX_TEXT_BYTES if flags & _WORDS else end == sizes_end
    if not fits or flags & ~(_GRADIENT | _ABSENT | _WORDS):
        raise FrameError(
            f"the description of a tensor has {end - HEADER_BYTES} bytes, {ndim} dimensions, flags {flags}"
        )
    frame.gradient = bool(flags & _GRADIENT)
    if flags & _WORDS:
        frame.words, frame.riding = _read_words(data[sizes_end:end]), end - sizes_end
    if flags & _ABSENT:
        if wire or code or ndim or scale or begin != len(data):
            raise FrameError("a tensor that is absent has a dtype, a shape, a scale or elements")
        return
    if wire not in DTYPES or code not in DTYPES:
        raise FrameError(f"a tensor of dtype {code}, on the wire {wire}: there are 1 to {len(DTYPES)}")
    shape = struct.unpack_from(f"<{ndim}Q", data, HEADER_BYTES + _TENSOR.size)
    frame.tensor = _tensor(data, begin, shape, (DTYPES[wire], DTYPES[code], scale), max_bytes)


def _read_words(text: bytes) -> list[tuple[str, Any]]:
    words = _load(text)
    if not isinstance(words, list) or not all(
        isinstance(word, list) and len(word) == 2 and isinstance(word[0], str) for word in words
    ):
        raise FrameError("what rides on a tensor is not a list of topics and values")
    return [(topic, value) for topic, value in words]


def _tensor(
    data: bytes, begin: int, shape: tuple[int, ...], form: tuple[torch.dtype, torch.dtype, float], max_bytes: int
) -> Tensor:
    wire, dtype, scale = form
    if wire != dtype and not narrows(wire, dtype):
        raise FrameError(f"a tensor of {dtype} cannot come as {wire}")
    scaled = wire is torch.int8 and dtype is not torch.int8
    if not (math.isfinite(scale) and scale > 0 if scaled else scale == 0):
        raise FrameError(f"the scale of a tensor of {dtype} that comes as {wire} is wrong: above 0 for int8, or 0")
    _check_shape(shape, dtype, max_bytes)
    count = math.prod(shape)
    if count * wire.itemsize != len(data) - begin:
        raise FrameError(
            f"{len(data) - begin} bytes of elements for a tensor of {wire} and shape {list(shape)}: "
            f"it has {count * wire.itemsize}"
        )
    if not count:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:  # torch relies on bytes that are 0 or 1, and these are somebody else's
        return torch.frombuffer(data, dtype=torch.uint8, count=count, offset=begin).view(shape) != 0
    elements = torch.frombuffer(data, dtype=wire, count=count, offset=begin)
    return widen(elements.view(shape), dtype, scale)


def _check_shape(shape: Sequence[int], dtype: torch.dtype, limit: int) -> None:
    """An empty dimension counts as 1: the strides of an empty tensor are products, too."""
    if len(shape) > MAX_DIMENSIONS or math.prod(size or 1 for size in shape) * dtype.itemsize > limit:
        raise FrameError(
            f"a tensor of {dtype} and shape {list(shape[:MAX_DIMENSIONS])} has {len(shape)} dimensions: it may have "
            f"{MAX_DIMENSIONS}, and {limit} bytes"
        )


def _check_host() -> None:
    if sys.byteorder != "little":
        raise FrameError(
            f"this machine is {sys.byteorder}-endian, and tensors travel little-endian: use another machine"
        )


def _read_json(frame: Frame, data: bytes, begin: int, end: int) -> None:
    length = len(data) - begin
    is_word = frame.kind == Kind.WORD
    if end - HEADER_BYTES > MAX_TEXT_BYTES or length > (MAX_WORD_BYTES if is_word else 0):
        raise FrameError(
            f"a {frame.kind.name} with {end - HEADER_BYTES} bytes of JSON and a payload of {length}: at most "
            f"{MAX_TEXT_BYTES} and {MAX_WORD_BYTES if is_word else 0}"
        )
    frame.value = _load(data[HEADER_BYTES:end])
    if is_word:
        fields = {"topic"} if length else {"topic", "value"}
        word = frame.value
        if not isinstance(word, dict) or word.keys() != fields or not isinstance(word["topic"], str):
            raise FrameError(f"the description of a WORD is not an object of {' and '.join(sorted(fields))}")
        frame.topic = word["topic"]
        frame.value = _load(data[begin:]) if length else word["value"]


def _dump(value: Any, what: str) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        # What json says of a wrong type names the type; what it says of a wrong value may show the value.
        why = str(error) if isinstance(error, TypeError) else "nan, inf, half a character, or too deep"
        raise FrameError(f"{what} cannot be sent as JSON ({why}): say it in numbers, text, lists and dicts") from None
    _check_text(text)
    return text


def _load(text: bytes) -> Any:
    _check_text(text)
    try:
        value = json.loads(text.decode(), parse_constant=_no_number)
        if b"\\u" in text:  # half a character, written as an escape, would fail whoever prints it
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise FrameError(f"{len(text)} bytes that should be JSON in UTF-8 and are not") from None
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


def _check_text(text: bytes) -> None:
    """Bound what JSON can cost, without reading it: values by commas, depth by taking innermost brackets away."""
    if len(text) <= MAX_DEPTH:
        return
    if text.count(b",") <= MAX_VALUES and text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    bare = _STRING.sub(b"", text.replace(b"\\\\", b"").replace(b'\\"', b""))
    if bare.count(b",") + bare.count(b"[") + bare.count(b"{") > MAX_VALUES:
        raise FrameError(f"JSON with more than {MAX_VALUES} values")
    brackets = bare.translate(_ONE_BRACKET, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise FrameError(f"JSON that is no JSON, or with lists and objects nested deeper than {MAX_DEPTH}")


def _quieten() -> None:
    """Torch warns once in a process that bytes cannot be written to: let it be now, where nobody hears it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(bytes(1), dtype=torch.uint8)


_quieten()
