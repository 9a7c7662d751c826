from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.errors import DataError
from plait.feature_column.inputs import Ids, Inputs, Ragged, as_raw, dropped
from plait.feature_column.strings import Strings


def test_a_number_an_example_gets_a_column():
    assert as_raw("x", torch.tensor([1, 2])).shape == (2, 1)
    assert as_raw("x", np.array([1.0, 2.0])).shape == (2, 1)
    assert as_raw("x", [1, 2, 3]).shape == (3, 1)
    assert as_raw("x", torch.zeros(2, 3, 4)).shape == (2, 3, 4)


def test_strings_come_in_lists_and_arrays():
    for value in (["a", "b"], ("a", "b"), np.array(["a", "b"]), np.array([b"a", b"b"], object)):
        assert isinstance(as_raw("x", value), Strings)


def test_ragged_rows_are_values_and_offsets():
    raw = as_raw("x", (torch.tensor([5, 6, 7]), torch.tensor([0, 2, 2, 3])))
    assert isinstance(raw, Ragged)
    assert raw.offsets.tolist() == [0, 2, 2, 3]
    assert isinstance(as_raw("x", (["a", "b"], np.array([0, 1, 2]))).values, Strings)


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [0.0, 3.0], [[0, 3]], []])
def test_offsets_that_do_not_fit_are_refused(offsets):
    with pytest.raises(DataError, match="feature 'x': .*offsets"):
        as_raw("x", (torch.tensor([5, 6, 7]), torch.tensor(offsets)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor(3), "single number"),
        ([[1, 2], [3]], "different lengths"),
        ({"a": 1}, "is a dict"),
        (torch.eye(2).to_sparse(), "layout"),
        (None, "NoneType"),
    ],
)
def test_other_values_are_refused(value, words):
    with pytest.raises(DataError, match=words):
        as_raw("x", value)


def test_a_feature_that_is_not_there_is_named():
    with pytest.raises(DataError, match="no feature 'b'; the batch has 'a'"):
        Inputs({"a": [1]}).raw("b")


def test_plain_features_are_taken_as_they_are():
    one, two = torch.tensor([1, 2]), torch.tensor([3, 4])
    found = Inputs({"a": one, "b": two}).plain(["b", "a"])
    assert found[0] is two
    assert found[1] is one


OTHERS = {
    "another type": torch.tensor([1.0, 2.0]),
    "two dimensions": torch.tensor([[1], [2]]),
    "another length": torch.tensor([1]),
    "no dimension": torch.tensor(1),
    "no tensor": [1, 2],
    "a tensor of its own kind": torch.nn.Parameter(torch.tensor([1, 2]), requires_grad=False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_not_plain(name):
    for features in ({"a": torch.tensor([1, 2]), "b": OTHERS[name]}, {"a": OTHERS[name], "b": torch.tensor([1, 2])}):
        assert Inputs(features).plain(["a", "b"]) is None
    assert Inputs({"a": torch.tensor([1, 2])}).plain(["a", None]) is None
    assert Inputs({"a": torch.tensor([], dtype=torch.int64)}).plain(["a"]) is None
    assert Inputs([1, 2]).plain(["a"]) is None


def test_only_missing_values_are_dropped_from_dense_ids():
    ids = dropped(Ids(torch.tensor([[1, -9], [-9, -9], [-1, 2]]), weights=torch.arange(6.0).view(3, 2), missing=-9))
    assert (ids.values.tolist(), ids.offsets.tolist()) == ([1, -1, 2], [0, 1, 1, 3])
    assert ids.weights.tolist() == [0.0, 4.0, 5.0]
    assert dropped(Ids(torch.tensor([[1, 2]]))).offsets.tolist() == [0, 2]


def test_columns_that_come_and_go_are_not_taken_for_each_other():
    inputs = Inputs({"a": [1]})
    assert [inputs.once(object(), lambda _, number=number: number) for number in range(50)] == list(range(50))


def test_numbers_beside_strings_are_refused():
    for mixed in (["1", 2], [1, "2"]):
        with pytest.raises(DataError, match="holds int, str"):
            as_raw("a", mixed)


@pytest.mark.parametrize("far", ["offsets", "weights"])
def test_ids_of_strings_go_where_the_rest_of_the_feature_is(far):
    class Column:
        def ids(self, inputs):
            parts = {"values": torch.tensor([1, 2]), "offsets": torch.tensor([0, 2]), "weights": torch.ones(2)}
            return Ids(**{**parts, far: parts[far].to("meta")})

    found = Inputs({}).ids(Column())
    assert {one.device.type for one in (found.values, found.offsets, found.weights)} == {"meta"}
