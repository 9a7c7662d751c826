"""`efl.export` at the end of a script."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.errors import ConfigError, FunctionError, TaskError, VariableError
from plait.export import load

X = torch.linspace(-1, 1, 48).reshape(16, 3)
Y = X.sum(1) > 0


def logits(model, sample):
    return plait.layer("head", nn.Linear, 4, 2)(model.net(sample.x))


def predict(model, sample):
    return {"probability": logits(model, sample).softmax(1)}


def evaluate(model, sample):
    model.add_metric("accuracy", (logits(model, sample).argmax(1) == sample.y).float().mean())


def made(task=None):
    model = efl.Model()
    model.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    model.input_fn(lambda model, mode: plait.data.TensorSource({"x": X, "y": Y.long()}, batch_size=8), task=task)
    model.loss_fn(lambda model, sample: nn.functional.cross_entropy(logits(model, sample), sample.y), task=task)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)), task=task)
    return model.eval_fn(evaluate, task=task).compile()


@pytest.fixture(scope="module")
def model():
    found = made()
    found.fit(efl.procedure_fn.train_and_eval(max_iter=2))
    return found


def test_what_is_written(model, tmp_path):
    where = efl.export(model, predict, {"x": X[:2]}, tmp_path, labels=["no", "yes"])
    assert where == tmp_path / "1"
    found = load(where)
    assert found.labels == ["no", "yes"]
    assert found.about["step"] == 4
    assert found.about["metrics"] == model.history[-1]["metrics"]
    with torch.no_grad(), model.scope():
        expected = predict(model.eval(), efl.Sample({"x": X}))["probability"]
    model.train()
    for rows in (1, 3, 16):
        got = found.run({"x": X[:rows].numpy()})["probability"]
        np.testing.assert_allclose(got, expected[:rows].numpy(), rtol=1e-4)


def test_training_goes_on_afterwards(tmp_path):
    both = []
    for exports in (False, True):
        torch.manual_seed(0)
        model = made()
        model.fit(efl.procedure_fn.train(max_step=2))
        if exports:
            efl.export(model, predict, {"x": X}, tmp_path)
        model.fit(efl.procedure_fn.train(max_step=2), project_name="again")
        both.append({name: value.clone() for name, value in model.variables().items()})
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def test_of_several_tasks(tmp_path):
    where = efl.export(made("first"), predict, {"x": X}, tmp_path, version="first", preprocess={"scale": 2})
    assert load(where).about["preprocess"] == {"scale": 2}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"formats": ["sql"]}, ConfigError, "there is no format 'sql'"),
        ({"version": "here"}, ConfigError, "has a version here already"),
        ({"predict_fn": None}, FunctionError, "predict_fn is a NoneType: give a function of"),
        ({"model": efl.Model()}, TaskError, "is not compiled"),
        ({"inputs": {"x": 1}}, ConfigError, "input 'x' is a int"),
        ({"predict_fn": lambda model, sample: None}, FunctionError, "returns a NoneType"),
        (
            {"predict_fn": lambda model, sample: plait.layer("new", nn.Linear, 3, 1)(sample.x)},
            VariableError,
            "layer 'new' is new after compile",
        ),
    ],
)
def test_mistakes(model, tmp_path, changes, error, words):
    (tmp_path / "here").mkdir()
    given = {"model": model, "predict_fn": predict, "inputs": {"x": X}, "directory": tmp_path, **changes}
    with pytest.raises(error, match=words):
        efl.export(**given)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_rows_that_are_elsewhere(tmp_path):
    model = made()
    model.table = plait.cluster.SparseEmbedding(4)
    with pytest.raises(ConfigError, match="SparseEmbedding has no fixed rows"):
        efl.export(model, predict, {"x": X}, tmp_path)


def test_other_workers_leave_it_to_the_first(model, tmp_path, monkeypatch):
    monkeypatch.setattr(type(model.strategy), "worker_id", 1)
    assert efl.export(model, predict, {"x": X}, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
