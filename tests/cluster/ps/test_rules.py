"""Optimizers that are described and made again are the same."""

from __future__ import annotations

import json

import pytest
import torch

from plait.cluster.ps import rules
from plait.cluster.ps.spec import OptimizerSpec
from plait.errors import ClusterError, ConfigError
from plait.optim.factories import get_optimizer_fn
from plait.optim.rules import Adam, Ftrl, RMSProp
from plait.optim.schedules import piecewise_lr
from plait.optim.wrappers import Lars

MADE = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.99)),
    lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    lambda p: torch.optim.Adadelta(p, lr=0.1, rho=0.8),
    lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    lambda p: torch.optim.Adamax(p, lr=0.1),
    lambda p: torch.optim.NAdam(p, lr=0.1),
    lambda p: torch.optim.RAdam(p, lr=0.1),
    lambda p: Adam(p, lr=0.1),
    lambda p: RMSProp(p, lr=0.1, momentum=0.5, centered=True),
    lambda p: RMSProp(p, lr=0.1),
    lambda p: Ftrl(p, lr=0.1, l1=0.01),
]


def step(optimizer, parameter, seed):
    parameter.grad = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


@pytest.mark.parametrize("maker", MADE)
def test_made_again_it_moves_the_same(maker):
    first = torch.nn.Parameter(torch.arange(5.0, dtype=torch.float64))
    optimizer = maker([first])
    (spec,) = rules.describe(optimizer)
    spec = OptimizerSpec.from_json(json.loads(json.dumps(spec.to_json())))
    second = torch.nn.Parameter(torch.arange(5.0, dtype=torch.float64))
    again = rules.make(spec, [second])
    again.param_groups[0]["lr"] = 0.1
    for seed in range(4):
        step(optimizer, first, seed)
        step(again, second, seed)
    assert torch.equal(first, second)


@pytest.mark.parametrize("maker", MADE)
def test_start_values_are_those_of_torch(maker):
    """State that is put there beforehand changes nothing: it is what the optimizer would have begun with."""
    first, second = (torch.nn.Parameter(torch.arange(5.0, dtype=torch.float64)) for _ in range(2))
    one, two = maker([first]), maker([second])
    slots = rules.start_values(rules.describe(one)[0])
    two.state[second] = {name: torch.full_like(second, value) for name, value in slots.rows.items()}
    two.state[second] |= {name: torch.tensor(value) for name, value in slots.scalars.items()}
    for seed in range(3):
        step(one, first, seed)
        step(two, second, seed)
    assert torch.equal(first, second)
    assert set(one.state[first]) == set(two.state[second])


def test_every_group_is_described_without_its_rate():
    groups = [{"params": [torch.zeros(1)], "momentum": 0.5}, {"params": [torch.zeros(1)], "lr": 3.0}]
    first, second = rules.describe(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    assert (first.options["momentum"], second.options["momentum"]) == (0.5, 0.9)
    assert "lr" not in first.options


def test_a_schedule_stays_with_the_worker():
    factory = get_optimizer_fn("adam", learning_rate=piecewise_lr("10:0.1,20:0.01", 1, 1))()
    (spec,) = rules.describe(factory([torch.zeros(1, requires_grad=True)]))
    assert set(spec.options) == {"betas", "eps", "weight_decay"}


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.LBFGS,
        lambda p: Lars(torch.optim.SGD(p, lr=0.1)),
        torch.optim.Rprop,
    ],
)
def test_what_is_not_by_element_is_refused(optimizer):
    with pytest.raises(ConfigError, match=r"cannot be applied on parameter servers.*plait\.Adam.*SGD"):
        rules.describe(optimizer([torch.zeros(1, requires_grad=True)]))


def test_sparse_adam_is_made_as_the_rule_with_epsilon_hat():
    (spec,) = rules.describe(torch.optim.SparseAdam([torch.zeros(1)], betas=(0.5, 0.6)))
    made = rules.make(spec, [torch.zeros(1, requires_grad=True)])
    assert type(made) is Adam
    assert made.param_groups[0]["betas"] == (0.5, 0.6)
    with pytest.raises(ConfigError, match="maximize"):
        rules.describe(torch.optim.SparseAdam([torch.zeros(1)], maximize=True))


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("os.system", {}, "there is no optimizer 'os.system'"),
        ("LBFGS", {}, "servers apply plait.Adam"),
        ("SGD", {"foo": 1}, "has no option 'foo': it takes momentum"),
        ("SGD", {"lr": 1.0}, "has no option 'lr'"),
        ("SGD", {"momentum": -1}, "refuses its options"),
        ("SGD", {"momentum": "a"}, "option 'momentum'"),
        ("SGD", {"dampening": float("nan")}, "send finite numbers"),
        ("SGD", {"nesterov": 1}, "option 'nesterov'"),
        ("Adam", {"betas": [0.9]}, "option 'betas'"),
        ("Adam", {"betas": 0.9}, "option 'betas'"),
        ("plait.Ftrl", {"l1": -1.0}, "refuses its options"),
    ],
)
def test_wrong_descriptions_are_refused(kind, options, text):
    with pytest.raises(ClusterError, match=text):
        rules.make(OptimizerSpec(kind=kind, options=options), [torch.zeros(1, requires_grad=True)])
