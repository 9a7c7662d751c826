"""Points of keys and their multiples, and the program of a process that makes them."""

from __future__ import annotations

import io
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.psi import curve

SCALARS = [bytes([n]) * 32 for n in (1, 77, 255)]


def test_a_vector_of_rfc_7748():
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    wanted = bytes.fromhex("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552")
    assert curve.multiply(scalar, point) == wanted
    assert curve.multiply(scalar, point * 3) == wanted * 3


@settings(max_examples=20)
@given(st.binary(max_size=60))
def test_a_key_has_one_point_on_the_curve_and_the_order_of_secrets_does_not_matter(key):
    point = curve.hash_to_curve(key)
    assert len(point) == curve.POINT_BYTES
    assert curve.is_on_curve(int.from_bytes(point, "little"))
    once = [curve.multiply(scalar, point) for scalar in SCALARS[:2]]
    assert curve.multiply(SCALARS[1], once[0]) == curve.multiply(SCALARS[0], once[1])
    assert all(curve.is_on_curve(int.from_bytes(one, "little")) for one in once)


def test_points_are_what_other_versions_have_made():
    """Both parties have to find the same: the point of a key never changes."""
    found = curve.hash_to_curve(b"\x01\x00\x00\x00a").hex()
    assert found == "55e4dfd4c0a235016c51391c0790c84d4c53041f5c261c177c8cb672c2983178"


def test_points_of_different_keys_differ():
    assert len({curve.hash_to_curve(b"%d" % number) for number in range(200)}) == 200


def test_what_is_on_the_curve_by_euler_too(monkeypatch):
    """gmpy2 and Python's own powers say the same."""
    by_power = [
        pow(u**3 + curve.COEFFICIENT * u**2 + u, (curve.PRIME - 1) // 2, curve.PRIME) == 1 for u in range(2, 60)
    ]
    assert [curve.is_on_curve(u) for u in range(2, 60)] == by_power
    assert 0 < sum(by_power) < 58
    monkeypatch.setitem(__import__("sys").modules, "gmpy2", None)
    jacobi = curve._find_jacobi()
    assert [jacobi(value, 11) for value in range(11)] == [0, 1, -1, 1, 1, 1, -1, -1, -1, 1, -1]


@pytest.mark.parametrize("u", [*curve.LOW_ORDER, curve.PRIME, curve.PRIME + 1])
def test_points_of_low_order_have_no_multiples(u):
    good = curve.hash_to_curve(b"x")
    with pytest.raises(ValueError):
        curve.multiply(SCALARS[0], good + u.to_bytes(32, "little") + good)


def test_the_list_of_them_is_whole():
    """Doubling three times, by the curve's own formula, leads to the point at infinity: z = 0."""

    def double(x, z):
        return (x * x - z * z) ** 2 % curve.PRIME, 4 * x * z * (x * x + curve.COEFFICIENT * x * z + z * z) % curve.PRIME

    for u in curve.LOW_ORDER:
        point = u, 1
        for _ in range(3):
            point = double(*point)
        assert point[1] == 0
    assert len(set(curve.LOW_ORDER)) == 5


def test_keys_are_packed_and_unpacked():
    keys = [b"", b"a", b"b" * 300]
    assert curve.unpack(curve.pack(keys)) == keys


def test_a_process_answers_until_its_orders_end():
    secret, keys = os.urandom(32), [b"a", b"bc"]
    points = b"".join(map(curve.hash_to_curve, keys))
    orders = io.BytesIO(
        secret
        + b"".join(
            struct.pack("<cQ", kind, len(data)) + data
            for kind, data in [(b"H", curve.pack(keys)), (b"M", bytes(32)), (b"M", points)]
        )
    )
    answers = io.BytesIO()
    curve.serve(orders, answers)
    wanted = curve.multiply(secret, points)
    assert answers.getvalue() == b"".join(
        struct.pack("<cQ", kind, len(data)) + data for kind, data in [(b"H", wanted), (b"E", b""), (b"M", wanted)]
    )
