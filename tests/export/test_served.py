"""A function of a model as a module: its variables by their names, never training, the model untouched."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.engine.calls import UserCall
from plait.engine.task import MODE, TaskScope
from plait.export import export, load
from plait.export.program import in_evaluation
from plait.export.served import Served, facts_of

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def forward(model, x):
    offset = plait.get_variable("offset", [4], initializer=0.5)
    hidden = plait.layer("norm", nn.BatchNorm1d, 4)(model.net(x * model.weights) + offset)
    with plait.variable_scope("train"):
        scale = plait.get_variable("scale", [4], initializer=2.0)
        return plait.layer("fc", nn.Linear, 4, 4)(nn.functional.dropout(hidden, 0.5, model.training_flag)) * scale


def compiled(forward=forward):
    model = efl.Model()
    model.net = nn.Linear(3, 4)
    model.weights = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    model.input_fn(lambda model, mode: efl.Sample({"x": X}))
    model.loss_fn(lambda model, sample: forward(model, sample.x).square().mean())
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))
    return model.compile()


def served(model, function):
    scope = TaskScope(MODE.EVAL, None)
    return Served(model, UserCall(lambda given: function(model, given["x"]), scope, model._store, model._now))


def trained(model):
    model.fit(efl.procedure_fn.train(max_step=3))
    return model


def state_of(model):
    modes = [module.training for module in model.modules()]
    return {name: value.clone() for name, value in model.variables().items()}, modes, model._now.sample


def test_it_is_exported_with_the_variables_as_they_are(tmp_path):
    model = trained(compiled())
    before, modes, sample = state_of(model)
    module = served(model, forward)
    where = export(module, {"x": X}, tmp_path)
    after, modes_after, sample_after = state_of(model)
    assert (modes_after, sample_after) == (modes, sample)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(type(value) in (nn.Parameter, torch.Tensor) for value in model.variables().values())
    assert model._store.step_collections == {}

    norm = model._store._made["norm"]
    hidden = model.net(X[:3] * model.weights) + before["offset"]
    hidden = (hidden - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    expected = model._store._made["train/fc"](hidden) * before["train/scale"]
    found = load(where).run({"x": X[:3].numpy()})["output"]
    torch.testing.assert_close(torch.from_numpy(found), expected.detach())


def test_its_variables_have_the_models_names():
    names = set(served(compiled(), forward).state_dict())
    assert {"weights", "net.weight", "offset", "norm.running_mean", "train_.scale", "train_.fc.weight"} <= names


def test_nothing_is_trained_whatever_the_function_asks_for(tmp_path, caplog):
    def training(model, x):
        found = forward(model, x)
        with plait.variable_scope("train", reuse=True):
            plait.layer("fc", nn.Linear, 4, 4).train()
        return found

    model = trained(compiled(training))
    before, *_ = state_of(model)
    where = export(served(model, training), {"x": X}, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in model.variables().items())
    assert caplog.text.count("Linear is put into training while it is exported") == 1
    plain = export(served(model, forward), {"x": X}, tmp_path)
    one, other = (load(place).run({"x": X.numpy()})["output"] for place in (where, plain))
    assert (one == other).all()
    assert not any("train" in vars(module) for module in model.modules())


def test_a_compiled_layer(tmp_path):
    model = trained(compiled())
    layer = model._store._made["norm"]
    layer.compile(backend=lambda *_: pytest.fail("it was compiled for this"))
    export(served(model, forward), {"x": X}, tmp_path)
    assert layer._compiled_call_impl is not None


def test_a_function_that_fails_leaves_the_model_as_it_was():
    def failing(model, x):
        forward(model, x)
        raise KeyError("mine")

    model = trained(compiled())
    before, modes, sample = state_of(model)
    module = served(model, failing)
    with in_evaluation(module), pytest.raises(KeyError, match="mine"):
        module(x=X)
    after, modes_after, sample_after = state_of(model)
    assert (modes_after, sample_after) == (modes, sample)
    assert all(torch.equal(before[name], after[name]) for name in before)


class TestFacts:
    def test_of_a_model_that_was_not_evaluated(self):
        assert facts_of(trained(compiled())) == {"step": 3, "metrics": {}, "epsilon": None}

    def test_the_last_evaluation_counts(self):
        model = compiled()
        model.history += [{"metrics": {"accuracy": 0.5}}, {"metrics": {"accuracy": 0.75}}]
        assert facts_of(model)["metrics"] == {"accuracy": 0.75}
        model.history.append({"metrics": None})
        assert facts_of(model)["metrics"] == {}

    def test_epsilon(self):
        optimizer = efl.privacy.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=2.0)
        model = efl.Model()
        model.net = nn.Linear(3, 1)
        model.input_fn(lambda model, mode: plait.data.TensorSource({"x": X}, batch_size=4))
        model.loss_fn(lambda model, sample: model.net(sample.x).square().mean(1))
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(optimizer))
        trained(model)
        epsilon = facts_of(model)["epsilon"]
        assert epsilon == model.privacy.epsilon(exact=True)
        assert 0 < epsilon < 100
