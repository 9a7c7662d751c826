from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from plait.errors import ConfigError, DataError
from plait.feature_column import (
    DenseFeatures,
    categorical_column_with_identity,
    embedding_column,
    indicator_column,
    numeric_column,
    shared_embedding_columns,
)

ID = categorical_column_with_identity("id", 4)


def weights_of(column):
    return next(DenseFeatures([column]).parameters()).detach()


def test_the_first_values_are_a_cut_off_normal_distribution():
    weights = weights_of(embedding_column(categorical_column_with_identity("id", 4000), 16))
    assert weights.abs().max() <= 0.5
    assert weights.std().item() == pytest.approx(0.25 * 0.88, rel=0.02)


def test_initializers_are_numbers_tensors_and_functions():
    given = torch.arange(8.0).view(4, 2)
    assert weights_of(embedding_column(ID, 2, initializer=given)).tolist() == given.tolist()
    assert weights_of(embedding_column(ID, 2, initializer=0.5)).unique().tolist() == [0.5]
    assert weights_of(embedding_column(ID, 2, initializer=nn.init.ones_)).unique().tolist() == [1.0]


def test_first_values_come_from_a_checkpoint(tmp_path):
    path, given = str(tmp_path / "old.safetensors"), torch.arange(8.0).view(4, 2)
    save_file({"old.table": given}, path)
    column = embedding_column(ID, 2, ckpt_to_load_from=path, tensor_name_in_ckpt="old/table")
    assert weights_of(column).tolist() == given.tolist()
    with pytest.raises(ConfigError, match="one of shape"):
        weights_of(embedding_column(ID, 3, ckpt_to_load_from=path, tensor_name_in_ckpt="old/table"))
    with pytest.raises(ConfigError, match="no variable"):
        weights_of(embedding_column(ID, 2, ckpt_to_load_from=path, tensor_name_in_ckpt="new"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: embedding_column(numeric_column("x"), 2),
        lambda: embedding_column(ID, 0),
        lambda: embedding_column(ID, 2, combiner="max"),
        lambda: embedding_column(ID, 2, max_norm=0),
        lambda: embedding_column(ID, 2, initializer="zeros"),
        lambda: weights_of(embedding_column(ID, 2, initializer=torch.zeros(2, 2))),
        lambda: embedding_column(ID, 2, ckpt_to_load_from="x"),
        lambda: shared_embedding_columns([], 2),
        lambda: shared_embedding_columns([ID, categorical_column_with_identity("b", 5)], 2),
        lambda: indicator_column("id"),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_a_column_with_variables_says_where_it_can_be_looked_up():
    with pytest.raises(DataError, match="input_layer"):
        embedding_column(ID, 2)({"id": [1]})


def test_an_indicator_of_an_id_outside_is_refused():
    with pytest.raises(DataError, match="'id' has the id 4"):
        indicator_column(ID)({"id": [4]})
