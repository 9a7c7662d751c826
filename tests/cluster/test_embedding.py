from __future__ import annotations

import pytest
import torch

from plait.cluster.embedding import SparseEmbedding
from plait.errors import ConfigError


def test_rows_have_the_shape_of_their_ids():
    assert SparseEmbedding(3)(torch.tensor([[1, -(2**62)], [7, 1]])).shape == (2, 2, 3)


def test_a_row_begins_with_numbers_of_its_own_id():
    table = SparseEmbedding(4, scale=1.0)
    alone, among = table(torch.tensor([5])), table(torch.tensor([9, 5]))
    assert torch.equal(alone[0], among[1])
    assert not torch.equal(among[0], among[1])


def test_another_seed_gives_other_rows():
    ids = torch.tensor([5])
    assert not torch.equal(SparseEmbedding(4, seed=1)(ids), SparseEmbedding(4, seed=2)(ids))


def test_the_parameter_has_no_rows_and_is_reached_by_the_loss():
    table = SparseEmbedding(4)
    rows = table(torch.tensor([1]))
    rows.sum().backward()
    assert table.weight.shape == (0, 4)
    assert rows.requires_grad


@pytest.mark.parametrize("wrong", [{"dim": 0}, {"dim": 2, "initializer": "ones"}, {"dim": 2, "scale": -1.0}])
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match="SparseEmbedding"):
        SparseEmbedding(**wrong)
