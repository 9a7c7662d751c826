"""Distributed optimizers in one process: a step is what plain PyTorch does, and mistakes are said."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from plait.cluster import Distributed
from plait.errors import ConfigError, VariableError
from plait.openks import (
    ASyncModelConfig,
    BaseDistributedOptimizer,
    CPUDistributedAlgorithm,
    GeneralDistributedOptimizer,
    GeoSGDModelConfig,
    GPUDistributedAlgorithm,
    HalfSyncModelConfig,
    HeterogeneousDistributedOptimizer,
    SyncModeConfig,
)
from plait.openks.optimizers import settings_of
from plait.optim import get_optimizer_fn


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


def loss_of(model, x):
    return functional.mse_loss(model(x), x.sum(1, keepdim=True))


def distributed(optimizer, strategy=None, kind=CPUDistributedAlgorithm, **options):
    algorithm = kind()
    algorithm.init()
    return algorithm.distributed_optimizer(optimizer, strategy, **options)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", [CPUDistributedAlgorithm, GPUDistributedAlgorithm])
@pytest.mark.parametrize("with_module", [False, True])
def test_minimize_is_a_step_of_plain_pytorch_bit_for_bit(kind, with_module):
    ours, plain = net(), net()
    optimizer = distributed(sgd(ours), kind=kind, module=ours if with_module else None)
    theirs = sgd(plain)
    for x in batches():
        moved, pairs = optimizer.minimize(loss_of(ours, x))
        theirs.zero_grad()
        loss_of(plain, x).backward()
        theirs.step()
        assert [variable for variable, _ in pairs] == moved == list(ours.parameters())
        assert all(torch.equal(a, b.grad) for (_, a), b in zip(pairs, plain.parameters()))
    assert same(ours, plain)


def test_each_algorithm_has_its_optimizer():
    assert type(distributed(sgd(net()))) is GeneralDistributedOptimizer
    made = distributed(sgd(net()), kind=GPUDistributedAlgorithm)
    assert type(made) is HeterogeneousDistributedOptimizer
    assert isinstance(made, BaseDistributedOptimizer)


def test_backward_then_gradients_of_ones_own_then_apply():
    model = net()
    optimizer = distributed(sgd(model, momentum=0.0, lr=1.0))
    before = [value.detach().clone() for value in model.parameters()]
    pairs = optimizer.backward(loss_of(model, batches()[0]))
    applied = optimizer.apply_gradients([(variable, torch.ones_like(gradient)) for variable, gradient in pairs[:2]])
    assert applied == list(model.parameters())[:2]
    moved = [torch.equal(value, old - 1) for value, old in zip(model.parameters(), before)]
    kept = [torch.equal(value, old) for value, old in zip(model.parameters(), before)]
    assert moved == [True, True, False, False]
    assert kept == [False, False, True, True]


@pytest.mark.parametrize("by", ["name", "path", "tensor"])
def test_parameter_list_and_no_grad_set(by):
    model = net()
    optimizer = distributed(sgd(model), module=model)
    wanted = {"name": ["0/weight", "2/bias"], "path": ["0.weight", "2.bias"]}.get(by, [model[0].weight, model[2].bias])
    without = {"name": {"2/bias"}, "path": {"2.bias"}}.get(by, {model[2].bias})
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    _, pairs = optimizer.minimize(loss_of(model, batches()[0]), None, wanted, without)
    assert [variable for variable, _ in pairs] == [model[0].weight]
    changed = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
    assert changed == ["0.weight"]


def test_without_a_module_variables_are_numbered():
    model = net()
    _, pairs = distributed(sgd(model)).minimize(loss_of(model, batches()[0]), parameter_list=["variable_1"])
    assert [variable for variable, _ in pairs] == [model[0].bias]


def test_callbacks_see_every_pair():
    model, seen = net(), []
    optimizer = distributed(sgd(model))
    pairs = optimizer.backward(loss_of(model, batches()[0]), callbacks=[lambda *pair: seen.append(pair)])
    assert [one[0] for one in seen] == [one[0] for one in pairs]
    assert all(one is other for (_, one), (_, other) in zip(seen, pairs))


def test_frozen_and_unused_variables_are_left_out():
    model, unused = net(), nn.Parameter(torch.ones(2))
    model[0].weight.requires_grad_(False)
    optimizer = distributed(torch.optim.SGD([*model.parameters(), unused], lr=0.1))
    _, pairs = optimizer.minimize(loss_of(model, batches()[0]))
    assert [variable for variable, _ in pairs] == [model[0].bias, model[2].weight, model[2].bias]
    assert torch.equal(unused, torch.ones(2))


def test_gradient_merge_moves_by_the_mean_when_it_is_time():
    ours, plain = net(), net()
    optimizer = distributed(sgd(ours), {"gradient_merge": 3})
    found = [len(optimizer.minimize(loss_of(ours, x))[0]) for x in batches(6)]
    theirs = sgd(plain)
    for start in (0, 3):
        theirs.zero_grad()
        for x in batches(6)[start : start + 3]:
            (loss_of(plain, x) / 3).backward()
        theirs.step()
    assert found == [0, 0, 4, 0, 0, 4]
    for one, other in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(one, other)


def test_a_factory_makes_the_optimizer_over_the_module():
    ours, plain = net(), net()
    optimizer = distributed(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), module=ours)
    theirs = sgd(plain)
    for x in batches():
        optimizer.minimize(loss_of(ours, x))
        theirs.zero_grad()
        loss_of(plain, x).backward()
        theirs.step()
    assert same(ours, plain)
    assert isinstance(optimizer.optimizer, torch.optim.SGD)


def test_plaits_own_factories():
    model = net()
    optimizer = distributed(get_optimizer_fn("adagrad", 0.5)(), module=model)
    before = loss_of(model, batches()[0]).item()
    for x in batches() * 5:
        optimizer.minimize(loss_of(model, x))
    assert loss_of(model, batches()[0]).item() < before / 2


def test_a_scheduler_of_torch_takes_the_wrapped_optimizer():
    model = net()
    optimizer = distributed(sgd(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in batches(4):
            optimizer.minimize(loss_of(model, x))
            scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.025


def test_recompute_gives_the_same_bits():
    ours, plain = net(), net()
    optimizer = distributed(sgd(ours), Distributed(recompute=["0"]), kind=GPUDistributedAlgorithm, module=ours)
    theirs = sgd(plain)
    for x in batches():
        optimizer.minimize(loss_of(ours, x))
        theirs.zero_grad()
        loss_of(plain, x).backward()
        theirs.step()
    assert "_Recomputed" in [base.__name__ for base in type(ours[0]).__mro__]
    assert same(ours, plain)


def test_bf16_computes_the_module_in_it_and_keeps_variables_whole():
    model = net()
    optimizer = distributed(sgd(model), {"precision": "bf16"}, kind=GPUDistributedAlgorithm, module=model)
    output = model(batches()[0])
    assert output.dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError):
        model(torch.ones(3))
    assert not torch.is_autocast_enabled("cpu")  # left also where the module fails
    _, pairs = optimizer.minimize(output.float().mean())
    assert {gradient.dtype for _, gradient in pairs} == {torch.float32}


def test_the_words_for_strategies():
    assert SyncModeConfig() == Distributed(mode="sync")
    assert HalfSyncModelConfig() == Distributed(mode="half_async")
    assert ASyncModelConfig() == Distributed(mode="async")
    assert GeoSGDModelConfig(7) == Distributed(mode="geo", geo_steps=7)
    assert settings_of(None) == settings_of({}) == Distributed()
    assert settings_of({"local_sgd": 4}) == Distributed(local_sgd=4)


@pytest.mark.parametrize("strategy", ["sync", 3, object()])
def test_a_strategy_of_a_wrong_type(strategy):
    with pytest.raises(ConfigError, match="write plait.cluster.Distributed"):
        settings_of(strategy)


def test_a_strategy_with_an_unknown_field():
    with pytest.raises(ConfigError, match="'sync_mode': it takes mode, gradient_merge"):
        settings_of({"sync_mode": True})


@pytest.mark.parametrize("optimizer", [None, 0.1, "sgd", net()])
def test_an_optimizer_of_a_wrong_type(optimizer):
    with pytest.raises(ConfigError, match=r"the optimizer is a \w+: write a torch.optim.Optimizer"):
        distributed(optimizer)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"recompute": ["0"]}, "recompute changes how a module computes"),
        ({"precision": "bf16"}, "precision changes"),
        ({"sync_batch_norm": True}, "sync_batch_norm changes"),
        ({"precision": "fp16"}, "write 'bf16'"),
        ({"fully_shard": True}, "write a function that makes it"),
    ],
)
def test_settings_that_need_more(strategy, words):
    with pytest.raises(ConfigError, match=words):
        distributed(sgd(net()), strategy, kind=GPUDistributedAlgorithm)


def test_a_factory_without_a_module():
    with pytest.raises(ConfigError, match="write module=model"):
        distributed(functools.partial(torch.optim.SGD, lr=0.1))


def test_a_module_without_the_optimizers_variables():
    with pytest.raises(VariableError, match=r"shape \(8, 4\) that module= does not have"):
        distributed(sgd(net()), module=net())


def test_a_module_that_is_none():
    with pytest.raises(ConfigError, match="module is a list"):
        distributed(sgd(net()), module=[net()])


def test_a_plain_tensor():
    with pytest.raises(ConfigError, match="make it an nn.Parameter"):
        distributed(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ([torch.ones(())], "a list: write a tensor"),
        (torch.ones(2, requires_grad=True), r"shape \(2,\): write one number"),
        (torch.ones(()), "depends on no variable"),
    ],
)
def test_losses_that_are_none(loss, words):
    with pytest.raises(ConfigError, match=words):
        distributed(sgd(net())).minimize(loss)


@pytest.mark.parametrize("pairs", [3, [3], [(1, 2)]])
def test_params_grads_that_are_none(pairs):
    with pytest.raises(ConfigError, match="params_grads"):
        distributed(sgd(net())).apply_gradients(pairs)


def test_a_stranger_among_params_grads():
    with pytest.raises(VariableError, match=r"shape \(2,\) that the optimizer lacks"):
        distributed(sgd(net())).apply_gradients([(nn.Parameter(torch.ones(2)), torch.ones(2))])


def test_names_that_are_none():
    model = net()
    optimizer = distributed(sgd(model), module=model)
    loss = loss_of(model, batches()[0])
    with pytest.raises(VariableError, match="'0/wieght', there is no such variable. Nearest: 0/weight"):
        optimizer.backward(loss, parameter_list=["0/wieght"])
    with pytest.raises(ConfigError, match="parameter_list is a str: write a list"):
        optimizer.backward(loss, parameter_list="0/weight")
    with pytest.raises(ConfigError, match="no variable is left"):
        optimizer.backward(loss, no_grad_set=set(model.parameters()))


def test_an_optimizer_without_an_algorithm():
    model = net()
    made = GeneralDistributedOptimizer(sgd(model))
    with pytest.raises(ConfigError, match="belongs to no algorithm: write algorithm.distributed_optimizer"):
        made.minimize(loss_of(model, batches()[0]))


def test_compiling_again_changes_nothing():
    model = net()
    optimizer = distributed(sgd(model), kind=GPUDistributedAlgorithm, module=model)
    strategy = optimizer._program.strategy
    assert optimizer._try_to_compile(None, model) is None
    assert optimizer._program.strategy is strategy
    assert optimizer._transpile(None, model) is None
