"""Arrays of points: what is refused, and their order."""

from __future__ import annotations

import numpy as np
import pytest

from plait.errors import FederalError
from plait.psi import curve, points
from plait.psi.points import as_points, check, check_rising, leading, order, same_as_next


def good(count=20):
    return as_points(b"".join(curve.hash_to_curve(b"%d" % number) for number in range(count)))


def put(u, at=7):
    found = good().copy()
    found[at] = np.frombuffer(u.to_bytes(32, "little"), np.uint8)
    return found


def test_good_ones_pass():
    check(good(), "they")
    check(good(0), "none")


@pytest.mark.parametrize("u", [u for u in curve.LOW_ORDER if u < curve.LARGEST])
def test_low_order(u):
    with pytest.raises(FederalError, match="they hold a point of low order"):
        check(put(u), "they")


@pytest.mark.parametrize(
    "u", [curve.LARGEST, curve.PRIME - 2, curve.PRIME, curve.PRIME + 18, 2**255, 2**255 + 9, 2**256 - 1]
)
def test_numbers_that_are_too_large(u):
    with pytest.raises(FederalError, match="not below 2\\^255 - 2\\^32"):
        check(put(u), "they")


def test_the_largest_number_passes(monkeypatch):
    monkeypatch.setattr(points, "SAMPLED", 0)
    check(put(curve.LARGEST - 1), "they")


def test_points_of_the_twist():
    """Of random bytes, half are: a batch of them is found out."""
    twisted = next(u for u in range(2, 50) if not curve.is_on_curve(u))
    with pytest.raises(FederalError, match="not on the curve"):
        check(as_points(twisted.to_bytes(32, "little") * 20), "they")


def test_order_is_that_of_bytes():
    found = good(200)
    wanted = sorted(bytes(row) for row in found)
    assert [bytes(row) for row in found[order(found)]] == wanted
    assert [int(number) for number in leading(found[:2])] == [
        int.from_bytes(found[n, :8].tobytes(), "big") for n in (0, 1)
    ]


def test_order_of_points_that_begin_alike():
    found = np.zeros((6, 40), np.uint8)
    found[:, 31] = [5, 1, 4, 1, 0, 9]
    found[:, 39] = range(6)
    assert found[order(found)][:, 39].tolist() == [4, 1, 3, 2, 0, 5]
    assert same_as_next(found[order(found)]).tolist() == [False, True, False, False, False]


def test_rising():
    found = good()[order(good())]
    check_rising(found, None, "they")
    check_rising(found[10:], found[:10], "they")
    check_rising(found[:0], None, "they")
    for wrong, before in [(found[::-1], None), (found[[0, 0]], None), (found[:5], found[:5]), (found[9:], found[:10])]:
        with pytest.raises(FederalError, match="they repeat points"):
            check_rising(wrong, before, "they")
