from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.errors import DataError
from plait.feature_column import categorical_column_with_identity
from plait.feature_column.inputs import Inputs
from plait.feature_column.pooling import Pool, Separate, bags_of
from plait.feature_column.tables import Stack, Table

COLUMNS = [categorical_column_with_identity("a", 4), categorical_column_with_identity("b", 5)]


def pool(combiner="mean"):
    tables = [Table(column.num_buckets, 3, "rows", nn.init.normal_, trainable=True, sparse=False) for column in COLUMNS]
    return Pool(COLUMNS, tables, Stack(tables), combiner), tables


DENSE = {"a": torch.tensor([1, 3]), "b": torch.tensor([4, 0])}
MISSING = {"a": torch.tensor([1, -1]), "b": torch.tensor([4, 0])}
RAGGED = {"a": (torch.tensor([1, 3, 0]), torch.tensor([0, 3, 3])), "b": torch.tensor([[4, 0], [2, -1]])}


@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize("features", [DENSE, MISSING, RAGGED])
def test_together_is_the_same_as_each_alone(features, combiner):
    together, tables = pool(combiner)
    alone = [Separate(*pair, combiner)(Inputs(features)) for pair in zip(COLUMNS, tables, strict=True)]
    torch.testing.assert_close(together.each(Inputs(features)), torch.cat(alone, 1))
    torch.testing.assert_close(together.total(Inputs(features)), alone[0] + alone[1])


def test_a_batch_is_left_as_it_was():
    pool()[0].each(Inputs(DENSE))
    assert (DENSE["a"].tolist(), DENSE["b"].tolist()) == ([1, 3], [4, 0])


def test_an_empty_batch_has_no_rows():
    empty = {"a": torch.empty(0, dtype=torch.int64), "b": torch.empty(0, dtype=torch.int64)}
    assert pool()[0].each(Inputs(empty)).shape == (0, 6)


@pytest.mark.parametrize("value", [torch.tensor([0, 5]), (torch.tensor([5]), torch.tensor([0, 0, 1]))])
def test_an_id_outside_is_named_with_its_column(value):
    with pytest.raises(DataError, match="column 'b' has 5 buckets, and got the id 5"):
        pool()[0].each(Inputs({"a": torch.tensor([1, 3]), "b": value}))


def test_columns_of_other_batches_are_named():
    with pytest.raises(DataError, match="'b' has 3 examples, and 'a' has 2"):
        pool()[0].each(Inputs({"a": torch.tensor([1, 3]), "b": torch.tensor([1, 2, 3])}))


def test_long_rows_are_shortened():
    table = Table(4, 3, "rows", nn.init.ones_, trainable=True, sparse=False)
    found = Separate(COLUMNS[0], table, "mean", max_norm=0.5)(Inputs({"a": [1, -1]}))
    torch.testing.assert_close(found.norm(dim=1), torch.tensor([0.5, 0.0]))


def test_bags_know_whose_ids_they_have():
    inputs = Inputs(RAGGED)
    bags = bags_of(COLUMNS, [inputs.ids(column) for column in COLUMNS], "sum", torch.device("cpu"))
    assert bags.values.tolist() == [1, 3, 0, 4, 0, 2]
    assert bags.owner.tolist() == [0, 0, 0, 1, 1, 1]
    assert bags.offsets.tolist() == [0, 3, 3, 5, 6]
    assert bags.scale is None
