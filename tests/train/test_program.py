"""A `model_fn` as a Model's functions: its arguments, its optimizers, its losses, its hooks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import plait
from plait import train
from plait.engine.op import default_global_step
from plait.errors import FunctionError, TaskError, VariableError

BATCH = [(torch.ones(4, 2), torch.ones(4))]


def estimator(train_op, *, eval_spec=None, **more):
    """Two layers; `train_op(loss, other)` says what moves them."""

    def model_fn(features, labels, mode):
        a = plait.layer("a", nn.Linear, 2, 1)(features).sum()
        b = plait.layer("b", nn.Linear, 2, 1)(features).sum()
        if mode != "train":
            return eval_spec(mode, a + b) if eval_spec else train.EstimatorSpec(mode, predictions=a + b, loss=a + b)
        return train.EstimatorSpec(mode, loss=a + b, train_op=train_op(a, b), **more)

    return train.Estimator(model_fn)


def moved(given):
    """How far each layer's bias went in one step."""
    given.train(lambda: BATCH, steps=1)
    fresh = plait.Model(seed=0)
    with fresh.scope():
        start = {name: plait.layer(name, nn.Linear, 2, 1).bias.item() for name in "ab"}
    return {name: round(start[name] - given.get_variable_value(f"{name}/bias").item(), 4) for name in "ab"}


def test_a_factory_moves_all():
    assert moved(estimator(lambda a, b: functools.partial(torch.optim.SGD, lr=0.1))) == {"a": 0.4, "b": 0.4}


def test_scopes_have_optimizers():
    slow, fast = train.GradientDescentOptimizer(0.1), train.GradientDescentOptimizer(0.2)
    assert moved(estimator(lambda a, b: {"a": slow, "b": fast})) == {"a": 0.4, "b": 0.8}


def test_minimize_moves_its_variables_and_no_others():
    slow = train.GradientDescentOptimizer(0.1)
    assert moved(estimator(lambda a, b: slow.minimize(a + b, var_list="b"))) == {"a": 0.0, "b": 0.4}
    listed = estimator(lambda a, b: slow.minimize(a + b, var_list=plait.get_collection("trainable_variables", "a")))
    assert moved(listed) == {"a": 0.4, "b": 0.0}


def test_two_optimizers_of_one_loss():
    def train_op(a, b):
        loss = a + b
        ops = [(0.1, "a"), (0.2, "b")]
        return [train.GradientDescentOptimizer(rate).minimize(loss, var_list=scope) for rate, scope in ops]

    assert moved(estimator(train_op)) == {"a": 0.4, "b": 0.8}


def test_two_losses_move_their_own():
    def train_op(a, b):
        return [
            train.GradientDescentOptimizer(0.1).minimize(a - b, var_list="a"),
            train.GradientDescentOptimizer(0.1).minimize(a - b, var_list="b"),
        ]

    assert moved(estimator(train_op)) == {"a": 0.4, "b": -0.4}


@pytest.mark.parametrize(
    ("train_op", "text"),
    [
        (lambda a, b: 3, "minimize"),
        (lambda a, b: train.GradientDescentOptimizer(0.1).minimize(a, var_list="c"), "scope 'c'"),
        (lambda a, b: train.GradientDescentOptimizer(0.1).minimize(a, var_list=[a]), "var_list"),
        (lambda a, b: [train.GradientDescentOptimizer(0.1).minimize(a)] * 2, "two optimizers"),
    ],
)
def test_a_train_op_that_cannot_work_is_refused(train_op, text):
    with pytest.raises((FunctionError, VariableError, TaskError), match=text):
        estimator(train_op).train(lambda: BATCH)


def test_the_global_step_is_the_models():
    seen = []

    def model_fn(features, mode):
        seen.append(int(train.get_global_step()))
        loss = plait.get_variable("w", [1], initializer=1.0).sum()
        return train.EstimatorSpec(mode, loss=loss, train_op=train.AdamOptimizer().minimize(loss))

    train.Estimator(model_fn).train(lambda: [torch.ones(1)] * 3)
    assert seen == [0, 0, 1, 2]
    assert train.get_global_step() is default_global_step()


def test_a_model_fn_takes_what_it_wants():
    def model_fn(features, **named):
        assert set(named) == {"labels", "mode", "params", "config"}
        assert named["params"] == {"k": 1}
        loss = plait.get_variable("w", [1], initializer=1.0).sum()
        return train.EstimatorSpec(named["mode"], loss=loss, train_op=train.AdamOptimizer())

    train.Estimator(model_fn, params={"k": 1}).train(lambda: BATCH)


def test_hooks_of_a_spec_live_on_and_see_each_steps_tensors(caplog):
    caplog.set_level("INFO", "plait")

    def model_fn(features, labels, mode):
        loss = (plait.get_variable("w", [1], initializer=1.0) * features).sum()
        hooks = [train.LoggingTensorHook({"sum": features.sum()}, every_n_iter=1)]
        return train.EstimatorSpec(
            mode,
            loss=loss,
            predictions=features,
            train_op=train.GradientDescentOptimizer(0.1),
            training_hooks=hooks,
            evaluation_hooks=hooks,
            prediction_hooks=hooks,
        )

    def input_fn():
        return [(torch.full((2,), float(number)), torch.zeros(2)) for number in (1, 2)]

    given = train.Estimator(model_fn)
    for run in (given.train, given.evaluate, lambda fn: list(given.predict(fn))):
        caplog.clear()
        run(input_fn)
        lines = [line.partition(" (")[0] for line in caplog.messages if line.startswith("sum = ")]
        assert lines == ["sum = 2", "sum = 4"]


def test_modes_make_the_same_variables():
    def eval_spec(mode, loss):
        return train.EstimatorSpec(mode, loss=loss + plait.get_variable("new", [1]).sum())

    given = estimator(lambda a, b: train.AdamOptimizer(), eval_spec=eval_spec)
    given.train(lambda: BATCH)
    with pytest.raises(FunctionError, match="'new'"):
        given.evaluate(lambda: BATCH)


def test_a_build_leaves_random_states_and_buffers_alone():
    def model_fn(features, labels, mode):
        net = plait.layer("norm", nn.BatchNorm1d, 2)(features)
        loss = nn.functional.dropout(net, 0.5).sum()
        return train.EstimatorSpec(mode, loss=loss, train_op=train.AdamOptimizer())

    given = train.Estimator(model_fn)
    given.train(lambda: BATCH)
    seen, state = given.get_variable_value("norm/num_batches_tracked"), torch.get_rng_state()
    given.evaluate(lambda: BATCH)
    torch.set_rng_state(state)
    given.evaluate(lambda: BATCH)
    assert given.get_variable_value("norm/num_batches_tracked") == seen == 1


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (3, "give a function"),
        (lambda x: x, "`features`"),
        (lambda features, mode: 3, "EstimatorSpec"),
    ],
)
def test_a_model_fn_that_cannot_work_is_refused(function, text):
    with pytest.raises(FunctionError, match=text):
        train.Estimator(function).train(lambda: [torch.ones(1)])
    with pytest.raises(FunctionError, match="does not take `labels`"):
        train.Estimator(lambda features, mode: 3).train(lambda: BATCH)
