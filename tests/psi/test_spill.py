"""Buckets: all rows, each once, bucket by bucket in the order of their first bits."""

from __future__ import annotations

import numpy as np
import pytest

from plait.psi import spill
from plait.psi.spill import bits_for, buckets


@pytest.fixture
def rows():
    return np.random.default_rng(0).integers(0, 256, (500, 40), np.uint8)


@pytest.mark.parametrize("bits", [0, 1, 3, 8])
def test_every_row_is_in_its_bucket(rows, bits, tmp_path):
    directory = tmp_path / "spilled"
    directory.mkdir()
    (directory / "0000.bin").write_bytes(b"left by somebody who was killed")
    found = list(buckets((rows[at : at + 70] for at in range(0, 500, 70)), 40, bits, directory))
    assert len(found) == 1 << bits
    for number, bucket in enumerate(found):
        assert bits == 0 or (bucket[:, 0] >> (8 - bits) == number).all()
    assert sorted(map(bytes, np.concatenate(found))) == sorted(map(bytes, rows))
    assert bits == 0 or not directory.exists()


def test_rows_of_a_bucket_stay_in_order(tmp_path):
    rows = np.zeros((50, 40), np.uint8)
    rows[:, 0], rows[:, 39] = np.arange(50) % 2 * 255, np.arange(50)
    assert [bucket[:, 39].tolist() for bucket in buckets([rows[:30], rows[30:]], 40, 1, tmp_path / "x")] == [
        list(range(0, 50, 2)),
        list(range(1, 50, 2)),
    ]


def test_no_rows(tmp_path):
    assert [len(bucket) for bucket in buckets([], 32, 1, tmp_path / "x")] == [0, 0]


def test_bits(monkeypatch):
    monkeypatch.setattr(spill, "BUCKET_ROWS", 100)
    assert [bits_for(rows) for rows in (0, 1, 100, 101, 200, 201, 400, 401, 10**9)] == [0, 0, 0, 1, 1, 2, 2, 3, 12]
