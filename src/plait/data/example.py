"""tf.train.Example, the usual content of a TFRecord, without TensorFlow and without protobuf.

An Example is a map from names to lists, each of bytes, of float32 or of int64.
"""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from plait.errors import DataError

__all__ = ["make_example", "parse_example"]

_Value: TypeAlias = list[bytes] | NDArray[np.float32] | NDArray[np.int64]
_Data: TypeAlias = bytes | bytearray | memoryview

# A field's tag is its number times 8 and how it is written: 0 as a varint, 2 as so many bytes, 5 as four bytes.
_VARINT_1 = 0x08
_BYTES_1, _BYTES_2, _BYTES_3 = 0x0A, 0x12, 0x1A
_FOUR_1 = 0x0D
_MAX_TAG = 0xFFFFFFFF
_MAX_BYTES = (1 << 31) - 1  # no reader of protobuf takes more
_VARINT_BYTES = 10
_MAX_VARINT = (1 << 64) - 1
_SHORT_BYTES = 48  # so short a list of integers is quicker without NumPy
_BLOCK = 1 << 16


def parse_example(record: _Data, keys: Collection[str] | None = None) -> dict[str, _Value]:
    """The lists of an Example by name: list[bytes], float32 or int64 array. With `keys`, only those of these names.

    Arrays may be views of the record, and read-only. What is not asked for is not looked at. A list of which the
    Example does not say of what it is, which only an empty one may do, is [].
    """
    data = record if isinstance(record, bytes) else _flat(record)
    found: dict[str, _Value] = {}
    for tag, begin, end in _fields(data, 0, len(data)):
        if tag == _BYTES_1:
            _read_features(data, begin, end, keys, found)
    return found


def make_example(fields: Mapping[str, Any]) -> bytes:
    """An Example of `fields`: each a str, bytes, int, float, bool, a list of one kind of these, an array or a tensor.

    Text becomes UTF-8, whole numbers and truth values int64, others float32; arrays are written row by row, their
    shape is not kept. An empty list says nothing of its kind: give an empty array where readers want to know.
    """
    entries = [_encoded_name(name) + _chunk(_BYTES_2, _encoded(name, value)) for name, value in fields.items()]
    example = _chunk(_BYTES_1, b"".join(_chunk(_BYTES_1, entry) for entry in entries))
    if len(example) > _MAX_BYTES:
        raise DataError(f"the Example takes {len(example)} bytes, and {_MAX_BYTES} are allowed; make several of it")
    return example


def _flat(record: Any) -> memoryview:
    try:
        return memoryview(record).cast("B")
    except (TypeError, ValueError):
        raise DataError(f"an Example is read from bytes, got a {type(record).__name__}; give a record") from None


def _broken(at: int, what: str) -> DataError:
    return DataError(f"the record is no tf.train.Example: {what} at byte {at}; look at how the file was written")


def _field(data: _Data, at: int, end: int) -> tuple[int, int, int]:
    """Tag, begin and end of the field at `at`. One place looks at every length, before anything is made of it."""
    tag = data[at]
    at += 1
    if tag > 127:
        tag, at = _varint(data, at - 1, end)
    kind = tag & 7
    if kind == 2:
        size = data[at] if at < end else 128
        at += 1
        if size > 127:
            size, at = _varint(data, at - 1, end)
        stop = at + size
    elif kind == 0:
        stop = _varint(data, at, end)[1]
    elif kind in (1, 5):
        stop = at + (8 if kind == 1 else 4)
    else:
        raise _broken(at, f"a field written in the way {kind}, which Examples do not have,")
    if stop > end:
        raise _broken(at, f"a field of {stop - at} bytes where {end - at} are left")
    if not 8 <= tag <= _MAX_TAG:
        raise _broken(at, f"a field of number {tag >> 3}")
    return tag, at, stop


