from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from plait import efl
from plait.engine.hooks import SessionRunHook
from plait.errors import ConfigError
from plait.optim import get_optimizer_fn, get_optimizer_wrapper_fn, piecewise_lr, rules
from plait.optim.factories import MAKERS, OptimizerFactory

NAMES = ["adadelta", "adagrad", "adam", "ftrl", "momentum", "rmsprop", "sgd"]
NEEDED = {"momentum": {"momentum": 0.9}}


def variable(size=2):
    return torch.arange(1.0, size + 1, dtype=torch.float64).requires_grad_()


def walk(optimizer, moved, steps, start=0):
    """Steps with gradients that change; returns the rates that were used."""
    rates = []
    for step in range(start, start + steps):
        moved.grad = torch.cos(step + torch.arange(moved.numel(), dtype=moved.dtype))
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def made(name, *args, params=None, **kwargs):
    return get_optimizer_fn(name, *args, **kwargs)()([variable()] if params is None else params)


def test_the_documented_names_are_all_there():
    assert list(MAKERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_moves_its_variables(name):
    moved = variable()
    optimizer = made(name, 0.1, params=[moved], **NEEDED.get(name, {}))
    walk(optimizer, moved, 3)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not torch.equal(moved, variable())


def settings_of(optimizer, names):
    return {name: optimizer.param_groups[0][name] for name in names}


@pytest.mark.parametrize(
    ("name", "kind", "defaults"),
    [
        ("adadelta", torch.optim.Adadelta, {"rho": 0.95, "eps": 1e-8, "weight_decay": 0.0}),
        ("adagrad", torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "eps": 0.0, "lr_decay": 0}),
        ("adam", rules.Adam, {"betas": (0.9, 0.999), "eps": 1e-8}),
        ("ftrl", rules.Ftrl, {"learning_rate_power": -0.5, "initial_accumulator_value": 0.1, "l1": 0.0, "l2": 0.0}),
        ("momentum", torch.optim.SGD, {"momentum": 0.9, "nesterov": False, "dampening": 0}),
        ("rmsprop", rules.RMSProp, {"alpha": 0.9, "momentum": 0.0, "eps": 1e-10, "centered": False}),
        ("sgd", torch.optim.SGD, {"momentum": 0, "weight_decay": 0.0}),
    ],
)
def test_tensorflows_defaults(name, kind, defaults):
    optimizer = made(name, 0.5, **NEEDED.get(name, {}))
    assert type(optimizer) is kind
    assert settings_of(optimizer, defaults) == defaults


@pytest.mark.parametrize(
    ("name", "tensorflow", "torchs", "expected"),
    [
        ("adadelta", {"rho": 0.8, "epsilon": 1e-3}, {"rho": 0.8, "eps": 1e-3}, {"rho": 0.8, "eps": 1e-3}),
        ("adagrad", {"initial_accumulator_value": 0.3}, None, {"initial_accumulator_value": 0.3}),
        (
            "adam",
            {"beta1": 0.5, "beta2": 0.6, "epsilon": 0.1},
            {"betas": (0.5, 0.6), "eps": 0.1},
            {"betas": (0.5, 0.6), "eps": 0.1},
        ),
        (
            "ftrl",
            {"l1_regularization_strength": 0.1, "l2_regularization_strength": 0.2, "beta": None},
            {"l1": 0.1, "l2": 0.2},
            {"l1": 0.1, "l2": 0.2, "beta": 0.0},
        ),
        (
            "momentum",
            {"momentum": 0.9, "use_nesterov": True, "use_locking": True},
            {"momentum": 0.9, "nesterov": True},
            {"momentum": 0.9, "nesterov": True},
        ),
        ("rmsprop", {"decay": 0.7, "centered": True}, {"alpha": 0.7, "centered": True}, {"alpha": 0.7}),
        ("sgd", {}, {"weight_decay": 0.1}, {}),
    ],
)
def test_both_spellings(name, tensorflow, torchs, expected):
    for given in filter(lambda one: one is not None, (tensorflow, torchs)):
        assert settings_of(made(name, 0.1, **given), expected) == expected


