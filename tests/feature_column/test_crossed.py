from __future__ import annotations

import pytest
import torch

from plait.errors import ConfigError, DataError
from plait.feature_column import (
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_list,
    crossed_column,
    weighted_categorical_column,
)
from plait.feature_column.inputs import Inputs


def test_every_combination_has_an_id():
    features = {"a": [["x", "y"]], "b": (["p", "q", "r"], torch.tensor([0, 3]))}
    ids = crossed_column(["a", "b"], 10**9).ids(Inputs(features))
    single = [
        crossed_column(["a", "b"], 10**9).ids(Inputs({"a": [a], "b": ([b], torch.tensor([0, 1]))})).values.tolist()[0]
        for b in "pqr"
        for a in "xy"
    ]
    assert ids.offsets.tolist() == [0, 6]
    assert ids.values.tolist() == single


def test_a_row_without_values_has_no_ids():
    ids = crossed_column(["a", "b"], 10).ids(
        Inputs({"a": ["x", "y"], "b": (torch.tensor([7]), torch.tensor([0, 0, 1]))})
    )
    assert ids.offsets.tolist() == [0, 0, 1]


def test_what_is_missing_is_left_out_and_what_is_unknown_is_not():
    column = crossed_column([categorical_column_with_vocabulary_list("a", ["x"]), "b"], 10)
    ids = column.ids(Inputs({"a": ["x", "", "?"], "b": [1, 1, 1]}))
    assert ids.offsets.tolist() == [0, 1, 1, 2]


def test_another_key_gives_other_ids():
    features = {"a": ["x"], "b": ["y"]}
    one, two = (crossed_column(["a", "b"], 10**9, hash_key=key).ids(Inputs(features)).values for key in (None, 7))
    assert one.tolist() != two.tolist()


def test_an_empty_batch_is_crossed():
    empty = (torch.empty(0, dtype=torch.int64), torch.tensor([0]))
    assert crossed_column(["a", "b"], 10).ids(Inputs({"a": empty, "b": empty})).values.tolist() == []


@pytest.mark.parametrize(
    "keys",
    [
        "ab",
        ["a"],
        ["a", 3],
        ["a", categorical_column_with_hash_bucket("b", 10)],
        ["a", weighted_categorical_column(categorical_column_with_identity("b", 3), "w")],
    ],
)
def test_what_cannot_be_crossed_is_refused(keys):
    with pytest.raises(ConfigError, match="crossed_column"):
        crossed_column(keys, 10)
    with pytest.raises(ConfigError, match="hash_bucket_size is 0"):
        crossed_column(["a", "b"], 0)


def test_numbers_with_fractions_are_refused():
    with pytest.raises(DataError, match="whole numbers"):
        crossed_column(["a", "b"], 10).ids(Inputs({"a": torch.tensor([1.5]), "b": ["x"]}))


@pytest.mark.parametrize("other", [[1], (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 3]))])
def test_features_of_different_lengths_are_refused(other):
    with pytest.raises(DataError, match="cross 'a_X_b'"):
        crossed_column(["a", "b"], 10).ids(Inputs({"a": ["x", "y"], "b": other}))
