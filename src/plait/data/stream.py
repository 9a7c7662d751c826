"""`Stream`: the engine's reader over a source, which counts the batches *consumed*."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator
from time import perf_counter
from typing import Any

import torch

from plait.data.feeding import DeviceWait, ahead, placed
from plait.data.sample import ColumnGroups, Sample
from plait.data.sources import Source, TensorSource
from plait.errors import DataError, OutOfRangeError

__all__ = ["Stream", "close_all"]


class Stream:
    """One place in a source: pass `epoch`, after `position` of its batches.

    `read` gives the batch at this place, the same one again until `commit` moves on. So a step that failed is repeated
    with its batch, and a look ahead moves nothing.
    """

    __slots__ = (
        "_columns",
        "_device",
        "_iterator",
        "_plain",
        "_timer",
        "epoch",
        "name",
        "pending",
        "position",
        "source",
        "waited",
    )

    def __init__(
        self,
        source: Source,
        *,
        name: str = "input",
        columns: ColumnGroups | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.source = source
        self.name = name
        self.epoch = 0
        self.position = 0
        self._columns = columns or {}
        self._device = None if device is None else torch.device(device)
        self._plain = not columns and device is None
        self._iterator: Iterator[Any] | None = None
        self.pending: Sample | None = None
        """The batch that was read and not yet consumed."""
        self.waited = 0.0
        """Seconds in which this process waited for batches."""
        self._timer = DeviceWait(self._device) if self._device is not None and self._device.type == "cuda" else None

    @property
    def spent(self) -> bool:
        """Whether no pass is left."""
        return self.source.num_epochs is not None and self.epoch >= self.source.num_epochs

    def read(self) -> Sample:
        """The batch at this place. A pass that is over raises OutOfRangeError once, and the next one begins."""
        sample = self.pending
        if sample is not None:
            return sample
        begun, timer = perf_counter(), self._timer
        if timer is not None:
            timer.begin()
        iterator = self._iterator
        if iterator is None:
            iterator = self._open()
        try:
            sample = Sample.of(next(iterator))
        except StopIteration:
            raise self._end_pass() from None
        except BaseException:
            self.close()  # it is ahead of the place, or a generator that raised and would seem to be at its end
            raise
        if not self._plain:
            sample = self.shaped(sample)
        if timer is not None:
            timer.end()
        self.waited += perf_counter() - begun
        self.pending = sample
        return sample

    @property
    def idle(self) -> float:
        """Seconds in which computing stood still for want of a batch; a GPU may be busy while the process waits."""
        return self.waited if self._timer is None else self._timer.seconds

    def commit(self) -> None:
        """The batch was consumed: go on to the next one."""
        assert self.pending is not None  # noqa: S101 - the engine's mistake, not the user's
        self.pending = None
        self.position += 1

    def close(self) -> None:
        """Drop the iterator, and the workers that it has. The place stays, and a batch that was read stays, too."""
        iterator, self._iterator = self._iterator, None
        if isinstance(iterator, Generator):
            iterator.close()

    def rest(self) -> None:
        """Nothing reads for now: end the thread that is ahead of the steps, if there is one."""
        if self._device is not None and self.source.seekable:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "fingerprint": _facts(self.source)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that `state` names; what has to be read again for that is read at the next `read`."""
        facts = _facts(self.source)
        if state["fingerprint"] != facts:
            raise DataError(_difference(self.name, state["fingerprint"], facts))
        if (state["epoch"], state["position"]) == (self.epoch, self.position):
            return  # a batch that was read ahead is the right one
        self.close()
        self.pending = None
        self.epoch = state["epoch"]
        self.position = state["position"]

    def _open(self) -> Iterator[Any]:
        if self.spent:
            raise OutOfRangeError(f"input {self.name!r}: no pass is left of {self.source.num_epochs}")
        self._iterator = self._batches()
        return self._iterator

    def _batches(self) -> Iterator[Any]:
        """The batches from this place on; a GPU gets them ahead, where being ahead changes nothing."""
        device = self._device
        in_step = not self.source.seekable or getattr(self.source, "read_in_step", False)
        if device is None or device.type != "cuda" or in_step:
            return self.source.batches(self.epoch, self.position)
        self._plain = not self._columns
        if isinstance(self.source, TensorSource):
            return self.source.batches_on(device, self.epoch, self.position)
        return ahead(self.source.batches(self.epoch, self.position), device)

    def shaped(self, sample: Sample) -> Sample:
        """A batch of the source as functions get it: on the device, with groups of columns."""
        try:
            if self._device is not None and not placed(sample, self._device):
                # Only copies to an accelerator are ordered before what uses them.
                sample = sample.to(self._device, non_blocking=self._device.type == "cuda")
            if not self._columns:
                return sample
            grouped = sample.grouped(self._columns)
            return grouped if self._device is None else grouped.to(self._device)  # groups of text are not there yet
        except BaseException:
            self.close()  # it is ahead of the place
            raise

    def _end_pass(self) -> Exception:
        self.close()
        epoch, count, kind = self.epoch, self.position, type(self.source).__name__
        if count == 0:
            return DataError(
                f"input {self.name!r} has no data: pass {epoch} of {kind} gave no batch; check that it is"
                " not empty, not smaller than a batch where remainders are dropped, and starts anew at each pass"
            )
        self.epoch += 1
        self.position = 0
        return OutOfRangeError(f"input {self.name!r}: pass {epoch} is over after {count} batches")


def close_all(streams: Iterable[Stream]) -> None:
    """End what reads: it must not live on for as long as somebody keeps the model, or an error."""
    for stream in streams:
        stream.close()


def _facts(source: Source) -> dict[str, Any]:
    """The fingerprint as it comes back from a file: lists for tuples, strings for keys."""
    facts: dict[str, Any] = json.loads(json.dumps(source.fingerprint()))
    return facts


def _difference(name: str, saved: dict[str, Any], now: dict[str, Any]) -> str:
    keys = [key for key in {**saved, **now} if saved.get(key) != now.get(key)]
    rows = [("", "checkpoint", "now"), *((key, str(saved.get(key)), str(now.get(key))) for key in keys)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    table = "\n".join(f"  {key:<{first}}  {was:<{second}}  {now_is}" for key, was, now_is in rows)
    return (
        f"input {name!r} is not the one that the checkpoint was made with:\n{table}\n"
        "give the same data and settings, or another checkpoint_dir (log_dir in mox.run); another project_name keeps "
        "the weights and starts the stages anew"
    )