def test_positions_are_tensorflows():
    assert settings_of(made("adam", 0.1, None, 0.5, 0.6, 0.01), ["betas", "eps"]) == {"betas": (0.5, 0.6), "eps": 0.01}
    assert made("momentum", 0.1, None, 0.7).param_groups[0]["momentum"] == 0.7
    assert settings_of(made("rmsprop", 0.1, None, 0.8, 0.9), ["alpha", "momentum"]) == {"alpha": 0.8, "momentum": 0.9}


def test_the_scope_and_the_settings_stand_on_the_factory():
    factory = get_optimizer_fn("adam", 0.1, "tower", beta1=0.5)()
    assert isinstance(factory, OptimizerFactory)
    assert factory.scope == "tower"
    assert repr(factory) == "adam(learning_rate=0.1, beta1=0.5, scope='tower')"
    assert get_optimizer_fn("sgd", 0.1)().scope is None


def test_every_call_gives_a_factory_of_its_own_since_tasks_share_by_identity():
    function = get_optimizer_fn("sgd", 0.1)
    assert function() is not function()
    assert function() != function()


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (("adamw", 0.1), {}, "there is no optimizer 'adamw': there are adadelta, adagrad, adam, ftrl, momentum"),
        (("adam", 0.1), {"foo": 1}, r"'adam' has no argument 'foo': it takes beta1=0.9, beta2=0.999, epsilon=1e-08"),
        (("sgd", 0.1), {"momentum": 0.9}, r"has no argument 'momentum' \(momentum, rmsprop would take it\)"),
        (("sgd", 0.1), {"betas": (0.9, 0.9)}, "'sgd' has no argument 'betas'"),
        (("ftrl", 0.1), {"weight_decay": 0.1}, "'ftrl' has no argument 'weight_decay'"),
        (("momentum", 0.1), {}, "missing a required argument: 'momentum'; it takes momentum, use_nesterov=False"),
        (("adagrad", 0.1, None, 1, 2), {}, "too many positional arguments; it takes initial_accumulator_value=0.1"),
        (("adam", 0.1), {"eps": 1, "epsilon": 1}, "'adam' got 'epsilon' twice"),
        (("adam", 0.1), {"betas": (0.9, 0.9), "beta1": 1}, "'adam' got 'beta1' twice"),
        (("adam", 0.1), {"betas": 0.9}, "betas is 0.9: write two numbers"),
        (("adam", 0.1), {"beta1": 1.5}, "optimizer 'adam': beta1 is 1.5"),
        (("adam", 0.1), {"beta1": "high"}, "optimizer 'adam': "),
        (("adadelta", 0.1), {"rho": 2.0}, "optimizer 'adadelta': .*rho"),
        (("adagrad", 0.1, None, 0.0), {}, "initial_accumulator_value is 0.0"),
        (("sgd", -0.1), {}, "the learning rate is -0.1: give a number from 0 up"),
        (("sgd", float("nan")), {}, "the learning rate is nan"),
        (("sgd", "0.1"), {}, "the learning rate is '0.1': give a number, or a function of the step"),
        (("sgd", True), {}, "the learning rate is True"),
        (("sgd", None), {}, "the learning rate is None"),
        (("sgd", lambda step: None), {}, "the learning rate of .*lambda.* is None"),
        (("ftrl", lambda step: 0.0), {}, "FTRL divides by it"),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_written(args, kwargs, text):
    with pytest.raises(ConfigError, match=text):
        get_optimizer_fn(*args, **kwargs)


@pytest.mark.parametrize("rate", [1, np.float32(1), np.float64(1), torch.tensor(1.0)])
def test_a_rate_becomes_a_plain_float(rate):
    found = made("sgd", rate).param_groups[0]["lr"]
    assert type(found) is float
    assert found == 1.0


def schedule(step):
    return np.float64(1 / (1 + step))


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_sets_the_rate_before_every_step(name):
    moved = variable()
    optimizer = made(name, schedule, params=[moved], **NEEDED.get(name, {}))
    assert optimizer.param_groups[0]["lr"] == 1.0
    rates = walk(optimizer, moved, 4)
    assert rates == [1, 1 / 2, 1 / 3, 1 / 4]
    assert {type(rate) for rate in rates} == {float}


