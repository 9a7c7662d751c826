"""Every documented name, parameter and default, compared with the table in `tests/openks/conformance.py`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from plait import openks

SPEC = importlib.util.spec_from_file_location("openks_conformance", Path(__file__).with_name("conformance.py"))
table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(table)

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
EMPTY = inspect.Parameter.empty


def resolve(path):
    return functools.reduce(getattr, path.split("."), openks)


def parameters_of(path):
    """Parameters of a function, method or constructor, without self."""
    found = list(inspect.signature(resolve(path)).parameters.values())
    return found[1:] if found and found[0].name == "self" else found


@pytest.mark.parametrize("path", table.SIGNATURES)
def test_documented_parameters_come_first_and_in_order(path):
    names = [parameter.name for parameter in parameters_of(path) if parameter.kind in POSITIONAL]
    wanted = list(table.SIGNATURES[path])
    assert names[: len(wanted)] == wanted


@pytest.mark.parametrize("path", table.SIGNATURES)
def test_documented_defaults(path):
    found = {parameter.name: parameter.default for parameter in parameters_of(path)}
    for name, default in table.SIGNATURES[path].items():
        assert found[name] == (EMPTY if default == table.REQUIRED else default), name


@pytest.mark.parametrize("path", table.SIGNATURES)
def test_parameters_of_our_own_can_be_left_out(path):
    ours = [found for found in parameters_of(path) if found.name not in table.SIGNATURES[path]]
    assert [found.name for found in ours if found.default is EMPTY] == []


@pytest.mark.parametrize(("name", "base"), table.BASES.items())
def test_what_is_derived_from_what(name, base):
    assert issubclass(resolve(name), resolve(base))


def test_every_documented_class_is_in_the_door():
    assert {path.partition(".")[0] for path in table.SIGNATURES} <= set(openks.__all__)


def test_what_documented_calls_return():
    algorithm, model = openks.CPUDistributedAlgorithm(), nn.Linear(2, 1)
    assert algorithm.init(openks.PaddleCloudRoleMaker()) is None
    optimizer = algorithm.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(optimizer, openks.GeneralDistributedOptimizer)
    assert algorithm.init_worker() is None
    pairs = optimizer.backward(model(torch.ones(1, 2)).sum())
    assert [type(pair) for pair in pairs] == [tuple, tuple]
    assert type(optimizer.apply_gradients(pairs)) is list
    applied, pairs = optimizer.minimize(model(torch.ones(1, 2)).sum())
    assert (type(applied), type(pairs)) == (list, list)
    assert algorithm.barrier_workers() is None
    assert algorithm.all_reduce_worker([1], [0]) is None
    assert algorithm.split_files(["a"]) == ["a"]
    assert algorithm.stop_worker() is None
