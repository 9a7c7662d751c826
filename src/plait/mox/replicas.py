"""Several replicas in one process (`num_gpus`): each step's batch is shared out, and what the replicas say is joined.

The replicas take turns on one device. A step with k replicas of batch b equals a step on a batch of k·b.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from plait.data import Sample, Source
from plait.engine.evaluation_hooks import AggregativeSessionRunHook
from plait.engine.hooks import SessionRunHook
from plait.errors import DataError
from plait.mox.spec import ModelSpec

__all__ = ["JoinedSource", "join", "shares"]


class JoinedSource:
    """A source whose batches are those of another, `replicas` of them put together along the first dimension."""

    def __init__(self, source: Source, replicas: int) -> None:
        self.source = source
        self.replicas = replicas
        self.batch_size: int | None = source.batch_size * replicas if source.batch_size is not None else None
        self.num_epochs = source.num_epochs
        self.seekable = source.seekable

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        batches = self.source.batches(epoch, start * self.replicas)
        drops = getattr(self.source, "drop_remainder", False)
        with contextlib.closing(batches) if isinstance(batches, Generator) else contextlib.nullcontext():
            while group := list(itertools.islice(batches, self.replicas)):
                if len(group) == self.replicas or not drops:
                    yield _joined([Sample.of(batch) for batch in group])

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "joined", "replicas": self.replicas, "batches": self.source.fingerprint()}


def _joined(batches: list[Sample]) -> Any:
    try:
        fields = {name: _rows_of([batch[name] for batch in batches]) for name in batches[0].keys()}  # noqa: SIM118
    except (KeyError, RuntimeError) as error:
        raise DataError(f"the batches of {len(batches)} replicas do not join: {error}") from error
    return fields if batches[0].unnamed() is None else tuple(fields.values())


def _rows_of(parts: list[Any]) -> Any:
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts) if parts[0].dim() else torch.stack(parts)
    return [row for part in parts for row in part] if isinstance(parts[0], (list, tuple)) else parts[0]


def shares(sample: Sample, replicas: int) -> list[tuple[Sample, float]]:
    """The batch in `replicas` parts, each with its share of the rows; fewer parts if there are fewer rows."""
    rows = sample.batch_size
    if rows is None or rows < replicas:
        return [(sample, 1.0)]
    ends = [rows * (number + 1) // replicas for number in range(replicas)]
    starts = [0, *ends[:-1]]
    named = sample.unnamed() is None
    return [
        (Sample.of(_cut(sample, slice(start, end), rows, named)), (end - start) / rows)
        for start, end in zip(starts, ends, strict=True)
    ]


def _cut(sample: Sample, part: slice, rows: int, named: bool) -> Any:
    fields = {name: value[part] if _has_rows(value, rows) else value for name, value in sample.items()}
    return fields if named else tuple(fields.values())


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim > 0 and len(value) == rows
    return isinstance(value, (list, tuple)) and len(value) == rows


def join(specs: Sequence[ModelSpec], weights: Sequence[float], *, log_first: bool) -> ModelSpec:
    """One spec of the replicas': losses and, unless only the first is logged, log_info are means over the rows."""
    first = specs[0]
    loss: Any = None
    if isinstance(first.loss, list):
        loss = [_mean([spec.loss[i] for spec in specs], weights) for i in range(len(first.loss))]  # type: ignore[index] # all alike
    elif first.loss is not None:
        loss = _mean([spec.loss for spec in specs], weights)
    log_info = first.log_info
    if not log_first:
        log_info = {name: _mean([spec.log_info[name] for spec in specs], weights) for name in first.log_info}
    places = zip(*(spec.hooks for spec in specs), strict=True)
    hooks = [hook for place in places for hook in _living(place, weights)]
    return ModelSpec(loss, first.var_scopes, log_info, first.output_info, first.export_spec, hooks)


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    return sum(value * weight for value, weight in zip(values, weights, strict=True))


def _living(hooks: Sequence[SessionRunHook], weights: Sequence[float]) -> list[SessionRunHook]:
    """One hook that sees the replicas' numbers together, if it supports that; else each replica's own."""
    first = hooks[0]
    if not isinstance(first, AggregativeSessionRunHook) or not first.support_aggregation():
        return list(hooks)
    for name, value in vars(first).items():
        if isinstance(value, Mapping) and value and all(isinstance(item, torch.Tensor) for item in value.values()):
            together = {key: _mean([vars(hook)[name][key] for hook in hooks], weights) for key in value}
            setattr(first, name, together)
    return [first]
