"""Metrics of heads, against values that TensorFlow gave and against what they mean."""

from __future__ import annotations

import pytest
import torch

from plait.train.head_metrics import accuracy_baseline, auc_precision_recall


def result(measured):
    metric = measured.create()
    metric.update(*measured.args)
    return float(metric.result())


def test_the_larger_class_is_the_baseline():
    assert result(accuracy_baseline(torch.tensor([1.0, 0, 0, 0]))) == 0.75
    assert result(accuracy_baseline(torch.tensor([1.0, 1, 1, 0]))) == 0.75
    assert result(accuracy_baseline(torch.tensor([1.0, 0]), torch.tensor([9.0, 1.0]))) == pytest.approx(0.9)


def test_a_perfect_order_has_area_one():
    labels = torch.tensor([0.0, 0, 1, 1])
    assert result(auc_precision_recall(labels, torch.tensor([0.1, 0.2, 0.8, 0.9]))) == pytest.approx(1.0)


def test_the_area_is_average_precision_where_points_are_many():
    torch.manual_seed(0)
    labels = (torch.rand(20_000) < 0.2).float()
    scores = (0.3 * labels + torch.rand(20_000) * 0.7).clamp(0, 1)
    order = scores.argsort(descending=True)
    hits = labels[order].cumsum(0)
    average = float((hits / torch.arange(1, 20_001) * labels[order]).sum() / labels.sum())
    assert result(auc_precision_recall(labels, scores)) == pytest.approx(average, abs=2e-3)


def test_batches_and_weights_add_up():
    labels, scores = torch.tensor([1.0, 0, 1, 0]), torch.tensor([0.9, 0.8, 0.3, 0.1])
    whole = auc_precision_recall(labels.repeat(2), scores.repeat(2))
    assert result(whole) == pytest.approx(result(auc_precision_recall(labels, scores, torch.full((4,), 2.0))))
