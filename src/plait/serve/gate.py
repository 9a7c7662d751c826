"""How many requests may be under way, and how large they may be together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from plait.errors import UnavailableError

__all__ = ["Gate"]


class Gate:
    """Requests are let in before their bodies are read: what waits is bounded, in number and in bytes."""

    def __init__(self, requests: int, size: int) -> None:
        self._requests, self._size = requests, size
        self.under_way = 0
        self._bytes = 0

    @contextlib.contextmanager
    def inside(self, size: int) -> Iterator[None]:
        """Be inside with a body of `size` bytes; `UnavailableError` if there is no room."""
        if self.under_way >= self._requests or self._bytes + size > self._size:
            raise UnavailableError(f"{self.under_way} requests are under way; ask again in a moment")
        self.under_way += 1
        self._bytes += size
        try:
            yield
        finally:
            self.under_way -= 1
            self._bytes -= size