def _fields(data: _Data, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    while at < end:
        field = _field(data, at, end)
        yield field
        at = field[2]


def _varint(data: _Data, at: int, end: int) -> tuple[int, int]:
    """An unsigned number of 64 bits, seven in each byte, the lowest first; and where it ends."""
    value = shift = 0
    for byte in data[at : min(at + _VARINT_BYTES, end)]:
        at += 1
        if byte < 128:
            return (value | byte << shift) & _MAX_VARINT, at
        value |= (byte & 127) << shift
        shift += 7
    raise _broken(at, "a number that does not end")


def _read_features(data: _Data, at: int, end: int, keys: Collection[str] | None, found: dict[str, _Value]) -> None:
    while at < end:
        tag, begin, at = _field(data, at, end)
        if tag == _BYTES_1:
            name, value, value_at, value_end = _entry(data, begin, at)
            if keys is None or name in keys:
                found[name] = _feature(value, value_at, value_end)


def _entry(data: _Data, at: int, end: int) -> tuple[str, _Data, int, int]:
    """Name of an entry of the map, and the bytes in which its list is."""
    name, value_at, value_end = "", 0, 0
    values: bytearray | None = None
    while at < end:
        tag, begin, at = _field(data, at, end)
        if tag == _BYTES_1:
            try:
                name = str(data[begin:at], "utf-8")
            except UnicodeDecodeError:
                raise _broken(begin, "a name that is not UTF-8") from None
        elif tag == _BYTES_2:
            if value_at:  # messages that come twice are one: that of their bytes behind each other
                values = bytearray(_whole(data, value_at, value_end)) if values is None else values
                values += _whole(data, begin, at)
            value_at, value_end = begin, at
    return (name, data, value_at, value_end) if values is None else (name, values, 0, len(values))


def _feature(data: _Data, begin: int, end: int) -> _Value:
    if begin == end:
        return []
    tag, at, stop = _field(data, begin, end)
    if stop == end:  # one list, as nearly always
        return _LISTS[tag](data, at, stop) if tag in _LISTS else []
    value: _Value = []
    for tag, group in itertools.groupby(_fields(data, begin, end), operator.itemgetter(0)):
        if tag not in _LISTS:
            continue
        joined = bytearray()
        for _, at, stop in group:
            joined += _whole(data, at, stop)
        value = _LISTS[tag](joined, 0, len(joined))  # the last kind wins
    return value


def _whole(data: _Data, begin: int, end: int) -> _Data:
    """The bytes of a message, once it is known that none of its fields would go on in what comes behind them."""
    for _ in _fields(data, begin, end):
        pass
    return data[begin:end]


def _bytes_list(data: _Data, begin: int, end: int) -> list[bytes]:
    return [bytes(data[at:stop]) for tag, at, stop in _fields(data, begin, end) if tag == _BYTES_1]


def _float_list(data: _Data, begin: int, end: int) -> NDArray[np.float32]:
    data, begin, end = _packed(data, begin, end, _FOUR_1)
    if (end - begin) % 4:
        raise _broken(begin, f"a list of float32 in {end - begin} bytes, which 4 does not divide,")
    return np.frombuffer(data, "<f4", (end - begin) // 4, begin) if end > begin else np.empty(0, np.float32)


def _int_list(data: _Data, begin: int, end: int) -> NDArray[np.int64]:
    data, begin, end = _packed(data, begin, end, _VARINT_1)
    if end - begin > _SHORT_BYTES:
        return _many_varints(data, begin, end)
    values = []
    while begin < end:
        value, begin = _varint(data, begin, end)
        values.append(value - (1 << 64) if value >> 63 else value)
    return np.array(values, np.int64)


_LISTS: dict[int, Callable[[_Data, int, int], _Value]] = {
    _BYTES_1: _bytes_list,
    _BYTES_2: _float_list,
    _BYTES_3: _int_list,
}


def _packed(data: _Data, begin: int, end: int, single: int) -> tuple[_Data, int, int]:
    """The numbers of a list without their tags, whether it was written as one field, as one for each, or as both."""
    if begin == end:
        return data, begin, end
    tag, at, stop = _field(data, begin, end)
    if stop == end and tag in (_BYTES_1, single):
        return data, at, stop
    joined = bytearray()
    for tag, at, stop in _fields(data, begin, end):
        if tag not in (_BYTES_1, single):
            continue
        joined += data[at:stop]
        # what is cut off in one field must not go on in the next
        if (single == _VARINT_1 and stop > at and data[stop - 1] > 127) or (single == _FOUR_1 and (stop - at) % 4):
            raise _broken(at, "a list of numbers that is cut short")
    return joined, 0, len(joined)


def _many_varints(data: _Data, begin: int, end: int) -> NDArray[np.int64]:
    raw = np.frombuffer(data, np.uint8, end - begin, begin)
    ends = np.flatnonzero(raw < 128)
    if raw[-1] > 127:
        raise _broken(begin, "a list of numbers that is cut short")
    values = np.empty(len(ends), np.uint64)
    start = 0
    for first in range(0, len(ends), _BLOCK):
        last = ends[first : first + _BLOCK]
        values[first : first + _BLOCK] = _block(raw, start, last, begin)
        start = int(last[-1]) + 1
    return values.view(np.int64)


def _block(raw: NDArray[np.uint8], start: int, last: NDArray[np.intp], begin: int) -> NDArray[np.uint64]:
    """The numbers whose last bytes are at `last`, the first of them from `start` on: place by place, all at once."""
    starts = np.concatenate(([start], last[:-1] + 1))
    places = last - starts
    if places.max() >= _VARINT_BYTES:
        raise _broken(begin, "a list with a number that does not end")
    values = np.zeros(len(last), np.uint64)
    for place in range(int(places.max()) + 1):
        here = np.flatnonzero(places >= place)
        values[here] |= (raw[starts[here] + place] & 127).astype(np.uint64) << np.uint64(7 * place)
    return values


def _encoded_name(name: Any) -> bytes:
    if not isinstance(name, str):
        raise DataError(f"the names in an Example are text, got {name!r}; write {str(name)!r}")
    return _chunk(_BYTES_1, _utf8(name, name))


def _encoded(name: str, value: Any) -> bytes:
    """A Feature: the list of one kind that `value` is."""
    value = _as_array(value) if isinstance(value, torch.Tensor) else value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return _encoded_array(name, np.asarray(value))
    items = np.asarray(value).ravel().tolist() if isinstance(value, np.ndarray) else value
    items = list(items) if isinstance(items, (list, tuple)) else [items]
    kinds = {_kind(name, item) for item in items}
    if len(kinds) > 1:
        raise DataError(
            f"field {name!r} is of mixed kinds ({', '.join(sorted(kinds))}); write all of it as one of them"
        )
    if "bytes" in kinds:
        return _chunk(_BYTES_1, b"".join(_chunk(_BYTES_1, _as_bytes(name, item)) for item in items))
    if not kinds:
        return b""
    try:
        return _encoded_array(name, np.array(items, np.int64 if "int" in kinds else np.float64))
    except OverflowError:
        raise _too_large(name, "int64") from None


def _kind(name: str, item: Any) -> str:
    if isinstance(item, (str, bytes, bytearray, memoryview)):
        return "bytes"
    if isinstance(item, (bool, np.bool_, numbers.Integral)):
        return "int"
    if isinstance(item, numbers.Real):
        return "float"
    raise DataError(
        f"field {name!r} holds a {type(item).__name__}; write text, bytes, numbers, one list of these, or an array"
    )


def _as_array(tensor: torch.Tensor) -> NDArray[Any]:
    plain = tensor.detach().cpu()
    array: NDArray[Any] = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


def _as_bytes(name: str, item: Any) -> bytes:
    return _utf8(name, item) if isinstance(item, str) else bytes(item)


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise DataError(f"field {name!r} has text that UTF-8 cannot write; give bytes") from None


def _encoded_array(name: str, array: NDArray[Any]) -> bytes:
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            floats = array.astype("<f4").ravel()
        if np.isinf(floats).sum() > np.isinf(array).sum():
            raise _too_large(name, "float32")
        return _chunk(_BYTES_2, _chunk(_BYTES_1, floats.tobytes()))
    numbers_in_order: list[int] = array.ravel().tolist()
    if array.dtype == np.uint64 and max(numbers_in_order, default=0) >> 63:
        raise _too_large(name, "int64")
    return _chunk(_BYTES_3, _chunk(_BYTES_1, b"".join(map(_varint_of, numbers_in_order))))


def _too_large(name: str, kind: str) -> DataError:
    return DataError(f"field {name!r} has a number that {kind} cannot hold; scale it, or write it as text")


def _varint_of(value: int) -> bytes:
    value &= _MAX_VARINT
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _chunk(tag: int, content: bytes) -> bytes:
    return b"".join([bytes([tag]), _varint_of(len(content)), content])
