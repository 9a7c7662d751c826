"""Areas under the ROC curve, of whole tensors: the arithmetic behind `metrics.auc` and `metrics.group_auc`.

The area is the chance that a positive row scores higher than a negative one, a tie counting half. Nothing here has a
shape that depends on a value (no `unique`, no boolean index), so that nothing waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["binned_auc", "exact_auc", "grouped_auc", "running_sums"]


def binned_auc(negatives: Tensor, positives: Tensor) -> Tensor:
    """The area of two histograms over the same bins of scores; rows of one bin count as ties."""
    below = running_sums(negatives) - negatives / 2
    return (positives * below).sum() / (positives.sum() * negatives.sum())


def exact_auc(scores: Tensor, positive: Tensor, weights: Tensor) -> Tensor:
    # stable, so that the sums of weights inside a tie have one order
    scores, order = scores.sort(stable=True)
    positive, weights = positive[order], weights[order]
    first, end = _segments(_changes(scores))
    negatives = _prefix(weights * ~positive)
    positives = weights * positive
    below = (negatives[first] + negatives[end]) / 2
    area = (positives * below).sum() / (positives.sum() * negatives[-1])
    return _nan_if_any_nan(area, scores)


def grouped_auc(scores: Tensor, positive: Tensor, groups: Tensor) -> Tensor:
    """The mean over the groups with both classes, each with its number of rows as weight, in the dtype of `scores`.

    Every row carries its share of its group's area, so that a group needs no place of its own.
    """
    order = scores.argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    scores, positive, groups = scores[order], positive[order], groups[order]
    new_group = _changes(groups)
    first, end = _segments(new_group | _changes(scores))
    start, stop = _segments(new_group)
    negatives, positives = _prefix(~positive), _prefix(positive)
    pairs = (positives[stop] - positives[start]) * (negatives[stop] - negatives[start])
    twice_below = negatives[first] + negatives[end] - 2 * negatives[start]
    won = (positive * twice_below * (stop - start)).to(scores.dtype)
    # a group of one class has won no pair, so any divisor will do for it
    area = (won / (2 * pairs).clamp(min=1)).sum() / (pairs > 0).sum()
    return _nan_if_any_nan(area, scores)


def running_sums(values: Tensor) -> Tensor:
    """Of all up to each; where only what is the same in every run is allowed, CUDA has none for floats."""
    if values.is_cuda and values.is_floating_point() and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(0).to(values.device)
    return values.cumsum(0)


def _changes(values: Tensor) -> Tensor:
    """Where a sorted column differs from the row before; the first row does."""
    changed = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=changed[1:])
    return changed


def _segments(starts: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the index of the first row of its segment and of the first row after it."""
    number = starts.cumsum(0)
    return torch.searchsorted(number, number), torch.searchsorted(number, number, right=True)


def _prefix(values: Tensor) -> Tensor:
    """Sums of all rows before each index, 0 to n; those of bools are whole numbers."""
    sums = running_sums(values)
    return torch.cat([sums.new_zeros(1), sums])


def _nan_if_any_nan(area: Tensor, scores: Tensor) -> Tensor:
    """A score that is no number has no rank; sorting would give it the highest, without a word."""
    return area.masked_fill(scores.isnan().any(), math.nan)
