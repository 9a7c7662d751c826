"""`PoissonSource`: batches into which each row is drawn by itself, as the accounting of privacy supposes."""

from __future__ import annotations

import copy
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from plait.data.sources import TensorSource
from plait.errors import ConfigError, DataError

__all__ = ["PoissonSource"]

_CHUNK_BYTES = 8 << 20


class PoissonSource:
    """Rows of tensors in memory; each row is in each batch with probability `rate = batch_size / rows`, by itself.

    Batches differ in size, and may be empty; a row may come twice in a pass, or not at all. The draws are a pure
    function of (seed, epoch). Who knows the seed knows which rows are in which batch: against them, an epsilon that
    counts on the sampling does not hold. So it is drawn from the operating system, and kept in checkpoints, unless it
    is given.

    Args:
        tensors: as for `TensorSource`.
        batch_size: how many rows a batch has on average, those of all workers together.
        steps_per_epoch: batches in a pass; without it, as many whole batches as the rows would make.
        num_epochs: passes there are; None: as many as are asked for.
        seed: a secret, the same for all workers and parties of a run, and another for each run: of
            `secrets.randbits(128)`, not 0 or 1. Without it, one is drawn: for one worker and one party alone.

    """

    seekable = True

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | NDArray[Any]] | Sequence[torch.Tensor | NDArray[Any]],
        batch_size: int,
        *,
        steps_per_epoch: int | None = None,
        num_epochs: int | None = None,
        seed: int | None = None,
    ) -> None:
        checked = TensorSource(tensors, batch_size, num_epochs=num_epochs)
        if batch_size > checked.rows:
            raise ConfigError(f"batch_size={batch_size} of {checked.rows} rows: a batch has {checked.rows} at most")
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ConfigError(f"steps_per_epoch is {steps_per_epoch}; it has to be 1 or more")
        self.names, self.tensors, self.num_epochs = checked.names, checked.tensors, num_epochs
        self.own_seed = seed is None
        """Whether the seed was drawn here, and nobody else can have the same."""
        self.seed = int.from_bytes(os.urandom(16), "big") if seed is None else seed
        self.all_rows = self.rows = checked.rows
        self.rate = batch_size / checked.rows
        self.batch_size: int | None = batch_size
        self.expected: float = batch_size
        """How many rows a batch of this worker has on average."""
        self.steps = steps_per_epoch or checked.rows // batch_size
        self._index, self._count = 0, 1
        self._drawn: tuple[int, _Draws] | None = None
        self._uses = _Uses(checked.rows)

    @property
    def is_part(self) -> bool:
        """Whether it gives one worker's rows."""
        return self._count > 1

    def divided(self, index: int, count: int) -> PoissonSource:
        """The rows of worker `index` of `count`: every so many. The workers' batches together are those of this source.

        Each worker draws for all rows and takes its own: so a row is drawn once, and its uses are known to all.
        """
        if self.all_rows < count:
            raise DataError(f"{self.all_rows} rows cannot be divided among {count} workers: each needs one at least")
        part = copy.copy(self)
        part._index, part._count = index, count  # noqa: SLF001 - its own class
        part._drawn, part._uses = None, _Uses(self.all_rows)  # noqa: SLF001 - same
        part.rows = len(range(index, self.all_rows, count))
        part.expected = self.rate * part.rows
        part.batch_size = max(1, round(part.expected))
        return part

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        draws = self._draw(epoch)
        rows, ends = draws.rows, draws.ends
        if self._count > 1:
            rows, ends = draws.part(self._index, self._count)
        places = [rows.to(t.device) for t in self.tensors]
        bounds = [0, *ends.tolist()]
        for first in range(start, self.steps, self._chunk()):
            last = min(first + self._chunk(), self.steps)
            sizes = [bounds[step + 1] - bounds[step] for step in range(first, last)]
            chunk = slice(bounds[first], bounds[last])
            # unsafe: to autograd each batch is a tensor of its own, that a step may change in place.
            pieces = (
                t.index_select(0, place[chunk]).unsafe_split_with_sizes(sizes)
                for t, place in zip(self.tensors, places, strict=True)
            )
            for values in zip(*pieces, strict=True):
                yield values if self.names is None else dict(zip(self.names, values, strict=True))

    def uses(self, epoch: int, step: int) -> int:
        """The most often that any row, of any worker, was drawn until batch `step` of pass `epoch`, this one too."""
        uses = self._uses
        if (epoch, step) < (uses.epoch, uses.step - 1):
            uses = self._uses = _Uses(self.all_rows)
        while uses.epoch < epoch:
            uses.add(self._draw(uses.epoch), self.steps)
            uses.epoch, uses.step = uses.epoch + 1, 0
        if step >= uses.step:
            uses.add(self._draw(epoch), step + 1)
        return uses.most

    @property
    def kept_seed(self) -> str | None:
        """The seed that was drawn here, for a checkpoint."""
        return str(self.seed) if self.own_seed else None

    @kept_seed.setter
    def kept_seed(self, seed: str | None) -> None:
        if self.own_seed and seed is not None and int(seed) != self.seed:
            self.seed, self._drawn, self._uses = int(seed), None, _Uses(self.all_rows)

    def draws(self) -> str:
        """A name for these draws, which tells next to nothing of a seed that cannot be guessed."""
        facts = f"{self.seed} {self.all_rows} {self.rate} {self.steps}"
        return hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()

    def fingerprint(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "kind": "poisson",
            "fields": self.names if self.names is not None else len(self.tensors),
            "rows": self.all_rows,
            "rate": self.rate,
            "steps": self.steps,
            "seed": None if self.own_seed else self.seed,
        }
        return facts if self._count == 1 else {**facts, "index": self._index, "count": self._count}

    def _draw(self, epoch: int) -> _Draws:
        if self._drawn is None or self._drawn[0] != epoch:
            key = hashlib.blake2b(f"poisson {self.seed} {epoch}".encode(), digest_size=16).digest()
            self._drawn = epoch, _draw(self.all_rows, self.steps, self.rate, key)
        return self._drawn[1]

    def _chunk(self) -> int:
        """How many batches are gathered at a time."""
        row = sum(t[:1].numel() * t.element_size() for t in self.tensors)
        return int(max(1, min(64, _CHUNK_BYTES // max(1, math.ceil(row * self.expected)))))


class _Draws(NamedTuple):
    """The rows of one batch after the other, and where each batch ends."""

    rows: torch.Tensor
    ends: torch.Tensor

    def part(self, index: int, count: int) -> _Draws:
        own = self.rows % count == index
        before = torch.nn.functional.pad(own.cumsum(0), (1, 0))
        return _Draws(self.rows[own], before[self.ends])


def _draw(rows: int, steps: int, rate: float, key: bytes) -> _Draws:
    """A pass. Row after row and batch after batch is a chain of coins; the distances of heads are drawn, not the coins.

    So what is drawn is as much as the batches have rows, and not `rows` for each of them. The generator is one that
    takes a key of 128 bits; torch's takes 32.
    """
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))
    coins, reached, found = rows * steps, -1, []
    while reached < coins - 1:
        left = (coins - 1 - reached) * rate
        uniform = torch.from_numpy(generator.random(int(left + 4 * math.sqrt(left)) + 16))
        tails = torch.log1p(-uniform).div_(math.log1p(-rate) if rate < 1 else -math.inf).floor_()
        heads = tails.long().add_(1).cumsum(0).add_(reached)
        reached = int(heads[-1])
        found.append(heads)
    heads = torch.cat(found)
    heads = heads[: int(torch.searchsorted(heads, coins))]
    ends = torch.searchsorted(heads, torch.arange(1, steps + 1) * rows)
    return _Draws(heads % rows, ends)


class _Uses:
    """How often each row was drawn until batch `step` of pass `epoch`, this one not counted; and the most of them."""

    def __init__(self, rows: int) -> None:
        self.epoch = self.step = self.most = 0
        self._counts = torch.zeros(rows, dtype=torch.int32)

    def add(self, draws: _Draws, until: int) -> None:
        """The batches of this pass up to number `until`."""
        first = int(draws.ends[self.step - 1]) if self.step else 0
        rows = draws.rows[first : int(draws.ends[until - 1])] if until > self.step else draws.rows[:0]
        if rows.numel():
            self._counts.index_add_(0, rows, torch.ones(1, dtype=torch.int32).expand(rows.numel()))
            self.most = max(self.most, int(self._counts[rows].max()))
        self.step = max(self.step, until)
