"""The join of points that both have multiplied."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import FederalError
from plait.psi import spill
from plait.psi.matching import match
from plait.psi.points import as_points

NUMBERS = st.lists(st.integers(0, 60), unique=True, max_size=50)


def point(number):
    return hashlib.sha256(b"%d" % number).digest()


def points(numbers):
    return as_points(b"".join(map(point, numbers)))


def join(mine, theirs, directory):
    """Rows are numbered as their points are, so that what is found can be read."""
    batches = [[points(side[at : at + 7]) for at in range(0, len(side), 7)] for side in (mine, theirs)]
    return match(batches[0], np.array(mine, np.uint64), batches[1], len(mine) + len(theirs), directory, "follower")


@settings(max_examples=30)
@given(NUMBERS, NUMBERS, st.sampled_from([5, 1000]))
def test_both_find_the_same_in_the_order_of_the_points(tmp_path_factory, mine, theirs, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "BUCKET_ROWS", rows)
        directory = tmp_path_factory.mktemp("match") / "x"
        one, other = join(mine, theirs, directory), join(theirs, mine, directory)
    wanted = sorted(set(mine) & set(theirs), key=point)
    assert one.rows.tolist() == other.rows.tolist() == wanted
    assert one.digest == other.digest == hashlib.blake2b(b"".join(map(point, wanted)), digest_size=32).hexdigest()


@pytest.mark.parametrize(("mine", "theirs"), [([1, 2], [3, 2, 3]), ([1, 2, 1], [3]), ([5, 1], [5, 5])])
def test_points_that_are_there_twice(tmp_path, mine, theirs):
    with pytest.raises(FederalError, match="the follower has sent points that are the same"):
        join(mine, theirs, tmp_path / "x")
