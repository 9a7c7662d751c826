from __future__ import annotations

import pytest
import torch

from plait.errors import ConfigError, DataError
from plait.feature_column import (
    CategoricalColumn,
    DenseColumn,
    DenseFeatures,
    FeatureColumn,
    LinearModel,
    bucketized_column,
    crossed_column,
    embedding_column,
    indicator_column,
    numeric_column,
)
from plait.feature_column.inputs import Ids


def test_columns_compare_by_what_they_are_made_of():
    assert bucketized_column(numeric_column("x"), [1, 2]) == bucketized_column(numeric_column("x"), [1, 2])
    assert numeric_column("x") != numeric_column("x", dtype=torch.float64)
    assert len({numeric_column("x"), numeric_column("x"), numeric_column("y")}) == 2


def test_names_are_tensorflows():
    age = numeric_column("age")
    buckets = bucketized_column(age, [18])
    assert [age.name, buckets.name, crossed_column([buckets, "city"], 10).name] == [
        "age", "age_bucketized", "age_bucketized_X_city",
    ]  # fmt: skip


def test_a_dense_column_is_a_function_of_features():
    assert numeric_column("x", shape=2)({"x": [[1, 2], [3, 4]]}).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert bucketized_column(numeric_column("x"), [0])({"x": [-1.0, 0.0]}).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_not_a_number_is_in_the_last_bucket():
    found = bucketized_column(numeric_column("x"), [0.0, 1.0])({"x": torch.tensor([torch.nan])})
    assert found.tolist() == [[0.0, 0.0, 1.0]]


def test_gradients_pass_through_numbers():
    x = torch.ones(2, requires_grad=True)
    numeric_column("x", normalizer_fn=lambda value: value * 3)({"x": x}).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: numeric_column("x", shape=()),
        lambda: numeric_column("x", shape=(0,)),
        lambda: numeric_column("x", dtype="string"),
        lambda: numeric_column("x", dtype="nonsense"),
        lambda: numeric_column("x", normalizer_fn=3),
        lambda: numeric_column("x", shape=(2,), default_value=[1.0, 2.0, 3.0]),
        lambda: bucketized_column(numeric_column("x"), []),
        lambda: bucketized_column(numeric_column("x"), [2, 1]),
        lambda: bucketized_column(numeric_column("x", shape=(2, 2)), [1]),
        lambda: bucketized_column("x", [1]),
        lambda: bucketized_column(numeric_column("x"), "123"),
        lambda: bucketized_column(numeric_column("x"), None),
        lambda: numeric_column(3),
        lambda: indicator_column(numeric_column("x")),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("value", [["a"], (torch.tensor([1.0]), torch.tensor([0, 1])), torch.zeros(2, 3)])
def test_other_shapes_and_kinds_are_refused(value):
    with pytest.raises(DataError, match="'x'"):
        numeric_column("x")({"x": value})


@pytest.mark.parametrize("function", [lambda value: value.sum(), lambda value: value[:1], lambda value: None])
def test_a_normalizer_keeps_the_rows(function):
    with pytest.raises(DataError, match="normalizer_fn of 'x'"):
        numeric_column("x", normalizer_fn=function)({"x": torch.ones(2)})


class Hour(CategoricalColumn):
    """A column of one's own: the hour of a time in seconds."""

    name, num_buckets = "hour", 24

    def ids(self, inputs):
        return Ids(inputs.raw("time").long() // 3600 % 24)


class Length(DenseColumn):
    """A column of one's own: how many letters a word has."""

    name, width = "length", 1

    def dense(self, inputs):
        return torch.from_numpy(inputs.raw("word").lengths()).float()[:, None]


def test_columns_of_ones_own_stand_beside_the_others():
    features = {"time": torch.tensor([3600, 90_000]), "word": ["Oslo", ""]}
    module = DenseFeatures([Length(), indicator_column(Hour()), embedding_column(Hour(), 2)])
    found = module(features)
    assert [column.name for column in module.columns] == ["hour_embedding", "hour_indicator", "length"]
    assert torch.equal(found[0, :2], found[1, :2])
    assert found[:, 3].tolist() == [1.0, 1.0]
    assert found[:, -1].tolist() == [4.0, 0.0]
    assert LinearModel([Hour(), Length()])(features).shape == (2, 1)
    assert all(isinstance(column, FeatureColumn) for column in module.columns)
