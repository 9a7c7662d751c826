"""How often a private step uses a row: what an input tells of its sampling."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from plait.data.batching import BatchedSource
from plait.data.datasets import ColumnSource, Dataset
from plait.data.parts import PartSource, Strided, is_part
from plait.data.sources import ConstantSource, LoaderSource, Source, TensorSource
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, DataError

if TYPE_CHECKING:
    from plait.data import Stream
    from plait.engine.model import Model
    from plait.engine.strategy import Strategy

__all__ = [
    "Sampling",
    "check_rows",
    "check_seed",
    "draws_of",
    "kept_seed",
    "sampling_of",
    "take_seed",
    "uses_of",
]

log = logging.getLogger("plait")


class Sampling(NamedTuple):
    """What an epsilon, and the divisor of a sum, need to know of the batches."""

    rate: float
    """The share of all rows that is in one logical batch, of all workers that take the step together."""
    expected: float | None
    """Rows that a worker's batch has on average, where each row is drawn by itself; None: batches are counted."""
    rows: int | None
    """Rows of this worker's batch, as the source says."""


class _Facts(NamedTuple):
    """What a source is known to do."""

    rows: int | None
    """That a pass takes from."""
    once: bool
    """Whether a row is in one batch of a pass, and there once."""


def sampling_of(model: Model, task: str | None, first_rows: int | None, samples: int | None) -> Sampling:
    """The sampling of a task's training input. `first_rows` are those of its first batch, `samples` the user's word."""
    scope = TaskScope(MODE.TRAIN, task)
    source, stream, strategy = model.inputs[scope].source, model.streams[scope], model.strategy
    together = strategy.worker_num if strategy.in_step else 1
    drawn: Any = _inside(stream.source)
    if getattr(drawn, "expected", None) is not None:
        _check_drawn(stream, drawn, strategy)
        divided = strategy.worker_num > 1 and not is_part(source)
        expected = drawn.rate * drawn.all_rows / strategy.worker_num if divided else drawn.expected
        return Sampling(float(drawn.rate), float(expected), None)
    facts = _facts(source)
    _check_once(stream, source, strategy, facts)
    if isinstance(source, ConstantSource):
        return Sampling(1.0, None, source.batch_size)
    batch, rows = source.batch_size or first_rows, samples or facts.rows
    if rows is None or batch is None:
        raise ConfigError(
            f"the input for {scope} is a {type(source).__name__}, which does not say how many rows it takes from, and "
            "epsilon depends on it: write samples= in the private optimizer, or read from a PoissonSource"
        )
    if is_part(source) and samples is None:
        together = 1  # each worker has rows of its own
    _warn(model, type(source).__name__)
    return Sampling(min(1.0, batch * together * strategy.gradient_merge / rows), None, batch)


def _check_drawn(stream: Stream, drawn: Any, strategy: Strategy) -> None:
    if strategy.gradient_merge > 1:
        raise ConfigError(
            f"gradient_merge={strategy.gradient_merge} with Poisson batches: a row may be in several of those that "
            "are merged, and would count more than once; leave it out, and give the source a larger batch_size"
        )
    if stream.source.batch_size != drawn.batch_size:
        raise ConfigError(
            f"Poisson batches of {drawn.batch_size} rows that are joined to {stream.source.batch_size}: a row may be "
            "in several of them, and would count more than once; give the source a larger batch_size"
        )


def _check_once(stream: Stream, source: Source, strategy: Strategy, facts: _Facts) -> None:
    """A row may be once in what is noised once; if it came twice, it would count twice, and be accounted for once."""
    merge, kind = strategy.gradient_merge, type(source).__name__
    shared = isinstance(source, ConstantSource) or not (facts.once or is_part(source))
    if strategy.in_step and strategy.worker_num > 1 and shared:
        raise ConfigError(
            f"{strategy.worker_num} workers read a {kind}, which may give several of them the same row in one step, "
            "where it would count more than once: read from a TensorSource or a PoissonSource, or give each worker "
            "rows of its own in a plait.data.OwnPart"
        )
    if merge == 1:
        return
    if not facts.once:
        raise ConfigError(
            f"gradient_merge={merge} with a {kind}, which may give a row again in batches that are merged, where it "
            "would count more than once: leave it out and give larger batches, or read from a TensorSource"
        )
    batches = _batches(stream.source)
    if batches is not None and batches % merge:
        raise ConfigError(
            f"gradient_merge={merge} and {batches} batches in a pass: the last of one pass would be merged with the "
            "first of the next, and a row that is in both would count twice; write a number that divides "
            f"{batches}, or change the batch size (drop_remainder=True may help)"
        )


