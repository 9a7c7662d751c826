"""Variables and optimizer state on disk: what is written, read back, replaced, refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from plait.errors import CheckpointError, ConfigError, MismatchError, VariableError
from plait.openks import CPUDistributedAlgorithm
from plait.openks.saving import shards_in
from plait.variables.bank import read_variables
from plait.variables.checkpoint import CheckpointDir


def net(seed, width=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def training(model, *, named=True, kind=torch.optim.Adam):
    algorithm = CPUDistributedAlgorithm()
    algorithm.init()
    optimizer = algorithm.distributed_optimizer(kind(model.parameters(), lr=0.05), module=model if named else None)
    algorithm.init_worker()
    return algorithm, optimizer


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.minimize((model(x) - x.sum(1, keepdim=True)).square().mean())


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("named", [True, False])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path, named):
    whole = net(0)
    train(whole, training(whole)[1], 20)
    first = net(0)
    algorithm, optimizer = training(first, named=named)
    train(first, optimizer, 12)
    algorithm.save_persistables(None, tmp_path, first)
    second = net(1)
    algorithm, optimizer = training(second, named=named)
    assert algorithm.load_persistables(None, tmp_path, second) == 12
    train(second, optimizer, 8, start=12)
    assert same(state(second), state(whole))


def test_others_can_read_the_variables(tmp_path):
    model = net(0)
    algorithm, optimizer = training(model)
    train(model, optimizer, 3)
    algorithm.save_persistables(None, str(tmp_path))
    found = read_variables(tmp_path)
    assert same({name.replace("/", "."): value for name, value in found.items()}, state(model))
    tree = CheckpointDir(tmp_path).read_latest()[1]
    assert tree["optimizers"][0]["state"]["0/weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert tree["global_step"] == 3


def test_a_save_replaces_the_one_before(tmp_path):
    model = net(0)
    algorithm, optimizer = training(model)
    for _ in range(3):
        train(model, optimizer, 2)
        algorithm.save_persistables(None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-000000000006-000003"]


def test_one_file_of_variables(tmp_path):
    model = net(0)
    algorithm, optimizer = training(model)
    train(model, optimizer, 2)
    algorithm.save_persistables(None, tmp_path / "deep", filename="all.safetensors")
    found = read_variables(tmp_path / "deep" / "all.safetensors")
    assert same({name.replace("/", "."): value for name, value in found.items()}, state(model))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["all.safetensors"]
    with pytest.raises(ConfigError, match="ends in .safetensors"):
        algorithm.save_persistables(None, tmp_path, filename="all")


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    algorithm, _ = training(net(0))
    with pytest.raises(CheckpointError, match="cannot be made"):
        algorithm.save_persistables(None, tmp_path / "file" / "below")


def test_a_main_program_without_all_variables(tmp_path):
    algorithm, _ = training(net(0))
    with pytest.raises(VariableError, match=r"main_program lacks a variable of shape \(5, 3\)"):
        algorithm.save_persistables(None, tmp_path, nn.Linear(3, 5))
    assert list(tmp_path.glob("ckpt-*")) == []


def test_loading_what_does_not_fit(tmp_path):
    algorithm, _ = training(net(0))
    with pytest.raises(CheckpointError, match="holds nothing that save_persistables wrote"):
        algorithm.load_persistables(None, tmp_path)
    algorithm.save_persistables(None, tmp_path)
    wider = net(1, width=6)
    before = state(wider)
    with pytest.raises(MismatchError, match=r"0/bias: \[5\] there, \[6\] here"):
        training(wider)[0].load_persistables(None, tmp_path)
    assert same(state(wider), before)
    with pytest.raises(MismatchError, match="optimizer's kind was Adam when it was saved, it is SGD now"):
        training(net(1), kind=torch.optim.SGD)[0].load_persistables(None, tmp_path)


def test_where_the_servers_shares_are(tmp_path):
    with pytest.raises(CheckpointError, match="holds nothing"):
        shards_in(tmp_path)
    algorithm, _ = training(net(0))
    algorithm.save_persistables(None, tmp_path / "alone")
    with pytest.raises(CheckpointError, match="saved without servers.*load_persistables"):
        shards_in(tmp_path / "alone")
    CheckpointDir(tmp_path / "served").save({"cluster": {"servers": "servers-1"}, "variables": {}}, step=1)
    assert shards_in(tmp_path / "served") == tmp_path / "served" / "servers-1"
    CheckpointDir(tmp_path / "evil").save({"cluster": {"servers": "../served"}, "variables": {}}, step=1)
    with pytest.raises(CheckpointError, match="without servers"):
        shards_in(tmp_path / "evil")
    (tmp_path / "right").mkdir()
    (tmp_path / "right" / "shard-00000-of-00001.json").write_text(json.dumps({}))
    assert shards_in(tmp_path / "right") == tmp_path / "right"
