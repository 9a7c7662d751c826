"""How often a private step uses a row: what an input tells of its sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.data.parts import is_part
from plait.data.sources import ConstantSource, Source
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, DataError

if TYPE_CHECKING:
    from plait.data import Stream
    from plait.engine.model import Model

__all__ = ["Sampling", "check_rows", "sampling_of", "uses_of"]

log = logging.getLogger("plait")


class Sampling(NamedTuple):
    """What an epsilon, and the divisor of a sum, need to know of the batches."""

    rate: float
    """The share of all rows that is in one logical batch, of all workers that take the step together."""
    expected: float | None
    """Rows that a worker's batch has on average, where each row is drawn by itself; None: batches are counted."""
    rows: int | None
    """Rows of this worker's batch, as the source says."""


def sampling_of(model: Model, task: str | None, first_rows: int | None, samples: int | None) -> Sampling:
    """The sampling of a task's training input. `first_rows` are those of its first batch, `samples` the user's word."""
    source, strategy = model.inputs[TaskScope(MODE.TRAIN, task)].source, model.strategy
    together = strategy.worker_num if strategy.in_step else 1
    drawn: Any = _inside(model.streams[TaskScope(MODE.TRAIN, task)].source)
    if getattr(drawn, "expected", None) is not None:
        if strategy.gradient_merge > 1:
            raise ConfigError(
                f"gradient_merge={strategy.gradient_merge} with Poisson batches: a row may be in several of those that "
                "are merged, and would count more than once; leave it out, and give the source a larger batch_size"
            )
        divided = strategy.worker_num > 1 and not is_part(source)
        expected = drawn.rate * drawn.all_rows / strategy.worker_num if divided else drawn.expected
        return Sampling(float(drawn.rate), float(expected), None)
    if isinstance(source, ConstantSource):
        return Sampling(1.0, None, source.batch_size)
    batch, rows = source.batch_size or first_rows, samples or _rows_of(source)
    if rows is None or batch is None:
        raise ConfigError(
            f"the input for {TaskScope(MODE.TRAIN, task)} is a {type(source).__name__}, which does not say how many "
            "rows it has, and epsilon depends on it: write samples= in the private optimizer, or read from a "
            "PoissonSource"
        )
    if is_part(source) and samples is None:
        together = 1  # each worker has rows of its own
    _warn(model, type(source).__name__)
    return Sampling(min(1.0, batch * together * strategy.gradient_merge / rows), None, batch)


def _inside(source: Any) -> Any:
    """The source that others are around."""
    while hasattr(source, "source"):
        source = source.source
    return source


def _rows_of(source: Source) -> int | None:
    rows = getattr(source, "rows", None) or source.fingerprint().get("rows")
    return int(rows) if isinstance(rows, int) else None


def _warn(model: Model, kind: str) -> None:
    """Once for each model."""
    if "sampling" not in model.said:
        model.said.add("sampling")
        log.warning(
            "the batches of a %s are shuffled or in order, and the epsilon is for batches into which every row is "
            "drawn by itself: it is a usual figure, and not a promise. plait.data.PoissonSource draws so",
            kind,
        )


def uses_of(stream: Stream) -> Callable[[], int]:
    """The most often that any row was used, with the batch that is being used now."""
    inner = _inside(stream.source)
    if hasattr(inner, "uses"):
        return lambda: int(inner.uses(stream.epoch, stream.position))
    if isinstance(inner, ConstantSource):
        return lambda: stream.position + 1
    return lambda: stream.epoch + 1


def check_rows(rows: int, microbatches: int, scope: TaskScope) -> None:
    """Micro-batches are of equal size."""
    if rows % microbatches:
        raise DataError(
            f"a batch for {scope} has {rows} rows, which {microbatches} micro-batches of equal size do not make: drop "
            "what remains at the end of a pass (drop_remainder=True), or leave num_microbatches out"
        )
