"""The upper rows of a JPEG, which take less time to decode than all of them.

The pixels of a plain JPEG stand in its file from top to bottom. One whose header is changed to say that it is less high
is decoded as far as that, to the same pixels, and the decoder complains of the bytes that are left over. What is lost
from the file shows at its end, so this is for files that were decoded as a whole once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Frame", "decode_upper"]

_BEGIN, _END = b"\xff\xd8", b"\xff\xd9"
_MOST_SEGMENTS = 100
"""Before the pixels; files have up to 20, and a few with colour profiles more."""
_PLAIN = (0xC0, 0xC1)
_SCAN = 0xDA
_TABLES_AND_NOTES = {0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}


class Frame(NamedTuple):
    """What a plain JPEG's header says: one whose pixels stand in the file in their order."""

    height: int
    width: int
    unit: int
    """Rows that stand in the file together."""
    place: int
    """Where in the file the height stands."""

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> Frame | None:
        """None: it is of another kind, odd, or not whole."""
        try:
            return _frame(data) if bytes(data[:2]) == _BEGIN and bytes(data[-2:]) == _END else None
        except IndexError:
            return None


def _frame(data: bytes | bytearray | memoryview) -> Frame | None:
    found, components, at = None, 0, 2
    for _ in range(_MOST_SEGMENTS):
        if data[at] != 0xFF:
            return None
        marker, length = data[at + 1], _number(data, at + 2)
        if marker == _SCAN:
            return found if data[at + 4] == components else None
        if marker in _PLAIN and found is None:
            height, width, components = _number(data, at + 5), _number(data, at + 7), data[at + 9]
            if data[at + 4] != 8 or components not in (1, 3):
                return None
            highest = max(data[at + 11 + 3 * number] & 15 for number in range(components))
            if not height * width * highest:
                return None
            found = Frame(height, width, 8 * highest, at + 5)
        elif marker not in _TABLES_AND_NOTES:
            return None
        at += 2 + length
    return None


def _number(data: bytes | bytearray | memoryview, at: int) -> int:
    return data[at] << 8 | data[at + 1]


def decode_upper(data: bytes | bytearray | memoryview, rows: int) -> NDArray[np.uint8] | None:
    """`rows` rows or more, in colour; None if that would be all, the file is odd, or something is wrong with it."""
    import simplejpeg  # noqa: PLC0415 - heavy

    frame = Frame.of(data)
    if frame is None:
        return None
    # a row's colours may come from those of the next, too
    height = -(-(rows + frame.unit // 8) // frame.unit) * frame.unit
    if height >= frame.height:
        return None
    lower = bytearray(data)
    lower[frame.place : frame.place + 2] = height.to_bytes(2, "big")
    pixels = np.empty((height, frame.width, 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(lower, "RGB", buffer=pixels)
    except (KeyError, ValueError) as error:  # only the first complaint is heard, and this one is forgiven anywhere
        return pixels if "extraneous bytes before marker" in str(error) else None
    return pixels
