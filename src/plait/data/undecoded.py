"""Pictures on their way through columns that need not be decoded wholly: whoever cuts a part out says how far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Undecoded", "whole"]


class Undecoded:
    """A picture file as its pixels, which are decoded when a part of them is asked for, down to the last row of it.

    `picture[10:20, 30:40]` gives what it would of the pixels.
    """

    dtype = np.dtype(np.uint8)
    ndim = 3

    def __init__(self, shape: tuple[int, int, int], decoded: Callable[[int], NDArray[np.uint8]]) -> None:
        """`decoded(rows)` gives so many of the upper rows."""
        self.shape, self.size = shape, shape[0] * shape[1] * shape[2]
        self._decoded = decoded
        self._pixels: NDArray[np.uint8] | None = None

    def __getitem__(self, part: tuple[slice, slice]) -> NDArray[np.uint8]:
        start, stop, step = part[0].indices(self.shape[0])
        return self._upper(stop)[start:stop, part[1]] if step == 1 else self.whole()[part]

    def whole(self) -> NDArray[np.uint8]:
        return self._upper(self.shape[0])

    def _upper(self, rows: int) -> NDArray[np.uint8]:
        if self._pixels is None or len(self._pixels) < rows:
            self._pixels = self._decoded(rows)
        return self._pixels


def whole(value: Any) -> Any:
    """All pixels of what may not be decoded yet; anything else as it is."""
    return value.whole() if isinstance(value, Undecoded) else value