def test_every_group_has_the_rate_of_the_schedule():
    optimizer = made("sgd", schedule, params=[{"params": [variable()]}, {"params": [variable()]}])
    walk(optimizer, variable(), 2)
    assert [group["lr"] for group in optimizer.param_groups] == [1 / 2, 1 / 2]


def test_a_clock_of_ones_own_tells_the_step():
    moved, now = variable(), [7]
    optimizer = made("sgd", schedule, params=[moved])
    optimizer.clock = lambda: now[0]
    assert walk(optimizer, moved, 1) == [1 / 8]
    now[0] = 3
    assert walk(optimizer, moved, 1) == [1 / 4]


def test_a_rate_that_a_schedule_may_not_give():
    moved = variable()
    optimizer = made("sgd", lambda step: 1.0 - step, params=[moved])
    walk(optimizer, moved, 2)
    with pytest.raises(ConfigError, match="the learning rate of .* is -1.0"):
        walk(optimizer, moved, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_went_through_json_goes_on_to_the_last_bit(name):
    def start():
        moved = variable()
        return moved, made(name, schedule, params=[moved], **NEEDED.get(name, {}))

    moved, optimizer = start()
    walk(optimizer, moved, 5)
    saved = optimizer.state_dict()
    tensors = {n: {k: v.clone() for k, v in s.items() if torch.is_tensor(v)} for n, s in saved["state"].items()}
    plain = {n: {k: v for k, v in s.items() if not torch.is_tensor(v)} for n, s in saved["state"].items()}
    groups, plain = json.loads(json.dumps([saved["param_groups"], list(plain.items())]))
    again, loaded = start()
    with torch.no_grad():
        again.copy_(moved)
    loaded.load_state_dict({"state": {n: {**tensors[n], **values} for n, values in plain}, "param_groups": groups})
    assert walk(optimizer, moved, 5, start=5) == walk(loaded, again, 5, start=5)
    assert torch.equal(moved, again)


class Stop(SessionRunHook):
    def __init__(self, at):
        self.left = at

    def after_run(self, run_context, run_values):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


class Line(efl.Model):
    def __init__(self, factory):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1)
        random = torch.Generator().manual_seed(1)
        batches = [{"x": torch.randn(4, 3, generator=random)} for _ in range(30)]
        self.input_fn(lambda model, mode: batches)
        self.loss_fn(lambda model, sample: (model.line(sample.x) - sample.x.sum(1, keepdim=True)).square().mean())
        self.optimizer_fn(efl.optimizer_fn.optimizer_setter(factory)).compile()

    def weights(self):
        return [value.detach().clone() for value in self.parameters()]


RATES = piecewise_lr("9:0.01->0.1", num_samples=4, global_batch_size=1)
STACKS = {name: get_optimizer_fn(name, RATES, **NEEDED.get(name, {})) for name in NAMES}
LARS = get_optimizer_wrapper_fn("lars", STACKS["momentum"](), ratio=0.1)()
STACKS["stack"] = get_optimizer_wrapper_fn("batch_gradients", LARS, num_batches=4)


@pytest.mark.parametrize("stack", STACKS)
def test_a_training_that_is_cut_off_and_goes_on_ends_with_the_same_bits(stack, tmp_path):
    whole = Line(STACKS[stack]())
    whole.fit(efl.procedure_fn.train(20))
    cut = Line(STACKS[stack]())
    with pytest.raises(KeyboardInterrupt):
        cut.fit(efl.procedure_fn.train(20), checkpoint_dir=tmp_path, save_steps=1, hooks=[Stop(11)])
    again = Line(STACKS[stack]())
    again.fit(efl.procedure_fn.train(20), checkpoint_dir=tmp_path)
    assert again.global_step.value == 20
    assert all(torch.equal(a, b) for a, b in zip(whole.weights(), again.weights(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(cut.weights(), again.weights(), strict=True))
