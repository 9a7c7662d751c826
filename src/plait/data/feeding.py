"""Feeding a GPU: batches are read and copied to it ahead of the steps, and it is known how long it waited for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any

import torch

from plait.data.sample import Sample

__all__ = ["DeviceWait", "ahead", "placed"]

DEPTH = 2
"""Batches that wait on the device, each with the memory of one."""
CLOSE_SECONDS = 60.0
POLL_SECONDS = 0.1
SAMPLED = 31
"""Of so many reads, one is timed on a GPU; a prime, so that it is not always the same one of a pass."""
KEPT = 8
"""Pairs of events that are kept before those that are over are added up."""


def placed(sample: Sample, device: torch.device) -> bool:
    """Whether nothing in the batch has to be copied to the GPU."""
    raw = sample._raw  # noqa: SLF001 - a friend: fields are not made for this, at every step
    for value in raw.values() if type(raw) is dict else raw:
        if not isinstance(value, torch.Tensor) or not value.is_cuda or device.index not in (None, value.get_device()):
            return False  # also what is nested, or an array: it is looked at when it is moved
    return True


def ahead(batches: Iterator[Any], device: torch.device) -> Generator[Sample, None, None]:
    """The batches on `device`. Unless they are there already, a thread reads them, and copies on a stream of its own.

    For sources whose batches depend on nothing but their place: the thread is up to `DEPTH` batches ahead.
    """
    try:
        first = Sample.of(next(batches))
    except StopIteration:
        return
    if placed(first, device):
        try:
            yield first
            yield from map(Sample.of, batches)
        finally:
            _close(batches)
        return
    reader = None
    try:
        there = _there(first, device)
        del first  # its memory is wanted for other batches
        yield there
        del there
        reader = _Reader(batches, device)  # not for the first: a model that is only built needs no thread
        yield from reader
    finally:
        if reader is None:
            _close(batches)
        else:
            reader.close()


class _Reader:
    """The thread that reads and copies; whoever iterates gets batches that the current stream may use."""

    def __init__(self, batches: Iterator[Any], device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it unannotated
        self._ready: queue.Queue[Any] = queue.Queue(DEPTH)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="plait-feeding", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Sample]:
        while True:
            found = self._ready.get()
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            sample, copied = found
            now = torch.cuda.current_stream(self._device)
            now.wait_event(copied)
            for value in sample.values():
                _keep_for(value, now)
            yield sample

    def _read(self) -> None:
        last: Any = None
        try:
            while not self._over.is_set():
                self._put(self._copied(Sample.of(next(self._batches))))
        except StopIteration:
            pass
        except BaseException as error:  # noqa: BLE001 - whoever waits for the batch gets it
            last = error
        finally:
            try:
                _close(self._batches)
            finally:
                self._put(last)

    def _copied(self, sample: Sample) -> tuple[Sample, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            there = _there(sample, self._device)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call] # same
            event.record(self._stream)
        return there, event

    def _put(self, what: Any) -> None:
        while not self._over.is_set():
            try:
                self._ready.put(what, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return

    def close(self) -> None:
        """End the thread: at once if it waits, after the batch that it reads if it is in one."""
        self._over.set()
        self._thread.join(CLOSE_SECONDS)


def _there(sample: Sample, device: torch.device) -> Sample:
    return sample.map(_pinned).to(device, non_blocking=True)


def _close(batches: Iterator[Any]) -> None:
    if isinstance(batches, Generator):
        batches.close()


def _pinned(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        return value.pin_memory()
    return value


def _keep_for(value: Any, stream: torch.cuda.Stream) -> None:
    """Its memory is not given to the next copy before `stream` is done with it."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            _keep_for((value._indices(), value._values()), stream)  # noqa: SLF001 - torch's
        elif value.is_cuda:
            value.record_stream(stream)
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            _keep_for(item, stream)


class DeviceWait:
    """How long the device had nothing to do while a batch was waited for; the host, far ahead, may wait without harm.

    Two events around a read: what lies between them on the device is the time in which it was idle. The first reads are
    all timed, and then one of `SAMPLED`, which stands for the others.
    """

    __slots__ = ("_begun", "_device", "_pairs", "_reads", "_total")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: torch.cuda.Event | None = None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []
        self._total = 0.0
        self._reads = 0

    def begin(self) -> None:
        """A read begins."""
        timed = self._reads < SAMPLED or self._reads % SAMPLED == 0
        self._begun = self._now() if timed else None

    def end(self) -> None:
        """A read that ended in an error, or in the end of a pass, has no end here, and is not counted."""
        begun, self._begun = self._begun, None
        stands_for = 1 if self._reads < SAMPLED else SAMPLED
        self._reads += 1
        if begun is not None:
            self._pairs.append((begun, self._now(), stands_for))
            if len(self._pairs) > KEPT:
                self._add_up()

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # same
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _add_up(self) -> None:
        while self._pairs and self._pairs[0][1].query():  # type: ignore[no-untyped-call] # same
            first, second, stands_for = self._pairs.pop(0)
            self._total += stands_for * first.elapsed_time(second) / 1000

    @property
    def seconds(self) -> float:
        """Of all reads, as far as those that were timed tell."""
        if self._pairs:
            torch.cuda.synchronize(self._device)
            self._add_up()
        return self._total
