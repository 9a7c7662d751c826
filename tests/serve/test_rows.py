from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from plait.errors import DataError
from plait.serve.rows import Table, read_rows


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, unique=True), st.data())
def test_rows_come_as_they_are_asked_for(keys, data):
    table = Table({"id": np.array(keys), "x": np.array(keys) * 2, "y": np.array([keys, keys]).T})
    assert len(table) == len(keys)
    asked = np.array(data.draw(st.lists(st.sampled_from(keys))), np.int64)
    found = table(asked)
    assert set(found) == {"x", "y"}
    np.testing.assert_array_equal(found["x"], asked * 2)
    np.testing.assert_array_equal(found["y"], np.stack([asked, asked], 1))


@pytest.mark.parametrize("keys", [[4], [1, 2, 5], [0], [-(2**60)], [2**60]])
def test_a_key_that_is_not_there(keys):
    table = Table({"id": np.array([1, 2, 3])})
    with pytest.raises(LookupError):
        table(np.array(keys))


def test_no_rows_at_all():
    table = Table({"id": np.zeros(0, np.int64), "x": np.zeros((0, 3))})
    assert table(np.zeros(0, np.int64))["x"].shape == (0, 3)
    with pytest.raises(LookupError):
        table(np.array([1]))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({}, "rows has nothing: give whole numbers as 'id'"),
        ({"x": np.zeros(3)}, "rows has x"),
        ({"id": np.zeros(3)}, "give whole numbers"),
        ({"id": np.zeros((3, 1), np.int64)}, "one for each row"),
        ({"id": np.arange(3), "x": np.zeros(2)}, "rows has 3 of 'id' and"),
        ({"id": np.array([1, 2, 1])}, "the same 'id' twice"),
    ],
)
def test_columns_that_are_no_table(columns, text):
    with pytest.raises(DataError, match=text):
        Table(columns)


def test_a_file(tmp_path):
    path = tmp_path / "rows.safetensors"
    save_file({"customer": np.arange(3), "x": np.eye(3, dtype="f4")}, path)
    np.testing.assert_array_equal(read_rows(path, "customer")(np.array([2, 0]))["x"], np.eye(3)[[2, 0]])
    with pytest.raises(DataError, match=r"rows.safetensors: rows has customer, x: give whole numbers as 'id'"):
        read_rows(path)
    save_torch({"id": torch.arange(3), "x": torch.zeros(3, 2, dtype=torch.bfloat16)}, path)
    with pytest.raises(DataError, match="cannot be read: .*bfloat16"):
        read_rows(path)
    path.write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path / "none")
