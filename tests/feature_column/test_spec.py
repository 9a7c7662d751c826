from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.data.example import make_example
from plait.data.tfrecord import TFRecordWriter, read_records
from plait.errors import ConfigError, DataError
from plait.feature_column import (
    DenseFeatures,
    FixedLenFeature,
    VarLenFeature,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    embedding_column,
    indicator_column,
    make_parse_example_spec,
    numeric_column,
    parse_example,
)
from plait.feature_column.spec import as_dtype

RECORDS = [
    make_example({"x": [1.0, 2.0], "id": [3, 4], "word": ["a", "東京"]}),
    make_example({"id": [1]}),
]
COLUMNS = [
    numeric_column("x", shape=2, default_value=0.5),
    embedding_column(categorical_column_with_identity("id", 5), 2),
    indicator_column(categorical_column_with_hash_bucket("word", 7)),
]


def test_records_become_features_that_columns_take():
    features = parse_example(RECORDS, make_parse_example_spec(COLUMNS))
    assert features["x"].tolist() == [[1.0, 2.0], [0.5, 0.5]]
    assert features["id"].values.tolist() == [3, 4, 1]
    assert features["word"].values.tolist() == [b"a", "東京".encode()]
    assert features["word"].offsets.tolist() == [0, 2, 2]
    found = DenseFeatures(COLUMNS)(features)
    assert found.shape == (2, 11)
    assert found[:, 2:9].sum(1).tolist() == [2.0, 0.0]


def test_a_file_of_records_is_read_in_batches(tmp_path):
    path = tmp_path / "data.tfrecord"
    with TFRecordWriter(path) as writer:
        for record in RECORDS:
            writer.write(record)
    features = parse_example(read_records(path), make_parse_example_spec(COLUMNS))
    assert features["id"].offsets.tolist() == [0, 2, 3]


def test_strings_of_fixed_length_keep_their_shape():
    found = parse_example(RECORDS[:1], {"word": FixedLenFeature([2], "string")})["word"]
    assert (found.shape, found.tolist()) == ((1, 2), [b"a", "東京".encode()])
    filled = parse_example(RECORDS, {"word": FixedLenFeature([2], str, default_value="?")})["word"]
    assert filled.tolist()[2:] == [b"?", b"?"]


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        (FixedLenFeature([2], torch.float32), "record 1 of the batch has 0 values of 'x', not 2; give its column"),
        (FixedLenFeature([3], torch.float32, 0.0), "record 0 of the batch has 2 values"),
        (VarLenFeature("string"), "is float32 in a record"),
    ],
)
def test_records_that_do_not_fit_are_refused(feature, words):
    with pytest.raises(DataError, match=words):
        parse_example(RECORDS, {"x": feature})


def test_columns_that_disagree_are_refused():
    with pytest.raises(ConfigError, match="got 'x'; give a list of columns"):
        make_parse_example_spec(["x"])
    with pytest.raises(ConfigError, match="two columns want 'x'"):
        make_parse_example_spec([numeric_column("x"), categorical_column_with_identity("x", 3)])


def test_types_are_written_in_many_ways():
    assert {as_dtype(kind) for kind in (str, bytes, "string")} == {"string"}
    assert {as_dtype(kind) for kind in (torch.int64, np.int64, "int64", int, np.dtype("int64"))} == {torch.int64}
    with pytest.raises(ConfigError, match="nonsense"):
        as_dtype("nonsense")
