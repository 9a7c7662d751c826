from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from plait.feature_column.fingerprint import fingerprint64, fingerprint_cat64
from plait.feature_column.strings import Strings

from . import cases

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def strings():
    return cases.strings()


@pytest.fixture(scope="module")
def recorded():
    return json.loads(gzip.decompress((HERE / "fingerprints.json.gz").read_bytes()))


def packed(strings):
    return np.frombuffer(b"".join(strings), np.uint8), np.cumsum([0, *map(len, strings)])


def test_fingerprints_of_10000_strings_are_tensorflows(strings, recorded):
    expected = np.frombuffer(bytes.fromhex(recorded["fingerprints"]), "<u8")
    assert len(strings) == len(expected) == 10_000
    assert {len(one) for one in strings} >= set(range(301))
    np.testing.assert_array_equal(fingerprint64(*packed(strings)), expected)


def test_buckets_are_tensorflows(strings, recorded):
    buckets = fingerprint64(*packed(strings)) % np.uint64(cases.BUCKETS)
    assert int(buckets.sum()) == recorded["bucket_sum"]


def test_a_fingerprint_does_not_depend_on_its_neighbours(strings):
    some = strings[::97]
    alone = [int(fingerprint64(*packed([one]))[0]) for one in some]
    assert alone == fingerprint64(*packed(some)).tolist()


def test_no_strings_have_no_fingerprints():
    assert fingerprint64(np.empty(0, np.uint8), np.zeros(1, np.int64)).tolist() == []


def test_more_strings_than_are_worked_on_at_once():
    many = Strings.of([str(number) for number in range(40_000)])
    some = Strings.of([str(number) for number in range(39_990, 40_000)])
    assert many.fingerprints()[-10:].tolist() == some.fingerprints().tolist()


def test_two_fingerprints_in_another_order_are_another():
    one, two = np.array([1], np.uint64), np.array([2], np.uint64)
    assert fingerprint_cat64(one, two) != fingerprint_cat64(two, one)
