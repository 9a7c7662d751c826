"""Gradients that are sent while the backward pass still runs, over gloo."""

from __future__ import annotations

import pytest

from .group import run_group

BUCKETS = 3


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def early(request):
    return [one["early"] for one in run_group(["early"], request.param, shared=False)]


def test_means_are_right_whatever_was_sent_early(early):
    assert [one["good"] for one in early] == [[True] * 18] * len(early)


def test_buckets_are_sent_early_once_the_next_list_is_foreseen(early):
    for one in early:
        assert one["counts"][:8] == [[0, BUCKETS]] * 6 + [[BUCKETS, BUCKETS]] * 2


def test_a_list_that_was_not_foreseen_is_sent_after_what_was(early):
    for one in early:
        assert one["counts"][8] == [BUCKETS, BUCKETS + 1]  # the other list has one bucket
        assert one["counts"][9] == [0, BUCKETS]


def test_gradients_that_changed_on_one_worker_are_sent_again_by_all(early):
    for one in early:
        assert one["counts"][15:] == [[BUCKETS, BUCKETS], [BUCKETS, 2 * BUCKETS], [0, BUCKETS]]
