"""Statistics of tensors and differences between them, a block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Gap", "Statistics", "gap"]

_BLOCK = 1 << 20
"""Numbers at a time: what is made of a tensor, however large, takes some dozen megabytes."""


@dataclass
class Statistics:
    """Of all numbers that were added. Mean, deviation, least and greatest are of those that are finite."""

    count: int = 0
    finite: int = 0
    zeros: int = 0
    nans: int = 0
    mean: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf
    _squares: float = 0.0
    """Sum of the squared distances from the mean."""

    def add(self, tensor: Tensor) -> None:
        """Take a tensor's numbers in; the two parts of a complex number count as two."""
        for block in _blocks(tensor):
            self._add_block(block.to(torch.float64))

    @property
    def infinite(self) -> int:
        return self.count - self.finite - self.nans

    @property
    def deviation(self) -> float:
        return math.sqrt(self._squares / self.finite) if self.finite else math.nan

    def facts(self) -> dict[str, Any]:
        """By their names, None where there is no finite number."""
        some = self.finite > 0
        return {
            "mean": self.mean if some else None,
            "deviation": self.deviation if some else None,
            "min": self.least if some else None,
            "max": self.greatest if some else None,
            "zeros": self.zeros / self.count if self.count else None,
            "nans": self.nans,
            "infinite": self.infinite,
        }

    def _add_block(self, numbers: Tensor) -> None:
        self.count += numbers.numel()
        self.zeros += int((numbers == 0).sum())
        self.nans += int(numbers.isnan().sum())
        finite = numbers[numbers.isfinite()]
        if not finite.numel():
            return
        self.least = min(self.least, float(finite.min()))
        self.greatest = max(self.greatest, float(finite.max()))
        # two sets of numbers are one: its mean lies between theirs, and their distance adds to the squares
        size, mean = finite.numel(), float(finite.mean())
        total, apart = self.finite + size, mean - self.mean
        self._squares += float((finite - mean).square().sum()) + apart * apart * self.finite * size / total
        self.mean += apart * size / total
        self.finite = total


@dataclass(frozen=True)
class Gap:
    """How far two tensors of one shape are apart: NaN where one has a NaN that the other has not."""

    same: bool
    """Bit for bit, so also NaNs, signs of zeros and the type."""
    absolute: float
    relative: float
    """To the larger of both numbers."""


def gap(one: Tensor, other: Tensor) -> Gap:
    """Compare two tensors of one shape, number by number."""
    if one.dtype == other.dtype and all(torch.equal(*pair) for pair in zip(_bits(one), _bits(other), strict=True)):
        return Gap(same=True, absolute=0.0, relative=0.0)
    absolute = relative = 0.0
    if one.is_complex() != other.is_complex():
        one, other = one.to(torch.complex128), other.to(torch.complex128)
    for a, b in zip(_blocks(one), _blocks(other), strict=True):
        distance, share = _distances(a, b)
        absolute, relative = _larger(absolute, float(distance.max())), _larger(relative, float(share.max()))
    return Gap(same=False, absolute=absolute, relative=relative)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return (flat[at : at + _BLOCK] for at in range(0, flat.numel(), _BLOCK))


def _bits(tensor: Tensor) -> Iterator[Tensor]:
    return (block.view(torch.uint8) for block in _blocks(tensor))


def _distances(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x, y = a.to(torch.float64), b.to(torch.float64)
    distance = (x - y).abs()
    distance[(x == y) | (x.isnan() & y.isnan())] = 0
    if a.dtype == b.dtype and not a.is_floating_point():
        # of two large whole numbers float64 may not see that they differ
        distance[(distance == 0) & (a != b)] = 1
    share = distance / torch.maximum(x.abs(), y.abs())
    share[distance == 0] = 0
    share[distance.isinf()] = math.inf
    return distance, share


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
