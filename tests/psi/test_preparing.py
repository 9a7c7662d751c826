"""A party's own points: every row once, in the order of the points, done once."""

from __future__ import annotations

import contextlib

import pytest

from plait.errors import DataError
from plait.psi import curve, spill
from plait.psi.journal import Journal
from plait.psi.pool import Pool
from plait.psi.preparing import blind, sort_own


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "work", {})


@pytest.fixture
def pool(journal):
    with contextlib.closing(Pool(journal.secret, workers=2)) as made:
        yield made


def keys(ids, asked=None):
    for one in ids:
        yield lambda one=one: (asked.append(one) if asked is not None else None) or one.encode()


@pytest.mark.parametrize("rows_in_a_bucket", [1000, 10])
def test_points_in_order_with_their_rows(journal, pool, monkeypatch, rows_in_a_bucket):
    monkeypatch.setattr(spill, "BUCKET_ROWS", rows_in_a_bucket)
    ids, said = [f"id {number}" for number in range(55)], []
    blind(keys(ids), journal, pool, 10, said.append)
    assert said == [0, 10, 20, 30, 40, 50, 55]
    own = sort_own(journal, 10, "error")
    assert (own.count, own.batches, own.size(5)) == (55, 6, 5)
    points = b"".join(own.read(number) for number in range(own.batches))
    found = [points[at : at + 32] for at in range(0, len(points), 32)]
    assert found == sorted(found)
    made = [curve.multiply(journal.secret, curve.hash_to_curve(one.encode())) for one in ids]
    assert [made[row] for row in own.row_numbers()] == found


def test_what_is_done_is_passed_over(journal, pool):
    ids = [f"id {number}" for number in range(35)]
    blind(keys(ids[:20]), journal, pool, 10, lambda _: None)
    asked = []
    blind(keys(ids, asked), journal, pool, 10, lambda _: None)
    assert asked == ids[20:]
    assert sort_own(journal, 10, "error").count == 35
    assert sort_own(journal, 10, "error").count == 35


def test_no_rows(journal, pool):
    blind(keys([]), journal, pool, 10, lambda _: None)
    own = sort_own(journal, 10, "error")
    assert (own.count, own.batches) == (0, 0)


def test_duplicates(journal, pool):
    blind(keys(["a", "b", "c", "b", "a", "b"]), journal, pool, 2, lambda _: None)
    with pytest.raises(DataError, match=r"rows \d and \d have the same key, and 2 more are repeated.*'first'"):
        sort_own(journal, 2, "error")
    own = sort_own(journal, 2, "first")
    assert sorted(own.row_numbers().tolist()) == [0, 1, 2]
