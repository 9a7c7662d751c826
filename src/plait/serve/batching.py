"""Requests that are computed together: as many as have come, up to so many rows, or after so long a wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plait.errors import DataError, UnavailableError
from plait.serve.protocol import Tensors

__all__ = ["Batch", "Batcher", "ModelFailedError"]

log = logging.getLogger("plait")

Run = Callable[[Tensors], Tensors]


class ModelFailedError(Exception):
    """The model cannot compute this request; why is not said, for such texts quote values."""


@dataclass(frozen=True)
class Batch:
    """What was computed together, for those who count."""

    requests: int
    rows: int
    waited: float
    """Seconds that the first of the requests waited."""
    seconds: float


@dataclass(eq=False)
class _Item:
    inputs: Tensors
    rows: int
    shapes: object
    future: asyncio.Future[Tensors]
    came: float = field(default_factory=time.monotonic)
    taken: bool = False


class Batcher:
    """Collects requests in the event loop and computes them in the executor's threads.

    Nothing but `run` leaves the loop, so nothing is locked. While every thread is busy, requests gather by themselves;
    a delay is only waited for while a thread is free. `together=False` is for a model whose outputs have no rows:
    each request is then computed by itself.
    """

    def __init__(
        self,
        run: Run,
        executor: Executor,
        *,
        rows: int = 16,
        delay: float = 0.0,
        threads: int = 1,
        together: bool = True,
        seen: Callable[[Batch], None] | None = None,
    ) -> None:
        self._run, self._executor = run, executor
        self._rows, self._delay, self._together = rows, delay, together
        self._free = threads
        self._waiting: deque[_Item] = deque()
        self._rows_waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._seen = seen

    @property
    def waiting(self) -> int:
        """Requests that are not being computed yet."""
        return len(self._waiting)

    async def infer(self, inputs: Tensors, rows: int, timeout: float) -> Tensors:
        """The outputs for these inputs; `TimeoutError` when that takes too long."""
        loop = asyncio.get_running_loop()
        shapes = tuple((name, inputs[name].shape[1:]) for name in sorted(inputs)) if self._together else object()
        item = _Item(inputs, rows, shapes, loop.create_future())
        late = loop.call_later(timeout, self._expire, item)
        self._waiting.append(item)
        self._rows_waiting += rows
        self._start(loop)
        try:
            return await item.future
        finally:
            late.cancel()
            self._forget(item)

    def _expire(self, item: _Item) -> None:
        if not item.future.done():
            item.future.set_exception(TimeoutError("the model took too long"))

    def _forget(self, item: _Item) -> None:
        """A request that was given up while it waited leaves the queue, so that a slow model does not fill it."""
        if not item.taken:
            self._waiting.remove(item)
            self._rows_waiting -= item.rows

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand batches to free threads, or look again when the oldest request has waited long enough."""
        while self._free and self._waiting:
            left = self._waiting[0].came + self._delay - time.monotonic()
            if left > 0 and self._rows_waiting < self._rows:
                if self._timer is None:
                    self._timer = loop.call_later(left, self._look, loop)
                return
            self._compute(self._take(), loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        self._start(loop)

    def _take(self) -> list[_Item]:
        """The oldest request, and those after it that have its shapes, while they fit."""
        first = self._waiting.popleft()
        chosen, rows, others = [first], first.rows, []
        while self._waiting and rows < self._rows:
            item = self._waiting[0]
            if item.shapes == first.shapes:
                if rows + item.rows > self._rows:
                    break
                chosen.append(item)
                rows += item.rows
            else:
                others.append(item)
            self._waiting.popleft()
        self._waiting.extendleft(reversed(others))
        self._rows_waiting -= rows
        for item in chosen:
            item.taken = True
        return [item for item in chosen if not item.future.done()]

    def _compute(self, items: list[_Item], loop: asyncio.AbstractEventLoop) -> None:
        if not items:
            return
        self._free -= 1
        self._executor.submit(self._work, items, loop)

    def _work(self, items: list[_Item], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: compute, and tell the loop once for all of them."""
        start = time.monotonic()
        answers = self._answers(items)
        batch = Batch(len(items), sum(item.rows for item in items), start - items[0].came, time.monotonic() - start)
        try:
            loop.call_soon_threadsafe(self._finish, items, answers, batch, loop)
        except RuntimeError:  # the loop has been closed: nobody waits any more
            log.warning("a batch of %d requests ended after the server", len(items))

    def _answers(self, items: list[_Item]) -> Sequence[Tensors | Exception]:
        try:
            return self._together_answers(items)
        except UnavailableError as error:  # for each of them
            return [error] * len(items)
        except DataError as error:
            if len(items) == 1:
                return [error]
        except Exception as error:  # noqa: BLE001 - whatever a model raises is an answer, and the server goes on
            if len(items) == 1:
                log.warning("a model failed with %s", type(error).__name__)  # its text may quote values
                failed = ModelFailedError("the model failed on this input")
                failed.__cause__ = error
                return [failed]
        # one bad request must not fail those that came beside it
        return [self._answers([item])[0] for item in items]

    def _together_answers(self, items: list[_Item]) -> list[Tensors]:
        if len(items) == 1:
            return [self._pieces(items[0])]
        names = items[0].inputs
        outputs = self._run({name: np.concatenate([item.inputs[name] for item in items]) for name in names})
        return _split(outputs, [item.rows for item in items])

    def _pieces(self, item: _Item) -> Tensors:
        """A request of more rows than a batch may have is computed in pieces: memory stays bounded."""
        if item.rows <= self._rows or not self._together:
            return self._run(item.inputs)
        pieces = [
            self._run({name: tensor[start : start + self._rows] for name, tensor in item.inputs.items()})
            for start in range(0, item.rows, self._rows)
        ]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def _finish(
        self, items: list[_Item], answers: Sequence[Any], batch: Batch, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._free += 1
        for item, answer in zip(items, answers, strict=True):
            if item.future.done():
                continue
            if isinstance(answer, Exception):
                item.future.set_exception(answer)
            else:
                item.future.set_result(answer)
        if self._seen is not None:
            self._seen(batch)
        self._start(loop)


def _split(outputs: Tensors, rows: list[int]) -> list[Tensors]:
    ends = np.cumsum(rows)
    wrong = {name: output.shape for name, output in outputs.items() if output.shape[:1] != (int(ends[-1]),)}
    if wrong:
        raise ValueError(f"outputs {wrong} have not {ends[-1]} rows")
    return [
        {name: output[end - count : end] for name, output in outputs.items()}
        for count, end in zip(rows, ends.tolist(), strict=True)
    ]
