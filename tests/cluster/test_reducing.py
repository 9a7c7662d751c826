"""One value of what every worker has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster.reducing import combined
from plait.errors import ConfigError


@pytest.mark.parametrize(
    ("how", "expected"), [("sum", 6), ("mean", 2.0), ("min", 1), ("max", 3), ("concat", [2, 1, 3])]
)
def test_numbers(how, expected):
    found = combined([2, 1, 3], how)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("how", "expected"), [("sum", [5, 0]), ("mean", [2.5, 0]), ("min", [1, -2]), ("max", [4, 2])])
def test_tensors_element_by_element(how, expected):
    assert combined([torch.tensor([1, 2]), torch.tensor([4, -2])], how).tolist() == expected


def test_tensors_joined_in_the_order_of_workers():
    assert combined([torch.tensor([[1], [2]]), torch.tensor([[3]])], "concat").tolist() == [[1], [2], [3]]


def test_single_numbers_in_tensors_are_joined_to_a_list():
    assert combined([torch.tensor(1), torch.tensor(2)], "concat").tolist() == [1, 2]


def test_nestings_keep_their_form():
    values = [{"a": [1, {"b": torch.tensor(2.0)}], "c": 5}, {"a": [3, {"b": torch.tensor(4.0)}], "c": 7}]
    assert combined(values, "sum") == {"a": [4, {"b": torch.tensor(6.0)}], "c": 12}


def test_lists_are_joined_and_dicts_keep_their_keys():
    assert combined([{"a": [1], "b": 2}, {"a": [3, 4], "b": 5}], "concat") == {"a": [1, 3, 4], "b": [2, 5]}


def test_tuples_come_back_as_lists():
    assert combined([(1, 2), (3, 4)], "max") == [3, 4]
    assert combined([(1,), (2,)], "concat") == [1, 2]


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6))
def test_the_order_of_additions_is_that_of_workers(numbers):
    expected = torch.tensor(numbers[0])
    for number in numbers[1:]:
        expected = expected + torch.tensor(number)
    assert combined([torch.tensor(number) for number in numbers], "sum").equal(expected)


def test_the_values_are_left_as_they_were():
    values = [torch.ones(2), torch.ones(2)]
    combined(values, "sum")
    assert [value.tolist() for value in values] == [[1, 1], [1, 1]]


def test_lists_of_different_lengths_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        combined([[1, 2], [3]], "sum")


def test_an_unknown_way_is_named():
    with pytest.raises(ConfigError, match="reduce: how='median'; write 'sum', 'mean', 'min', 'max' or 'concat'"):
        combined([1], "median")
