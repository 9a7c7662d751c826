from __future__ import annotations

import pytest
import torch

from plait.errors import ConfigError, DataError
from plait.feature_column import (
    DenseFeatures,
    SequenceFeatures,
    categorical_column_with_identity,
    embedding_column,
    indicator_column,
    sequence_categorical_column_with_hash_bucket,
    sequence_categorical_column_with_identity,
    sequence_categorical_column_with_vocabulary_file,
    sequence_categorical_column_with_vocabulary_list,
    sequence_numeric_column,
)

ITEMS = sequence_categorical_column_with_identity("items", 4)
FEATURES = {
    "items": (torch.tensor([1, 3, 0]), torch.tensor([0, 2, 2, 3])),
    "words": (["a", "?", "b"], torch.tensor([0, 2, 2, 3])),
    "prices": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3])),
}


def test_lists_become_places_with_lengths():
    words = sequence_categorical_column_with_vocabulary_list("words", ["a", "b"])
    module = SequenceFeatures(
        [embedding_column(ITEMS, 2), sequence_numeric_column("prices", default_value=-1.0), indicator_column(words)]
    )
    found, lengths = module(FEATURES)
    rows = module.get_parameter("items_embedding.embedding_weights")
    assert found.shape == (3, 2, 5)
    assert lengths.tolist() == [2, 0, 1]
    assert torch.equal(found[0, :, :2], rows[[1, 3]])
    assert found[:, :, 2].tolist() == [[1.0, 2.0], [-1.0, -1.0], [3.0, -1.0]]
    assert found[0, :, 3:].tolist() == [[1.0, 0.0], [0.0, 0.0]], "an unknown word keeps its place"
    found.sum().backward()
    assert rows.grad[:, 0].tolist() == [1.0, 1.0, 0.0, 1.0]


def test_numbers_may_have_a_shape_and_be_normalised():
    column = sequence_numeric_column("x", shape=2, normalizer_fn=lambda value: value * 10)
    found, lengths = SequenceFeatures([column])({"x": (torch.arange(6), torch.tensor([0, 4, 6]))})
    assert found.tolist() == [[[0.0, 10.0], [20.0, 30.0]], [[40.0, 50.0], [0.0, 0.0]]]
    assert lengths.tolist() == [2, 1]
    dense, _ = SequenceFeatures([column])({"x": torch.arange(8).view(2, 4)})
    assert dense.shape == (2, 2, 2)


def test_strings_and_files_make_sequences(tmp_path):
    (tmp_path / "words").write_text("a\nb\n")
    filed = sequence_categorical_column_with_vocabulary_file("words", str(tmp_path / "words"))
    hashed = sequence_categorical_column_with_hash_bucket("words", 7)
    assert SequenceFeatures(indicator_column(filed))(FEATURES)[0][2, 0].tolist() == [0.0, 1.0]
    assert SequenceFeatures(indicator_column(hashed))(FEATURES)[0].sum().item() == 3.0


def test_lists_of_different_lengths_are_refused():
    other = {**FEATURES, "prices": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 2, 3]))}
    with pytest.raises(DataError, match="'prices' has lists of other lengths than 'items_embedding'"):
        SequenceFeatures([embedding_column(ITEMS, 2), sequence_numeric_column("prices")])(other)
    with pytest.raises(DataError, match="do not consist of"):
        SequenceFeatures([sequence_numeric_column("prices", shape=2)])(FEATURES)
    with pytest.raises(DataError, match="takes numbers"):
        SequenceFeatures([sequence_numeric_column("words")])(FEATURES)


def test_each_kind_of_column_has_its_layer():
    with pytest.raises(ConfigError, match="no sequence"):
        SequenceFeatures([embedding_column(categorical_column_with_identity("items", 4), 2)])
    with pytest.raises(DataError, match="give it to SequenceFeatures"):
        DenseFeatures([embedding_column(ITEMS, 2)])(FEATURES)
    with pytest.raises(ConfigError, match="sequence_numeric_column"):
        sequence_numeric_column("x", shape=())
