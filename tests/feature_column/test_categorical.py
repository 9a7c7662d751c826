from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.errors import ConfigError, DataError
from plait.feature_column import (
    Strings,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
    indicator_column,
    numeric_column,
    weighted_categorical_column,
)
from plait.feature_column.inputs import Inputs

WORDS = ["Oslo", "東京", "", "köln"]


def ids_of(column, value, key="word"):
    return column.ids(Inputs({key: value}))


@pytest.mark.parametrize(
    "given",
    [np.array(WORDS, object), np.array(WORDS), [word.encode() for word in WORDS], Strings.of(WORDS),
     Strings("".join(WORDS).encode(), [0, 4, 10, 10, 15])],
)  # fmt: skip
def test_all_forms_of_strings_have_the_same_ids(given):
    hashed = categorical_column_with_hash_bucket("word", 1000)
    listed = categorical_column_with_vocabulary_list("word", ["köln", b"Oslo"], num_oov_buckets=1)
    assert ids_of(hashed, given).values.tolist() == ids_of(hashed, WORDS).values.tolist()
    assert ids_of(listed, given).values[[0, 1, 3]].tolist() == [[1], [2], [0]]


def test_whole_numbers_of_any_width_are_ids():
    column = categorical_column_with_identity("id", 300)
    assert ids_of(column, torch.tensor([1, 255], dtype=torch.uint8), "id").values.dtype is torch.int64
    assert ids_of(column, torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), "id").values.tolist() == [[1, 2], [3, 4]]


def test_a_vocabulary_may_be_read_later(tmp_path):
    path = tmp_path / "words.txt"
    column = categorical_column_with_vocabulary_file("word", str(path))
    path.write_text("Oslo\nköln\n", encoding="utf-8")
    assert column.num_buckets == 2
    assert ids_of(column, ["köln", "Bonn"]).values.tolist() == [[1], [-1]]


@pytest.mark.parametrize(
    ("lines", "options", "error", "words"),
    [
        ("a\nb\na\n", {}, ConfigError, "twice"),
        ("a\n", {"vocabulary_size": 2}, ConfigError, "has 1 lines"),
        ("a\n", {"dtype": "int64"}, DataError, "no whole number"),
        ("", {}, ConfigError, "empty"),
        (None, {}, DataError, "cannot be read"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, lines, options, error, words):
    path = tmp_path / "words.txt"
    if lines is not None:
        path.write_text(lines, encoding="utf-8")
    with pytest.raises(error, match=words):
        categorical_column_with_vocabulary_file("word", str(path), **options).num_buckets  # noqa: B018 - it reads


@pytest.mark.parametrize(
    "make",
    [
        lambda: categorical_column_with_identity("id", 0),
        lambda: categorical_column_with_identity("id", 3, default_value=3),
        lambda: categorical_column_with_hash_bucket("id", 0),
        lambda: categorical_column_with_hash_bucket("id", 5, dtype=torch.float32),
        lambda: categorical_column_with_vocabulary_list("id", []),
        lambda: categorical_column_with_vocabulary_list("id", ["a", "a"]),
        lambda: categorical_column_with_vocabulary_list("id", ["a", 1]),
        lambda: categorical_column_with_vocabulary_list("id", ["a"], dtype="int64"),
        lambda: categorical_column_with_vocabulary_list("id", ["a"], default_value=0, num_oov_buckets=1),
        lambda: categorical_column_with_vocabulary_list("id", ["a"], num_oov_buckets=-1),
        lambda: categorical_column_with_vocabulary_file("id", ""),
        lambda: categorical_column_with_vocabulary_file("id", "x", vocabulary_size=0),
        lambda: weighted_categorical_column(numeric_column("x"), "w"),
        lambda: weighted_categorical_column(categorical_column_with_identity("id", 2), "w", dtype=str),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (categorical_column_with_identity("id", 5), torch.tensor([1.0])),
        (categorical_column_with_identity("id", 5), ["a"]),
        (categorical_column_with_hash_bucket("id", 5), torch.tensor([1])),
        (categorical_column_with_hash_bucket("id", 5, dtype=int), ["a"]),
        (categorical_column_with_vocabulary_list("id", ["a"]), torch.tensor([1])),
        (categorical_column_with_vocabulary_list("id", [1]), ["a"]),
    ],
)
def test_values_of_another_kind_are_refused(column, value):
    with pytest.raises(DataError, match="'id'"):
        ids_of(column, value, "id")


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        (torch.tensor([1, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        ((torch.tensor([1, 2]), torch.tensor([0, 1, 2])), torch.tensor([1.0, 2.0])),
        ((torch.tensor([1, 2]), torch.tensor([0, 1, 2])), (torch.tensor([1.0, 2.0]), torch.tensor([0, 0, 2]))),
        (torch.tensor([1, 2]), ["a", "b"]),
    ],
)
def test_weights_that_are_elsewhere_are_refused(ids, weights):
    column = weighted_categorical_column(categorical_column_with_identity("id", 5), "w")
    with pytest.raises(DataError, match="weight"):
        column.ids(Inputs({"id": ids, "w": weights}))


def test_weights_of_missing_values_do_not_count():
    column = indicator_column(weighted_categorical_column(categorical_column_with_identity("id", 3), "w"))
    found = column({"id": torch.tensor([[0, -1], [2, 2]]), "w": torch.tensor([[1.0, 9.0], [2.0, 3.0]])})
    assert found.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 5.0]]


@pytest.mark.parametrize(
    "column",
    [
        categorical_column_with_identity("id", 5),
        categorical_column_with_hash_bucket("id", 5),
        categorical_column_with_hash_bucket("id", 5, dtype=int),
        categorical_column_with_vocabulary_list("id", ["a"], num_oov_buckets=1),
        categorical_column_with_vocabulary_list("id", [1]),
    ],
)
def test_an_empty_list_is_a_batch_of_any_kind(column):
    assert ids_of(column, [], "id").values.shape == (0, 1)
    nothing = ids_of(column, ([], torch.tensor([0, 0, 0])), "id")
    assert (nothing.values.tolist(), nothing.offsets.tolist()) == ([], [0, 0, 0])


def test_sizes_may_be_numpys():
    assert categorical_column_with_identity("id", np.int64(5)).num_buckets == 5
    assert type(categorical_column_with_hash_bucket("id", np.int32(5)).num_buckets) is int
