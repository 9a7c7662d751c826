"""Samplers whose chances are counts of words: given beforehand, or learnt from the true classes as they come."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from plait.errors import ConfigError
from plait.nn.samplers import Candidates, Seed, candidates, check_sampler, generator_of
from plait.variables.scope import layer

__all__ = ["LearnedUnigram", "fixed_unigram_candidate_sampler", "learned_unigram_candidate_sampler"]


class LearnedUnigram(nn.Module):
    """Draws classes as often as they were true so far. Its counts are a buffer, so checkpoints have them.

    Every class begins with a count of 1. A call draws by the counts before it; then, in training, its true classes
    are counted.
    """

    counts: Tensor

    def __init__(self, range_max: int) -> None:
        super().__init__()
        if isinstance(range_max, bool) or not isinstance(range_max, int) or range_max < 1:
            raise ConfigError(f"range_max={range_max!r}: write how many classes there are, from 1 on")
        self.register_buffer("counts", torch.ones(range_max, dtype=torch.int64))

    def forward(
        self, true_classes: Tensor, num_true: int, num_sampled: int, unique: bool, seed: Seed = None
    ) -> Candidates:
        check_sampler(true_classes, num_true, num_sampled, unique, len(self.counts))
        found = _drawn(true_classes, num_sampled, unique, self.counts.double(), seed)
        if self.training:
            classes = true_classes.detach().reshape(-1).to(self.counts.device, torch.int64)
            self.counts.index_add_(0, classes, torch.ones_like(classes))
        return found


def learned_unigram_candidate_sampler(
    true_classes: Tensor,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    seed: Seed = None,
    name: str | None = None,
) -> Candidates:
    """Draw classes by how often they were true so far, in a loss_fn or model_fn.

    What it counts is kept with the model's variables, as the layer `name` ("learned_unigram" without one), a
    `LearnedUnigram`; elsewhere, make one yourself. The other arguments are those of `uniform_candidate_sampler`.
    """
    sampler = layer(name or "learned_unigram", LearnedUnigram, range_max)
    if len(sampler.counts) != range_max:
        raise ConfigError(
            f"range_max={range_max}, but the sampler {name or 'learned_unigram'!r} was made for {len(sampler.counts)} "
            "classes: give another one another name"
        )
    found: Candidates = sampler(true_classes, num_true, num_sampled, unique, seed)
    return found


def fixed_unigram_candidate_sampler(
    true_classes: Tensor,
    num_true: int,
    num_sampled: int,
    unique: bool,
    range_max: int,
    vocab_file: str | os.PathLike[str] = "",
    distortion: float = 1.0,
    num_reserved_ids: int = 0,
    num_shards: int = 1,
    shard: int = 0,
    unigrams: Sequence[float] = (),
    seed: Seed = None,
    name: str | None = None,
) -> Candidates:
    """Draw classes by counts that are known beforehand.

    They are in `vocab_file`, whose lines end in a comma and a count, the first line being the first class's, or in
    `unigrams`. `distortion` is the power that they are raised to first: 0.75 flattens them, 0 makes all alike.
    `num_reserved_ids` classes come before those of the file, and are never drawn. With `num_shards`, counts are dealt
    out to so many samplers in turn, and `shard` is this one's number. The other arguments are those of
    `uniform_candidate_sampler`.
    """
    del name
    check_sampler(true_classes, num_true, num_sampled, unique, range_max)
    if (not vocab_file) == (len(unigrams) == 0):
        raise ConfigError("give the counts either as vocab_file= or as unigrams=, and one of them")
    if not (0 <= shard < num_shards and num_reserved_ids >= 0):
        raise ConfigError(
            f"shard={shard} of num_shards={num_shards}, num_reserved_ids={num_reserved_ids}: write a shard from 0 to "
            "num_shards - 1, and 0 or more reserved ids"
        )
    if vocab_file:
        weights = _of_file(os.fspath(vocab_file), distortion, num_reserved_ids, num_shards, shard)
    else:
        weights = _dealt(iter(unigrams), distortion, num_reserved_ids, num_shards, shard)
    if len(weights) != range_max:
        raise ConfigError(f"range_max={range_max}, but there are {len(weights)} counts: write the same number")
    drawable = int((weights > 0).sum())
    if drawable < (num_sampled if unique else 1):
        raise ConfigError(f"{num_sampled} classes are wanted, but only {drawable} have a count above 0")
    return _drawn(true_classes, num_sampled, unique, weights, seed)


def _drawn(true_classes: Tensor, num_sampled: int, unique: bool, weights: Tensor, seed: Seed) -> Candidates:
    """A point on the line of all weights laid end to end is in the piece of one class."""
    ends = weights.cpu().cumsum(0).to(weights.device)  # CUDA's need not be the same each time
    generator = generator_of(seed)
    total, last = ends[-1], int(weights.nonzero()[-1])

    def draw(count: int) -> Tensor:
        points = torch.rand(count, generator=generator, dtype=torch.float64).to(ends.device) * total
        return torch.searchsorted(ends, points, right=True).clamp(max=last)

    def chance(classes: Tensor) -> Tensor:
        return (weights[classes.to(weights.device)] / total).to(classes.device)

    return candidates(true_classes, num_sampled, unique, draw, chance)


def _of_file(path: str, distortion: float, reserved: int, shards: int, shard: int) -> Tensor:
    try:
        changed = Path(path).stat().st_mtime_ns
        return _read(path, changed, distortion, reserved, shards, shard)
    except OSError as error:
        raise ConfigError(f"vocab_file {path} cannot be read: {error}") from error


@functools.lru_cache(maxsize=8)
def _read(path: str, changed: int, distortion: float, reserved: int, shards: int, shard: int) -> Tensor:
    """Read once, however often a step asks for it; again when the file has changed."""
    del changed

    def counts() -> Iterator[float]:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield float(line.rpartition(",")[2])
                except ValueError:
                    raise ConfigError(
                        f"{path}, line {number}: {line.strip()[:60]!r} does not end in a count; write word,count"
                    ) from None

    return _dealt(counts(), distortion, reserved, shards, shard)


def _dealt(counts: Iterator[float], distortion: float, reserved: int, shards: int, shard: int) -> Tensor:
    """The weights of one shard: reserved ids, then every `shards`-th count."""
    weights = [0.0 for number in range(reserved) if number % shards == shard]
    begin = len(weights)  # as in TensorFlow, where the file's ids go on from what this shard has reserved
    for number, count in enumerate(counts, begin):
        if number % shards == shard:
            if not 0 <= count < math.inf:
                raise ConfigError(f"count number {number - begin} is {count}: counts are numbers from 0 on")
            weights.append(count**distortion)
    return torch.tensor(weights, dtype=torch.float64)
