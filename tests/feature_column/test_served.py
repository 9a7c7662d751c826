"""Columns whose rows are on parameter servers, with a script that does not know of them."""

from __future__ import annotations

import pytest
import torch

import plait
from plait import efl
from plait.feature_column import (
    DenseFeatures,
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    crossed_column,
    embedding_column,
    input_layer,
    linear_model,
    numeric_column,
)

from ..cluster.ps.in_process import servers, train, worker  # noqa: TID252 - test folders are no packages

A = categorical_column_with_identity("a", 20)
B = categorical_column_with_identity("b", 5)
DEEP = [embedding_column(A, 4), embedding_column(B, 4, combiner="sqrtn"), numeric_column("x")]
WIDE = [A, B, crossed_column(["a", "b"], 50), categorical_column_with_hash_bucket("c", 7, dtype=torch.int64)]


def rows(count=128):
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randint(0, 20, (count,), generator=draw), torch.randint(-1, 5, (count, 2), generator=draw)
    x = torch.randn(count, generator=draw)
    return {"a": a, "b": b, "c": a * 7 - 3, "x": x, "y": ((a % 3 == 0) + x > 0.5).float()}


def functional(model, sample):
    del model
    return input_layer(sample, DEEP), linear_model(sample, WIDE)


def modular(model, sample):
    return model.deep(sample), linear_model(sample, WIDE)


def model_of(compute, strategy=None):
    torch.manual_seed(0)
    model = efl.Model()
    if compute is modular:
        model.deep = DenseFeatures(DEEP)
    model.input_fn(lambda model, mode: plait.data.TensorSource(rows(), 16, shuffle=True))

    def loss(model, sample):
        deep, wide = compute(model, sample)
        logits = plait.layer("out", torch.nn.Linear, deep.shape[1], 1)(deep) + wide
        return torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], sample["y"])

    model.loss_fn(loss)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda params: torch.optim.Adagrad(params, lr=0.1)))
    model.compile(strategy=strategy)
    return model


@pytest.mark.parametrize("compute", [functional, modular])
@pytest.mark.parametrize("count", [1, 2])
def test_training_is_the_same_as_without_servers(compute, count):
    expected = train(model_of(compute), 12)
    with servers(count) as role, worker(role) as strategy:
        model = model_of(compute, strategy)
        tables = {spec.name: spec.rows for spec in strategy.held.spec.tables}
        found = train(model, 12)
    assert sorted(tables.values()) == [5, 5, 7, 20, 20, 50]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_in_geo_mode_every_worker_has_all_rows():
    with servers() as role, worker(role, mode="geo") as strategy:
        model = model_of(functional, strategy)
        assert not strategy.held.spec.tables
        train(model, 4)


def test_a_batch_without_any_value_of_a_column():
    with servers() as role, worker(role) as strategy:
        model = model_of(modular, strategy)
        batch = {**rows(2), "a": torch.tensor([-1, -1])}
        assert model.deep(batch)[:, :4].tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("trains", [True, False])
def test_all_columns_are_asked_for_before_the_first_is_waited_for(trains, monkeypatch):
    with servers(2) as role, worker(role) as strategy:
        model = model_of(modular, strategy)
        train(model, 2)
        events = []

        def noting(name, function):
            return lambda *given, **more: (events.append(name), function(*given, **more))[1]

        for name in ("ask_rows", "rows"):
            monkeypatch.setattr(strategy.held, name, noting(name, getattr(strategy.held, name)))
        with model.scope(), torch.set_grad_enabled(trains):
            linear_model({**rows(8), "a": torch.arange(8)}, WIDE)
        strategy.gradients.take(1.0)
    assert events == ["ask_rows"] * 4 + ["rows"] * 4
