"""Reading in parallel and in order: groups of samples, each worked out by several threads, a bounded number ahead."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Made", "Maker", "read_groups"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Made(Protocol[T_co]):
    """A group on its way."""

    def work(self, places: range) -> None:
        """Work out the items at these places. Several threads do, each its own."""

    def result(self) -> T_co:
        """The group; asked for once, when all items are worked out."""


Maker = Callable[[Sequence[Any]], Made[T]]
"""Begins a group of these items."""


class _Group(Generic[T]):
    """One group on its way: the thread that finishes its last part puts the parts together."""

    def __init__(self, items: Sequence[Any], parts: int, maker: Maker[T], at_once: int) -> None:
        self.items = items
        self._at_once = at_once
        self.made = maker(items)
        self.done: Future[T] = Future()
        self._left = parts
        self._lock = threading.Lock()

    def work(self, start: int, end: int) -> None:
        try:
            for place in range(start, end, self._at_once):
                if self.done.done():  # another part failed, or nobody listens any more
                    return
                self.made.work(range(place, min(place + self._at_once, end)))
        except BaseException as error:  # noqa: BLE001 - it is raised where the group is waited for
            self._fail(error)
            return
        with self._lock:
            self._left -= 1
            if self._left:
                return
        if self.done.done():
            return
        try:
            self.done.set_result(self.made.result())
        except BaseException as error:  # noqa: BLE001 - same
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if not self.done.done():
                self.done.set_exception(error)


def read_groups(
    groups: Iterator[Sequence[Any]],
    maker: Maker[T],
    *,
    threads: int,
    ahead: int,
    at_once: int = 1,
    on_end: Callable[[], object] | None = None,
) -> Generator[T, None, None]:
    """What `maker` makes of every group, in order.

    While one is looked at, about `ahead` items are worked out in advance: whole groups, as many as it takes. A thread
    is given `at_once` items of its part at a time. At the end, before those that still work are waited for, `on_end` is
    called.
    """
    waiting: deque[_Group[T]] = deque()
    held = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="plait-reader")
    try:
        while True:
            while not waiting or held < ahead + len(waiting[0].items):
                items = next(groups, None)
                if items is None:
                    break
                waiting.append(_submitted(pool, items, maker, threads, at_once))
                held += len(items)
            if not waiting:
                return
            group = waiting.popleft()
            held -= len(group.items)
            yield group.done.result()
    finally:
        if on_end is not None:
            on_end()
        for group in waiting:
            group.done.cancel()
        pool.shutdown(wait=True, cancel_futures=True)


def _submitted(
    pool: ThreadPoolExecutor, items: Sequence[Any], maker: Maker[T], threads: int, at_once: int
) -> _Group[T]:
    size = len(items)
    part = max(1, -(-size // threads))
    starts = range(0, max(1, size), part)  # a group of nothing has a part, too: somebody has to finish it
    group = _Group(items, len(starts), maker, at_once)
    for start in starts:
        pool.submit(group.work, start, min(start + part, size))
    return group
