from __future__ import annotations

import inspect

import pytest
import torch

from plait.engine import strategy
from plait.engine.strategy import Local, Strategy, default_strategy, set_default_strategy


def test_one_process_is_the_chief_and_saves():
    assert (Local().worker_id, Local().worker_num, Local().is_saver()) == (0, 1, True)


@pytest.mark.parametrize("how", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("value", [3, 0.5, [1, 2], {"a": 1}])
def test_alone_a_value_is_its_own_combination(how, value):
    assert Local().reduce(value, how) == value


@pytest.mark.parametrize(("value", "expected"), [(3, [3]), ([1, 2], [1, 2]), ("a", ["a"])])
def test_concat_gives_a_list(value, expected):
    assert Local().reduce(value, "concat") == expected


def test_concat_of_a_tensor_is_the_tensor():
    tensor = torch.arange(3)
    assert Local().reduce(tensor, "concat") is tensor


def test_nothing_is_changed_and_nobody_waited_for():
    variable = torch.ones(2, requires_grad=True)
    variable.grad = torch.ones(2)
    local = Local()
    local.reduce_gradients([variable])
    local.broadcast([variable])
    local.barrier("a", 1e9)
    assert variable.tolist() == variable.grad.tolist() == [1, 1]
    assert local.tell("a") == "a"


def test_alone_everything_is_here_whole_and_this_workers():
    local, source = Local(), [1]
    assert local.part(source, training=True) is source
    assert (local.in_step, local.whole(), local.gather({"a": 1}), local.choose("b")) == (False, True, [{"a": 1}], "b")
    assert (local.mover(None, None, []), local.jumped(), local.capture(None, None)) == (None, 0, {})


def test_gradients_may_be_merged_alone():
    assert (Local().gradient_merge, Local(4).gradient_merge) == (1, 4)


def test_a_model_that_is_given_no_strategy_gets_the_default_one(monkeypatch):
    monkeypatch.setattr(strategy, "_default", [strategy._alone])
    assert isinstance(default_strategy(), Local)
    set_default_strategy(lambda replicas: ("made for", replicas))
    assert default_strategy(3) == ("made for", 3)


def test_local_has_every_method_of_the_protocol_with_its_parameters():
    methods = {name: fn for name, fn in vars(Strategy).items() if inspect.isfunction(fn) and not name.startswith("_")}
    assert {"begin", "part", "mover", "leave", "gather", "settle", "capture", "restore"} < set(methods)
    for name, method in methods.items():
        assert list(inspect.signature(getattr(Local, name)).parameters) == list(inspect.signature(method).parameters)