def _facts(source: Any) -> _Facts:
    if isinstance(source, TensorSource):
        return _Facts(source.rows, once=True)
    if isinstance(source, LoaderSource):
        return _loader_facts(source.loader)
    if isinstance(source, (ColumnSource, Dataset)):
        order = (source if isinstance(source, Dataset) else source.dataset).order(0)
        return _Facts(len(order), once=len(np.unique(order)) == len(order))
    if isinstance(source, BatchedSource):
        return _facts(source.samples)
    if hasattr(source, "source"):
        return _facts(source.source)
    rows = getattr(source, "rows", None) or source.fingerprint().get("rows")
    return _Facts(int(rows) if isinstance(rows, int) else None, once=False)


def _loader_facts(loader: DataLoader[Any]) -> _Facts:
    if isinstance(loader.dataset, IterableDataset) or type(loader.batch_sampler) is not BatchSampler:
        return _Facts(None, once=False)
    sampler: Any = loader.batch_sampler.sampler
    repeats, instead = False, "leave replacement= and num_samples= out"
    if isinstance(sampler, RandomSampler):
        repeats = sampler.replacement or sampler.num_samples > len(sampler.data_source)
    elif isinstance(sampler, WeightedRandomSampler):
        repeats, instead = sampler.replacement, "write replacement=False"
    elif isinstance(sampler, SubsetRandomSampler):
        repeats, instead = len(set(sampler.indices)) < len(sampler.indices), "give each index once"
    elif isinstance(sampler, DistributedSampler):
        repeats = sampler.total_size > len(loader.dataset)  # type: ignore[arg-type] # a sampler needs its length
        instead = "write drop_last=True in it"
    elif type(sampler) is not SequentialSampler:
        return _Facts(None, once=False)
    if repeats:
        raise ConfigError(
            f"a {type(sampler).__name__} that may give a row several times in a pass, with a private optimizer: in one "
            f"batch it would count more than once; {instead}, or read from a PoissonSource"
        )
    return _Facts(len(sampler), once=True)


def _batches(source: Any) -> int | None:
    """How many a worker has in a pass, if it is known."""
    if isinstance(source, PartSource):
        found = _batches(source.source)
        if found is None:
            return None
        return found // source.count if source.together else len(range(source.index, found, source.count))
    if isinstance(source, Strided):
        return source.count(0)
    if isinstance(source, LoaderSource):
        return len(source.loader)
    inner = getattr(source, "source", None)
    return _batches(inner) if inner is not None and inner.batch_size == source.batch_size else None


def _inside(source: Any) -> Any:
    """The source that others are around."""
    while hasattr(source, "source"):
        source = source.source
    return source


def _warn(model: Model, kind: str) -> None:
    """Once for each model."""
    if "sampling" not in model.said:
        model.said.add("sampling")
        log.warning(
            "the batches of a %s are shuffled or in order, and the epsilon is for batches into which every row is "
            "drawn by itself: it is a usual figure, and not a promise. plait.data.PoissonSource draws so",
            kind,
        )


def uses_of(stream: Stream) -> Callable[[], int] | None:
    """The most often that any row was used, with the batch that is being used now; None: perhaps in every one."""
    inner = _inside(stream.source)
    if hasattr(inner, "uses"):
        return lambda: int(inner.uses(stream.epoch, stream.position))
    if not _facts(stream.source).once:
        return None
    return lambda: stream.epoch + 1


def draws_of(source: Source) -> str:
    """A name for what decides which rows are in which batch; where it is not known, all that look alike are one."""
    inner = _inside(source)
    if hasattr(inner, "draws"):
        return str(inner.draws())
    facts = json.dumps(inner.fingerprint(), sort_keys=True)
    return hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()


def check_seed(source: Source, strategy: Strategy, scope: TaskScope) -> None:
    """Who reads rows with others has to draw the same."""
    peer = getattr(strategy, "peer", None)
    if getattr(_inside(source), "own_seed", False) and (peer is not None or strategy.worker_num > 1):
        others = "the other party" if peer is not None else f"{strategy.worker_num} workers"
        if not is_part(source):
            raise ConfigError(
                f"the input for {scope} is a PoissonSource without a seed, and would not draw the rows that {others} "
                "draw: write the same seed= for all, a secret such as one of secrets.randbits(128)"
            )


def kept_seed(source: Source) -> str | None:
    """The seed that a source has drawn for itself, which goes into checkpoints."""
    found: str | None = getattr(_inside(source), "kept_seed", None)
    return found


def take_seed(stream: Stream, seed: str | None) -> None:
    """Draw on as the run did that a checkpoint is of."""
    inner = _inside(stream.source)
    if seed is not None and getattr(inner, "own_seed", False) and inner.kept_seed != seed:
        inner.kept_seed = seed
        stream.close()
        stream.pending = None  # it was of other draws


def check_rows(rows: int, microbatches: int, scope: TaskScope) -> None:
    """Micro-batches are of equal size."""
    if rows % microbatches:
        raise DataError(
            f"a batch for {scope} has {rows} rows, which {microbatches} micro-batches of equal size do not make: drop "
            "what remains at the end of a pass (drop_remainder=True), or leave num_microbatches out"
        )
