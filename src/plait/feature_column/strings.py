"""Strings of a batch as one buffer of bytes and the places where each begins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import DataError
from plait.feature_column.fingerprint import U64, fingerprint64

__all__ = ["Strings", "decimals"]


class Strings:
    """Strings behind each other: number `i` is `data[offsets[i]:offsets[i + 1]]`.

    Args:
        data: bytes, or an array of uint8.
        offsets: one more than there are strings, from 0 up.
        shape: of the batch that they are; without, one string a row.

    """

    __slots__ = ("_items", "data", "offsets", "shape")

    def __init__(
        self, data: bytes | NDArray[np.uint8], offsets: Sequence[int] | NDArray[Any], shape: Sequence[int] | None = None
    ) -> None:
        self.data = np.frombuffer(data, np.uint8) if isinstance(data, (bytes, bytearray)) else np.asarray(data)
        self.offsets = np.asarray(offsets, np.int64)
        count = len(self.offsets) - 1
        self.shape = (count,) if shape is None else tuple(shape)
        self._items: list[Any] | None = None
        ends = (int(self.offsets[0]), int(self.offsets[-1])) if count >= 0 else ()
        if self.data.dtype != np.uint8 or ends != (0, len(self.data)) or int(np.prod(self.shape)) != count:
            raise DataError(
                f"strings of {self.data.dtype}{list(self.data.shape)} with {count + 1} offsets, {ends} at the ends, as "
                f"{list(self.shape)}: give bytes, and offsets from 0 to their number"
            )

    @classmethod
    def of(cls, value: Any) -> Strings:
        """The strings of an array or a (nested) list of str or bytes."""
        if isinstance(value, Strings):
            return value
        array = value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
        items: list[Any] = array.ravel().tolist()
        data, lengths = _joined(items)
        offsets = np.zeros(len(items) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        made = cls(data, offsets, array.shape)
        made._items = items
        return made

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def fingerprints(self) -> U64:
        """TensorFlow's `Fingerprint64` of each, in one row."""
        return fingerprint64(self.data, self.offsets)

    def tolist(self) -> list[Any]:
        """Each by itself, str or bytes as they came."""
        if self._items is None:
            whole, places = self.data.tobytes(), self.offsets.tolist()
            self._items = [whole[begin:end] for begin, end in pairwise(places)]
        return self._items


def _joined(items: list[Any]) -> tuple[bytes, NDArray[np.int64]]:
    count = len(items)
    try:
        text = "".join(items)
    except TypeError:
        return _joined_bytes(items)
    if not text.isascii():
        return _joined_bytes(items)
    return text.encode(), np.fromiter(map(len, items), np.int64, count)


def _joined_bytes(items: list[Any]) -> tuple[bytes, NDArray[np.int64]]:
    try:
        whole = [item.encode() if isinstance(item, str) else item for item in items]
        return b"".join(whole), np.fromiter(map(len, whole), np.int64, len(whole))
    except (TypeError, UnicodeEncodeError):
        kinds = sorted({type(item).__name__ for item in items})
        raise DataError(
            f"a column of strings holds {', '.join(kinds)}: give str or bytes, '' where one is missing"
        ) from None


def decimals(numbers: NDArray[np.int64]) -> Strings:
    """Whole numbers as people write them: what TensorFlow hashes of them."""
    negative = numbers < 0
    rest = np.where(negative, -numbers, numbers).view(np.uint64)  # of the smallest number, 2**63 as it should be
    lengths = np.ones(len(numbers), np.int64)
    power = 10
    while power <= np.iinfo(np.uint64).max and bool((more := rest >= np.uint64(power)).any()):
        lengths += more
        power *= 10
    offsets = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(lengths + negative, out=offsets[1:])
    data = np.full(int(offsets[-1]), ord("-"), np.uint8)
    last = offsets[1:] - 1
    for place in range(int(lengths.max(initial=0))):
        rest, digit = np.divmod(rest, np.uint64(10))
        here = lengths > place
        data[last[here] - place] = digit[here].astype(np.uint8) + ord("0")
    return Strings(data, offsets)
