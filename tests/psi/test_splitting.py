"""Two secrets whose product is a third."""

from __future__ import annotations

import os

from plait.psi import curve
from plait.psi.splitting import ORDER, clamped, split


def test_a_point_multiplied_by_both_is_multiplied_by_the_secret():
    for number in range(20):
        secret, point = os.urandom(32), curve.hash_to_curve(b"%d" % number)
        first, second = split(secret)
        assert curve.multiply(second, curve.multiply(first, point)) == curve.multiply(secret, point)


def test_also_one_with_a_part_of_low_order():
    """u -> 1/u adds the point (0, 0), whose order is 2."""
    secret, u = os.urandom(32), int.from_bytes(curve.hash_to_curve(b"x"), "little")
    other = pow(u, -1, curve.PRIME).to_bytes(32, "little")
    first, second = split(secret)
    assert curve.multiply(second, curve.multiply(first, other)) == curve.multiply(secret, other)


def test_both_are_numbers_that_x25519_leaves_alone_and_others_each_time():
    secret = os.urandom(32)
    pairs = [split(secret) for _ in range(10)]
    for first, second in pairs:
        assert clamped(second) == int.from_bytes(second, "little")
        assert clamped(first) * clamped(second) % ORDER == clamped(secret) % ORDER
    assert len({part for pair in pairs for part in pair}) == 20


def test_what_x25519_multiplies_by():
    base = (9).to_bytes(32, "little")
    secret = bytes([255] * 32)
    assert curve.multiply(secret, base) == curve.multiply(clamped(secret).to_bytes(32, "little"), base)
    assert clamped(bytes(32)) == 2**254
