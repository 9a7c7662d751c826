"""Combining what every worker has: the same on all of them, in the order of workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from plait.engine.strategy import HOW
from plait.errors import ConfigError

__all__ = ["combined"]


def combined(values: Sequence[Any], how: HOW) -> Any:
    """One value of many: numbers, tensors, or nestings of them that are alike.

    >>> combined([{"a": 1, "b": [2]}, {"a": 3, "b": [4]}], "sum")
    {'a': 4, 'b': [6]}
    """
    if how not in ("sum", "mean", "min", "max", "concat"):
        raise ConfigError(f"reduce: how={how!r}; write 'sum', 'mean', 'min', 'max' or 'concat'")
    return _joined(values) if how == "concat" else _reduced(values, how)


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _joined([value[key] for value in values]) for key in first}
    if isinstance(first, torch.Tensor):
        return torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
    if isinstance(first, (list, tuple)):
        return [item for value in values for item in value]
    return list(values)


def _reduced(values: Sequence[Any], how: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _reduced([value[key] for value in values], how) for key in first}
    if isinstance(first, (list, tuple)):
        return [_reduced(list(items), how) for items in zip(*values, strict=True)]
    if isinstance(first, torch.Tensor):
        return _tensors(values, how)
    numbers = [float(value) if how == "mean" else value for value in values]
    if how in ("min", "max"):
        return (min if how == "min" else max)(numbers)
    total = sum(numbers)
    return total / len(numbers) if how == "mean" else total


_PAIRS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


def _tensors(values: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    total = functools.reduce(_PAIRS[how], values)
    return total / len(values) if how == "mean" else total
