"""What a tensor was made of is known, through views and writes as well."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.export.tracking import Tracking


@pytest.fixture
def tracked():
    """Two tensors with names, inside."""
    with Tracking() as tracking, torch.no_grad():
        x, y = torch.arange(6.0).reshape(2, 3).clone(), torch.tensor([1, 2])
        tracking.begin(x, "x")
        tracking.begin(y, "y")
        yield tracking, x, y


def test_what_is_made_of_both(tracked):
    tracking, x, y = tracked
    assert tracking.made_of(x) == {"x"}
    assert tracking.made_of(x.sum(1) * y) == {"x", "y"}
    assert tracking.made_of(x.relu().argmax(1)) == {"x"}
    assert tracking.made_of(nn.functional.cross_entropy(x, y)) == {"x", "y"}
    assert tracking.made_of(nn.Linear(3, 2)(x)) == {"x"}


def test_what_is_made_of_none(tracked):
    tracking, x, _ = tracked
    assert tracking.made_of(torch.ones(2)) == set()
    assert tracking.made_of(x.new_zeros(len(x))) == {"x"}, "more than is true, never less"
    assert tracking.made_of(torch.zeros(x.shape)) == set()


def test_writes_are_seen_through_views(tracked):
    tracking, x, y = tracked
    made = torch.zeros(2, 3)
    made[:, 0] = y.float()
    assert tracking.made_of(made) == {"y"}
    view = made.view(-1)
    made.add_(x)
    assert tracking.made_of(view) == {"x", "y"}
    torch.add(x, 1, out=(out := torch.empty(2, 3)))
    assert tracking.made_of(out) == {"x"}


def test_several_results_and_lists(tracked):
    tracking, x, y = tracked
    values, places = x.topk(1)
    assert tracking.made_of(values) == tracking.made_of(places) == {"x"}
    assert tracking.made_of(torch.stack([x[:, 0], y.float()])) == {"x", "y"}
    assert [tracking.made_of(one) for one in torch.split(x, 1)] == [{"x"}, {"x"}]


def test_memory_that_is_used_again_is_not_taken_for_another(tracked):
    tracking, x, _ = tracked
    for _ in range(20):
        x.mul(2)
        assert tracking.made_of(torch.empty(2, 3)) == set()
