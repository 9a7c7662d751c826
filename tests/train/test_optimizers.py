"""Optimizers by TensorFlow's names: their arguments, what they make, and `minimize`."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch

from plait import optim, train
from plait.errors import ConfigError
from plait.train.optimizers import TrainOp, named_optimizer

NEEDED = inspect.Parameter.empty
ARGUMENTS = {
    "AdadeltaOptimizer": {"learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-08},
    "AdagradOptimizer": {"learning_rate": NEEDED, "initial_accumulator_value": 0.1},
    "AdamOptimizer": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-08},
    "FtrlOptimizer": {
        "learning_rate": NEEDED,
        "learning_rate_power": -0.5,
        "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "accum_name": None,
        "linear_name": None,
        "l2_shrinkage_regularization_strength": 0.0,
    },
    "GradientDescentOptimizer": {"learning_rate": NEEDED},
    "MomentumOptimizer": {"learning_rate": NEEDED, "momentum": NEEDED, "use_nesterov": False},
    "RMSPropOptimizer": {
        "learning_rate": NEEDED,
        "decay": 0.9,
        "momentum": 0.0,
        "epsilon": 1e-10,
        "centered": False,
    },
}


def names(kind):
    parameters = inspect.signature(kind).parameters
    return {name: one.default for name, one in parameters.items() if name not in ("use_locking", "name")}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_and_defaults_are_tensorflows(name):
    assert names(getattr(train, name)) == ARGUMENTS[name]


def test_all_optimizers_are_in_the_table():
    made = {name for name in train.__all__ if name.endswith("Optimizer")} - {"Optimizer", "SyncReplicasOptimizer"}
    assert made == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_makes_the_rule_of_its_name(name):
    kind = getattr(train, name)
    least = {key: 0.5 for key, default in ARGUMENTS[name].items() if default is NEEDED}
    weight = torch.ones(2, requires_grad=True)
    made = kind(**least)([weight])
    options = {key: value for key, value in least.items() if key != "learning_rate"}
    same = torch.ones(2, requires_grad=True)
    rate = least.get("learning_rate", 0.001)
    other = optim.get_optimizer_fn(kind.kind, rate, None, **options)()([same])
    for _ in range(3):
        for value, optimizer in ((weight, made), (same, other)):
            value.grad = torch.tensor([0.5, -2.0])
            optimizer.step()
    assert torch.equal(weight, same)
    assert not torch.equal(weight, torch.ones(2))


def test_minimize_names_loss_and_variables():
    loss, adam = torch.zeros(()), train.AdamOptimizer()
    assert adam.minimize(loss, train.get_global_step()) == TrainOp(adam, loss, None)
    assert adam.minimize(loss, var_list="tower").var_list == "tower"
    with pytest.raises(ConfigError, match="grad_loss"):
        adam.minimize(loss, grad_loss=loss)
    assert repr(train.GradientDescentOptimizer(0.1)) == "GradientDescentOptimizer(learning_rate=0.1)"
    assert isinstance(adam, train.Optimizer)


def test_a_rate_may_be_a_function_of_the_step():
    weight = torch.ones(1, requires_grad=True)
    made = train.GradientDescentOptimizer(lambda step: 1.0 / (1 + step))([weight])
    for _ in range(2):
        weight.grad = torch.ones(1)
        made.step()
    assert weight.item() == pytest.approx(-0.5)


def test_five_have_names():
    assert repr(named_optimizer("Ftrl", 0.2)).startswith("FtrlOptimizer(learning_rate=0.2")
    given = functools.partial(torch.optim.SGD, lr=0.1)
    assert named_optimizer(given, 0.2) is given
    with pytest.raises(ConfigError, match="Adagrad, Adam, Ftrl, RMSProp, SGD"):
        named_optimizer("adam", 0.1)
    with pytest.raises(ConfigError, match="functools.partial"):
        named_optimizer(3, 0.1)
