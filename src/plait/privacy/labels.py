"""Gradients that tell less of labels: what the party that has them does to rows before they go back, and the attacks.

With two classes, a row's gradient is long where the model errs, and points where its label does: its norm or its
direction gives the label away. Both defences add Gaussian noise that is centred, so that the mean gradient stays. Its
deviation comes from the whole batch, so that one row changes all: this is no differential privacy.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from plait.errors import ConfigError, DataError

__all__ = ["direction_attack", "marvell", "max_norm", "norm_attack"]

_HALVINGS = 16
_PARTS = np.linspace(0.0, 1.0, 33)
_KNOWN = 32
"""How many rows, at most, an attacker takes in turn as the one whose label it knows."""


def max_norm(rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Lengthen or shorten each row at random, so that every expected squared norm is the largest one of the batch.

    Noise lies along the row itself: directions stay, up to the sign. Needs no labels, and hides norms alone.
    """
    flat = _flat(rows)
    squares = flat.square().sum(1, keepdim=True)
    if not len(flat):
        return rows
    factors = (squares.amax(0, keepdim=True) / squares.clamp_min(torch.finfo(squares.dtype).tiny) - 1).sqrt_()
    draws = torch.randn(squares.shape, generator=generator, dtype=squares.dtype, device=squares.device)
    noise = torch.where(squares > 0, factors * draws, 0)
    return torch.addcmul(flat, flat, noise).view_as(rows)


def marvell(rows: Tensor, labels: Tensor, budget: float = 0.3, generator: torch.Generator | None = None) -> Tensor:
    """Add to each row noise of its class's covariance, the least with which the two classes look alike enough.

    Li et al. 2022. `budget` bounds the sum of both Kullback-Leibler divergences between the classes' rows, taken to be
    Gaussian: no attacker's AUC is then above 1/2 + sqrt(budget) / 2 - budget / 8. A batch of one class alone has no
    difference to hide; it gets the noise of `max_norm`, or the lack of noise would tell.

    Args:
        rows: gradients, one a sample.
        labels: one a sample, 0 or 1.
        budget: above 0, and below 4.
        generator: where noise is drawn from; None: torch's own.

    """
    if not 0 < budget < 4:
        raise ConfigError(f"marvell(budget={budget}): write a number above 0 and below 4, such as 0.3")
    flat, positive = _flat(rows), _positive(rows, labels)
    count = int(positive.sum())
    if count in (0, len(flat)):
        return max_norm(rows, generator)
    ones, zeros = flat[positive], flat[~positive]
    difference = ones.mean(0) - zeros.mean(0)
    square = float(difference.square().sum())
    spreads = [float((part - part.mean(0)).square().sum(1).mean()) / flat.shape[1] for part in (ones, zeros)]
    along, across = _covariances(square, spreads[0], spreads[1], count / len(flat), flat.shape[1], budget)
    direction = difference / math.sqrt(square) if square > 0 else torch.zeros_like(difference)
    draws = torch.randn(flat.shape, generator=generator, dtype=flat.dtype, device=flat.device)
    steady = _by_class(across, positive, flat)[:, None]
    more = (_by_class(along, positive, flat)[:, None] - steady) * (draws @ direction)[:, None]
    return torch.addcmul(flat, draws, steady).addcmul_(more, direction).view_as(rows)


def _by_class(variances: tuple[float, float], positive: Tensor, like: Tensor) -> Tensor:
    """Each row's deviation."""
    one, zero = (math.sqrt(variance) for variance in variances)
    return torch.where(positive, like.new_tensor(one), like.new_tensor(zero))


def _covariances(
    square: float, one: float, zero: float, share: float, size: int, budget: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Variances of the noise along the difference of the means, and across it, each for the classes 1 and 0.

    Of the least power whose divergence is within the budget. Args: the squared distance of the means, the variance of
    each class in one dimension, the share of class 1, dimensions, and the budget.
    """
    floor = max(one, zero, square) * 1e-6 + 1e-30
    one, zero = max(one, floor), max(zero, floor)
    unit = square / budget + size * abs(one - zero) + floor
    low, high = math.log(unit * 1e-4), math.log(unit * 1e4)
    found = _shared(math.exp(high), square, one, zero, share, size)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = _shared(math.exp(middle), square, one, zero, share, size)
        if tried[0] <= budget:
            high, found = middle, tried
        else:
            low = middle
    _, lift, along_one, along_zero = found
    return (along_one, along_zero), ((lift, 0.0) if one < zero else (0.0, lift))


def _shared(power: float, square: float, one: float, zero: float, share: float, size: int) -> tuple[float, ...]:
    """The least divergence for a mean power of noise; the variances across, and along for each class.

    On a grid: of how power is shared between along and across, and of how what goes along is shared between the
    classes. Across, only the narrower class needs noise, and never more than makes it as wide as the other.
    """
    narrow = share if one < zero else 1 - share
    lift = (power * _PARTS / (max(size - 1, 1) * narrow)).clip(max=abs(one - zero))[:, None]
    rest = power - lift * (size - 1) * narrow
    along_one, along_zero = rest * _PARTS / share, rest * (1 - _PARTS) / (1 - share)
    a, b = along_one + one, along_zero + zero
    ratio = (min(one, zero) + lift) / max(one, zero)
    divergence = ((b + square) / a + (a + square) / b + (size - 1) * (ratio + 1 / ratio)) / 2 - size
    place = np.unravel_index(divergence.argmin(), divergence.shape)
    return float(divergence[place]), float(lift[place[0], 0]), float(along_one[place]), float(along_zero[place])


def norm_attack(rows: Tensor, labels: Tensor) -> float:
    """The AUC of guessing labels by the norms of the rows, whichever way round guesses better: 0.5 is chance."""
    found = _auc(_flat(rows).norm(dim=1), _positive(rows, labels))
    return max(found, 1 - found)


def direction_attack(rows: Tensor, labels: Tensor) -> float:
    """The AUC of guessing labels by the cosine to a row that is known to be of class 1; the mean over such rows."""
    units = torch.nn.functional.normalize(_flat(rows))
    positive = _positive(rows, labels)
    found = []
    for known in positive.nonzero().flatten()[:_KNOWN].tolist():
        others = torch.arange(len(units), device=units.device) != known
        found.append(_auc((units @ units[known])[others], positive[others]))
    return sum(found) / len(found) if found else 0.5


def _auc(scores: Tensor, positive: Tensor) -> float:
    """By ranks; those that are alike share theirs. 0.5 where a class is missing."""
    ones = int(positive.sum())
    pairs = ones * (len(scores) - ones)
    if not pairs:
        return 0.5
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse].double()
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / pairs)


def _flat(rows: Tensor) -> Tensor:
    if not isinstance(rows, Tensor) or rows.dim() < 1 or not rows.is_floating_point():
        found = f"{rows.dtype} of shape {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise DataError(f"gradients have to be a floating-point tensor with a row for each sample: got {found}")
    return rows.detach().reshape(len(rows), math.prod(rows.shape[1:]))


def _positive(rows: Tensor, labels: Tensor) -> Tensor:
    """Which rows are of class 1."""
    labels = torch.as_tensor(labels, device=rows.device).detach().reshape(-1)
    if len(labels) != len(rows):
        raise DataError(f"{len(labels)} labels for {len(rows)} rows of gradients: give one for each, in their order")
    positive = labels == 1
    if not bool((positive | (labels == 0)).all()):
        raise DataError("labels have to be 0 or 1: hiding them is for two classes")
    return positive
