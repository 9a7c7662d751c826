from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.parcels import pack, unpack
from plait.errors import DataError


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)
    elif isinstance(one, (np.ndarray, np.generic)):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            same(first, second)
    elif isinstance(one, float) and math.isnan(one):
        assert math.isnan(other)
    else:
        assert one == other


KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
VALUES = [
    *[torch.arange(6).to(kind).reshape(2, 3) for kind in KINDS],
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.arange(6).reshape(2, 3).T,
    torch.ones(2, requires_grad=True),
    torch.tensor([1 + 2j]).conj(),
    np.arange(6, dtype=np.int16).reshape(3, 2).T,
    np.array(7.0),
    np.empty((0, 3), np.float32),
    np.array(["a", "bcd"]),
    np.array([1, 2], ">i4"),
    np.int64(3),
    np.float32("nan"),
    np.bool_(True),
    np.str_("word"),
    np.datetime64("2020-01-01"),
    b"",
    b"\0\xff",
    bytearray(b"abc"),
    ...,
    None,
    "a name that is no text \udcff",
    2**100,
    -0.0,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_what_went_in_comes_out(value):
    found = unpack(pack([value, {"x": (value, 1)}]))
    plain = value.detach() if isinstance(value, torch.Tensor) else value
    same(found, [plain, {"x": (plain, 1)}])


def test_a_view_of_memory_becomes_bytes():
    assert unpack(pack(memoryview(b"abc"))) == b"abc"


def test_what_comes_out_may_be_written_into():
    array, tensor = unpack(pack([np.zeros(2), torch.zeros(2)]))
    array += 1
    tensor += 1
    assert array.tolist() == tensor.tolist() == [1, 1]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_any_tree(tree):
    same(unpack(pack(tree)), tree)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.array([object()]),
        np.zeros(2, [("a", "i4")]),
        {1, 2},
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.nn.Parameter(torch.zeros(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_named(value):
    with pytest.raises(DataError, match=f"a sample has a {type(value).__name__}, which one process cannot give"):
        pack([value])
