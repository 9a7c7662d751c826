"""Samples, one by one, made into batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import default_collate

from plait.data.sources import Source
from plait.errors import DataError

__all__ = ["BatchedSource"]


class BatchedSource:
    """A source of samples as a source of batches: `batch_size` samples stacked, the last batch may be shorter."""

    def __init__(self, samples: Source, batch_size: int) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size}: write a number from 1 on")
        self.samples = samples
        self.batch_size: int | None = batch_size
        self.num_epochs = samples.num_epochs
        self.seekable = samples.seekable

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        assert self.batch_size is not None  # noqa: S101 - the constructor set it
        samples = self.samples.batches(epoch, start * self.batch_size)
        while batch := list(itertools.islice(samples, self.batch_size)):
            yield self._stacked(batch)

    def _stacked(self, batch: list[Any]) -> Any:
        try:
            return default_collate(batch)
        except (RuntimeError, TypeError, KeyError) as error:
            raise DataError(
                f"{len(batch)} samples do not stack into a batch: {error}. Give samples of equal shapes, or ready "
                "batches and auto_batch=False"
            ) from error

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "batched", "batch_size": self.batch_size, "samples": self.samples.fingerprint()}
