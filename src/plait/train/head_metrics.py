"""Metrics of ready Estimators alone: the area below precision and recall, and what the larger class would give."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.engine.auc import running_sums
from plait.engine.metrics import BinnedAuc, Mean, Measurement

__all__ = ["accuracy_baseline", "auc_precision_recall"]

THRESHOLDS = 200


class _Baseline(Mean):
    """The share of the larger class."""

    def result(self) -> Tensor:
        share = super().result()
        return torch.maximum(share, 1 - share)


class _PrecisionRecall(BinnedAuc):
    """The area below precision as a function of recall.

    Between two thresholds, true and predicted positives are taken to grow in proportion; precision then follows a
    curve, whose area is known in closed form.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, THRESHOLDS)

    def result(self) -> Tensor:
        negatives, positives = self.sums.unbind()
        true, false = (_above(one) for one in (positives, negatives))
        predicted = true + false
        gained = true[:-1] - true[1:]
        slope = _divided(gained, predicted[:-1] - predicted[1:])
        offset = true[1:] - slope * predicted[1:]
        both = (predicted[:-1] > 0) & (predicted[1:] > 0)
        ratio = torch.where(both, _divided(predicted[:-1], predicted[1:]), torch.ones_like(offset))
        return (slope * (gained + offset * ratio.log())).sum() / true[0]


def _above(bins: Tensor) -> Tensor:
    """How many are above each threshold, from the lowest on; above the last there are none."""
    return torch.cat([running_sums(bins.flip(0)).flip(0), bins.new_zeros(1)])


def _divided(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below.clamp(min=1e-300), torch.zeros_like(above))


def accuracy_baseline(labels: Tensor, weights: Tensor | None = None) -> Measurement:
    """The accuracy of who always says the class that is more frequent."""
    return Measurement(_Baseline, (labels, weights))


def auc_precision_recall(labels: Tensor, predictions: Tensor, weights: Tensor | None = None) -> Measurement:
    """The area below the curve of precision and recall; predictions are probabilities."""
    return Measurement(_PrecisionRecall, (labels, predictions, weights))
