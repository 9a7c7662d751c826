from __future__ import annotations

import itertools
import math

import pytest
import torch

from plait.engine.auc import binned_auc, exact_auc, grouped_auc


def slow_auc(scores, positive, weights):
    """Every pair, by its definition."""
    rows = list(zip(scores, positive, weights))
    pairs = [(p, n) for p, n in itertools.product(rows, rows) if p[1] and not n[1]]
    won = sum(p[2] * n[2] * (1.0 if p[0] > n[0] else 0.5 if p[0] == n[0] else 0.0) for p, n in pairs)
    return won / sum(p[2] * n[2] for p, n in pairs)


def exact(scores, positive, weights=None):
    weights = weights or [1.0] * len(scores)
    as_double = lambda values: torch.tensor(values, dtype=torch.float64)
    return exact_auc(as_double(scores), torch.tensor(positive).bool(), as_double(weights)).item()


@pytest.mark.parametrize(
    ("scores", "positive", "expected"),
    [
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([1, 1, 1, 1], [0, 1, 0, 1], 0.5),
        ([-math.inf, 0, math.inf], [0, 1, 1], 1.0),
    ],
)
def test_exact(scores, positive, expected):
    assert exact(scores, positive) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_exact_is_the_count_of_pairs_with_ties_and_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (40,), generator=generator).tolist()
    positive = torch.randint(0, 2, (40,), generator=generator).tolist()
    weights = torch.rand(40, generator=generator).tolist()
    assert exact(scores, positive, weights) == pytest.approx(slow_auc(scores, positive, weights))


def test_exact_does_not_depend_on_the_order_of_rows():
    assert exact([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == exact([0.8, 0.35, 0.4, 0.1], [1, 1, 0, 0])


@pytest.mark.parametrize("positive", [[1, 1], [0, 0]], ids=["no negatives", "no positives"])
def test_without_both_classes_there_is_no_area(positive):
    assert math.isnan(exact([0.1, 0.2], positive))


def test_a_score_that_is_no_number_makes_the_area_none():
    assert math.isnan(exact([0.1, math.nan, 0.3], [0, 1, 1]))


def test_binned_counts_a_bin_as_ties():
    negatives, positives = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0])
    assert binned_auc(negatives, positives).item() == pytest.approx((2.5 + 3) / 6)
    assert math.isnan(binned_auc(torch.zeros(3), positives))


def grouped(scores, positive, groups):
    return grouped_auc(torch.tensor(scores), torch.tensor(positive).bool(), torch.tensor(groups)).item()


def test_grouped_weighs_each_group_by_its_rows():
    scores, positive = [0.1, 0.9, 0.9, 0.1, 0.5], [0, 1, 0, 1, 0]
    # group 0: 1.0 over 2 rows; group 1: 0.0 over 3
    assert grouped(scores, positive, [0, 0, 1, 1, 1]) == pytest.approx(2 / 5)


def test_groups_of_one_class_do_not_count():
    assert grouped([0.1, 0.9, 0.5, 0.6], [0, 1, 1, 1], [7, 7, 3, 3]) == pytest.approx(1.0)
    assert math.isnan(grouped([0.1, 0.9], [1, 1], [0, 0]))


def test_one_group_is_the_exact_area():
    scores, positive = [0.1, 0.4, 0.35, 0.8, 0.4], [0, 0, 1, 1, 1]
    assert grouped(scores, positive, [5] * 5) == pytest.approx(exact(scores, positive))
