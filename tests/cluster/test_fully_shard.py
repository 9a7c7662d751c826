"""One process, as a cluster of one: which modules become units, what stays whole, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import plait
from plait.cluster.fully_shard import UNIT_SIZE, gathered, load_full, one_by_one, shard_model, sharded_state
from plait.engine.model import Model
from plait.errors import ConfigError, MismatchError, VariableError
from plait.nets.family import Shape
from plait.nets.resnet import create
from plait.optim import rules


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def units(model):
    return {path for path, module in model.named_modules() if isinstance(module, FSDPModule)}


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.list = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
        self.row = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.scales = nn.ParameterList([torch.ones(4)])

    def forward(self, x):
        for layer in self.list:
            x = layer(x)
        return self.row(self.first(x)) * self.scales[0]


def test_units_are_what_nobody_above_calls_and_large_elements_of_rows(alone):
    model = Model()
    model.tower, model.relu = Tower(), nn.ReLU()
    with model.scope(), plait.variable_scope("head"):
        plait.layer("fc", nn.Linear, 4, 4)
        plait.get_variable("bare", [3])
    model.own = nn.Parameter(torch.ones(2))
    whole = shard_model(model, unit_size=20)
    assert units(model) == {"tower", "tower.list.0", "tower.row.0", "_scoped.head.fc"}
    assert list(whole) == ["own", "head/bare"]
    assert all(type(value) is nn.Parameter for value in whole.values())
    assert {name for name, value in model.variables().items() if not isinstance(value, DTensor)} == set(whole)


def test_small_elements_stay_with_their_unit(alone):
    model = Model()
    model.tower = Tower()
    shard_model(model)
    assert units(model) == {"tower"}
    assert UNIT_SIZE > 100


def test_cells_of_plaits_networks_are_units(alone):
    model = Model()
    model.net = create("resnet_v1_20", Shape(classes=3, channels=3, height=16, width=16))
    shard_model(model, unit_size=1)
    assert len(units(model)) == 1 + 9
    shape = model.net(torch.ones(2, 3, 16, 16))[0].shape
    assert shape == (2, 3)


def test_values_names_and_gradients_stay(alone):
    model = nn.Module()
    model.tower = Tower()
    plain = copy.deepcopy(model)
    assert shard_model(model, unit_size=20) == {}
    assert list(model.state_dict()) == list(plain.state_dict())
    x = torch.randn(3, 4)
    for one in (model, plain):
        one.tower(x).square().sum().backward()
    for name, value in gathered(dict(model.named_parameters())).items():
        assert torch.equal(value, plain.get_parameter(name))
    gradients = gathered({name: value.grad for name, value in model.named_parameters()})
    for name, value in gradients.items():
        assert torch.equal(value, plain.get_parameter(name).grad)


class Number(nn.Module):
    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.randn(3, 4).t())

    def forward(self, x):
        return (x * self.number) @ self.turned


def test_single_numbers_stay_whole_and_strides_do_not_matter(alone):
    model = nn.Module()
    model.a = Number()
    before = model.a.turned.detach().clone()
    assert list(shard_model(model)) == ["a/number"]
    assert torch.equal(gathered(model.a.turned), before)
    model.a(torch.ones(2, 4)).sum().backward()
    assert model.a.number.grad is not None


def test_an_optimizer_takes_both_kinds_one_by_one(alone):
    model = nn.Module()
    model.a, model.b = Number(), nn.Linear(2, 2)
    shard_model(model)
    optimizer = torch.optim.Adam([{"params": model.a.parameters()}, {"params": model.b.parameters()}], foreach=True)
    one_by_one(optimizer)
    assert [group["foreach"] for group in optimizer.param_groups] == [False, True]
    model.a(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    one_by_one(rules.Adam(model.b.parameters()))
    with pytest.raises(ConfigError, match="Adam moves many variables at once"):
        one_by_one(rules.Adam(model.a.parameters()))


class Viewing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        return y.view(-1), {"rows": y[1:], "same": y}, [y[0]]


def test_outputs_that_are_views_may_be_changed_in_place(alone):
    model = nn.Module()
    model.a = Viewing()
    plain = copy.deepcopy(model.a)
    shard_model(model)
    for module in (model.a, plain):
        flat, named, rows = module(torch.ones(3, 4))
        flat = flat.clone() if module is plain else flat
        flat += 1
        (flat.square().sum() + named["rows"].sum() + named["same"].sum() + rows[0].sum()).backward()
    assert torch.equal(gathered(model.a.fc.weight.grad), plain.fc.weight.grad)


def test_a_parameter_of_two_units_is_refused_and_one_module_under_two_names_is_not(alone):
    model = nn.Module()
    model.a, model.b = nn.Linear(3, 3), nn.Linear(3, 3)
    model.b.weight = model.a.weight
    with pytest.raises(VariableError, match="'a/weight' and 'b/weight' are one variable in two modules"):
        shard_model(model)
    model = nn.Module()
    model.a = model.b = nn.Linear(3, 3)
    assert shard_model(model) == {}
    assert units(model) == {"a"}
    model = nn.Module()
    inner = nn.Linear(3, 3)
    model.a, model.b = nn.Sequential(inner), nn.Sequential(inner, nn.ReLU())
    with pytest.raises(VariableError, match="'a/0/weight' and 'b/0/weight'"):
        shard_model(model)


def test_state_goes_out_whole_and_comes_back_split(alone):
    def make():
        torch.manual_seed(1)
        model = nn.Module()
        model.tower = Tower()
        shard_model(model)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model.tower(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    saved = gathered({"variables": dict(model.named_parameters()), "optimizer": optimizer.state_dict(), "n": [1, None]})
    assert saved["n"] == [1, None]
    assert all(type(value) is torch.Tensor for value in saved["variables"].values())
    kept = copy.deepcopy(saved)
    step(model, optimizer)

    other, its_optimizer = make()
    load_full(dict(other.named_parameters()), kept["variables"])
    state = kept["optimizer"]["state"]
    split = {number: sharded_state(value, state[number]) for number, value in enumerate(other.parameters())}
    assert isinstance(split[0]["exp_avg"], DTensor)
    assert not isinstance(split[0]["step"], DTensor)
    its_optimizer.load_state_dict({**kept["optimizer"], "state": split})
    step(other, its_optimizer)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())


def test_gathered_without_keeping(alone):
    model = nn.Module()
    model.a = nn.Linear(2, 2)
    shard_model(model)
    assert gathered({"x": (model.a.weight, torch.ones(1), 1)}, keep=False) == {"x": (None, None, 1)}


def test_tensors_that_were_never_split():
    live = {"a": torch.zeros(2), "b": torch.zeros(1)}
    load_full(live, {"a": torch.ones(2)})
    assert gathered(live)["a"].tolist() == [1, 1]
    assert sharded_state(live["a"], {"step": 3, "sum": live["b"]}) == {"step": 3, "sum": live["b"]}


def test_what_does_not_fit_is_not_loaded():
    live = {"a": torch.zeros(2), "b": torch.zeros(1)}
    with pytest.raises(MismatchError, match=r"no \['c'\], and another shape for \['b'\]"):
        load_full(live, {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)})
    assert live["a"].tolist() == [0, 0]
