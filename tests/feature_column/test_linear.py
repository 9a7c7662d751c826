from __future__ import annotations

import pytest
import torch

from plait import efl
from plait.errors import ConfigError, DataError
from plait.feature_column import (
    LinearModel,
    bucketized_column,
    categorical_column_with_identity,
    embedding_column,
    linear_model,
    numeric_column,
)

A = categorical_column_with_identity("a", 4)
X = numeric_column("x", shape=2)


def test_it_is_a_sum_of_weights_and_a_bias():
    module = LinearModel([A, X], units=2)
    with torch.no_grad():
        module.weights_of(A).copy_(torch.arange(8.0).view(4, 2))
        module.weights_of(X).copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        module.bias_weights.copy_(torch.tensor([10.0, 20.0]))
    found = module({"a": torch.tensor([3, -1]), "x": torch.tensor([[1.0, 1.0], [0.5, 0.0]])})
    assert found.tolist() == [[20.0, 33.0], [10.5, 21.0]]


def test_it_is_zero_at_first_and_all_of_it_trains():
    module = LinearModel([A, X, bucketized_column(numeric_column("z"), [0.0])])
    found = module({"a": torch.tensor([3, 1]), "x": torch.ones(2, 2), "z": torch.tensor([-1.0, 1.0])})
    found.sum().backward()
    assert found.tolist() == [[0.0], [0.0]]
    assert all(value.grad.abs().sum() > 0 for value in module.parameters())


def test_a_column_may_have_a_name_that_modules_use():
    module = LinearModel([numeric_column("training"), numeric_column("weights"), numeric_column("forward")])
    module.eval()
    features = {name: torch.ones(1) for name in ("training", "weights", "forward")}
    assert module(features).tolist() == [[0.0]]
    assert "training_.weights" in dict(module.named_parameters())


def test_a_model_learns_through_it():
    ids = torch.arange(40) % 4
    data = {"a": ids, "y": (ids == 2).float()}
    filled = {}
    model = efl.Model()
    model.input_fn(lambda model, mode: data)
    model.loss_fn(
        lambda model, sample: torch.nn.functional.binary_cross_entropy_with_logits(
            linear_model(sample, [A], cols_to_vars=filled)[:, 0], sample["y"]
        )
    )
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda params: torch.optim.Adagrad(params, lr=1.0)))
    model.compile()
    model.fit(efl.procedure_fn.train(max_step=30))
    weights = model.variables()["linear_model/a/weights"][:, 0]
    assert int(weights.argmax()) == 2
    assert filled[A][0] is model.variables()["linear_model/a/weights"]
    assert filled["bias"][0] is model.variables()["linear_model/bias_weights"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearModel([embedding_column(A, 2)]),
        lambda: LinearModel([A], units=0),
        lambda: LinearModel([A], sparse_combiner="max"),
        lambda: LinearModel([]),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(1)])
def test_batches_of_different_lengths_are_refused(x):
    with pytest.raises(DataError, match="batches of"):
        LinearModel([A, numeric_column("x")])({"a": torch.tensor([1, 2]), "x": x})
