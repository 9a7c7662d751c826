from __future__ import annotations

import pytest
import torch

from plait.cluster.alone import Alone
from plait.cluster.embedding import SparseEmbedding
from plait.engine.settings import GradientConfig
from plait.errors import ConfigError
from plait.optim.factories import get_optimizer_fn

from .ps.in_process import far, make_model, servers, train, worker


def table():
    return SparseEmbedding(3, scale=0.5, dtype=torch.float64)


def rows(model):
    return {"rows": model.strategy.pull(0, torch.arange(12), create=False).clone()}


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "ftrl"])
def test_a_table_beside_the_model_equals_one_on_servers(name):
    factory = get_optimizer_fn(name, 0.05)
    here = make_model(Alone(), factory(), embedding=table())
    expected = train(here, 20) | rows(here)
    with servers(2) as role, worker(role) as strategy:
        there = make_model(strategy, factory(), embedding=table())
        found = train(there, 20) | rows(there)
    assert far(found, expected) < 1e-14


def test_it_is_saved_with_the_model(tmp_path):
    whole = make_model(Alone(), embedding=table())
    expected = train(whole, 20) | rows(whole)
    train(make_model(Alone(), embedding=table()), 10, checkpoint_dir=tmp_path)
    again = make_model(Alone(), embedding=table())
    assert far(train(again, 20, checkpoint_dir=tmp_path) | rows(again), expected) == 0


def test_a_row_that_was_only_looked_at_in_evaluation_is_not_made():
    model = make_model(Alone(), embedding=table())
    train(model, 1)
    before = len(model.strategy._shard.tables[0])
    with torch.no_grad():
        model.words(torch.tensor([10**15]))
    assert len(model.strategy._shard.tables[0]) == before


def test_a_model_without_such_a_table_is_moved_by_its_optimizers():
    strategy = Alone()
    make_model(strategy)
    assert strategy.mover(None, None, []) is None


def test_clipping_is_refused():
    model = make_model(Alone())
    model.words = table()
    model.gradient = GradientConfig(clip=1.0)
    with pytest.raises(ConfigError, match="gradient_clip with a SparseEmbedding"):
        Alone().transform(model)
