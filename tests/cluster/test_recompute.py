from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import plait
from plait.cluster.recompute import recompute
from plait.engine.model import Model
from plait.errors import ConfigError
from plait.nets.blocks import Conv, Norm, Recipe, he_normal
from plait.nets.family import Shape
from plait.nets.resnet import create
from plait.optim.assign import optimizer_setter


class Noisy(nn.Module):
    """Draws from every generator, and counts its calls both in place and by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("new_calls", torch.zeros(()))
        self.mix = nn.Linear(6, 6)

    def forward(self, x, *, power=1.0):
        self.calls += 1
        self.new_calls = self.new_calls + 1
        x = functional.dropout(self.mix(x), 0.5) * (1 + self.calls) + self.new_calls
        return x * random.random() + np.random.rand() ** power  # noqa: NPY002 - the global state is meant


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        renorm = Recipe(norm=Norm(decay=0.9, renorm=True), init=he_normal)
        self.one = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
        self.two = nn.Sequential(Conv(4, 6, 3, renorm), nn.BatchNorm2d(6, momentum=None), nn.Tanh())
        self.three = Noisy()
        self.list = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1)])

    def forward(self, x):
        x = self.three(self.two(self.one(x)).mean((2, 3)), power=2.0)
        for layer in self.list:
            x = layer(x)
        return x


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global state is meant
    torch.manual_seed(seed)


def trained(model, steps=5):
    seed_all(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 2, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])  # noqa: NPY002 - same
    return {"losses": torch.stack(losses), "drawn": drawn, **model.state_dict()}


def twins(make=Tower):
    torch.manual_seed(0)
    plain = make()
    return plain, copy.deepcopy(plain)


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def saved_bytes(run):
    """Bytes that the forward pass keeps for the backward pass, parameters aside."""
    kept = {}

    def keep(tensor):
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(kept.values())


def classes(model):
    return {path for path, module in model.named_modules() if type(module).__mro__[1].__name__ == "_Recomputed"}


@pytest.mark.parametrize("scopes", [["one"], ["one", "two", "three"], ["*"], ["list"], ["t*", "list/0"]])
def test_training_is_the_same_bit_for_bit(scopes):
    plain, ours = twins()
    recompute(ours, scopes)
    assert classes(ours)
    assert_same(trained(ours), trained(plain))
    assert ours.three.calls == 5


def test_less_is_kept():
    plain, ours = twins()
    recompute(ours, ["one", "two"])
    x = torch.randn(5, 2, 8, 8)
    assert saved_bytes(lambda: ours(x)) < 0.4 * saved_bytes(lambda: plain(x))


def test_in_evaluation_and_without_gradients_nothing_is_recomputed(monkeypatch):
    calls = []
    monkeypatch.setattr("plait.cluster.recompute.checkpoint", lambda fn, *args, **kw: calls.append(1) or fn(*args))
    _, ours = twins()
    recompute(ours, ["one"])
    x = torch.randn(5, 2, 8, 8)
    with torch.no_grad():
        ours(x)
    ours.eval()(x)
    assert calls == []
    ours.train()(x)
    assert calls == [1]


def test_names_kinds_and_copies_stay():
    plain, ours = twins()
    parts = dict(ours.named_modules())
    recompute(ours, ["one", "list/*"])
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert all(module is parts[path] for path, module in ours.named_modules())
    assert isinstance(ours.one, nn.Sequential)
    assert repr(ours) == repr(plain)
    assert_same(trained(copy.deepcopy(ours)), trained(plain))


@pytest.mark.parametrize(
    ("scopes", "paths"),
    [
        (["two"], {"two"}),
        (["two", "two/0", "two/*"], {"two"}),
        (["list"], {"list.0", "list.1"}),
        (["list/"], {"list.0", "list.1"}),
        (["t*"], {"two", "three"}),
        (["two/0/BatchNorm"], {"two.0.BatchNorm"}),
        ([], set()),
    ],
)
def test_what_a_scope_means(scopes, paths):
    _, ours = twins()
    recompute(ours, scopes)
    recompute(ours, scopes)
    assert classes(ours) == paths


@pytest.mark.parametrize("scope", ["tvo", "two/x*", "", "/"])
def test_a_scope_without_a_module_is_refused_with_near_names(scope):
    with pytest.raises(ConfigError, match=r"is the name of no module\. Nearest: .*(one|two)"):
        recompute(Tower(), [scope])


def test_a_scope_of_variables_only_is_refused():
    model = Model()
    with model.scope(), plait.variable_scope("bare"):
        plait.get_variable("w", [3])
    with pytest.raises(ConfigError, match="'bare', where there are only variables"):
        recompute(model, ["bare"])


def test_two_backward_passes_through_one_graph():
    results = []
    for again, model in zip((True, False), twins(), strict=True):
        if again:
            recompute(model, ["one", "two", "three"])
        seed_all(2)
        out = model(torch.randn(5, 2, 8, 8))
        variables = list(model.parameters())
        gradients = [
            torch.autograd.grad(loss, variables, retain_graph=True) for loss in (out.sum(), out.square().sum())
        ]
        results.append([*gradients[0], *gradients[1], *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_other_tensors_in_the_places_of_parameters():
    """As in MAML: when the gradient comes, the module has its own parameters back."""
    plain, ours = twins(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    recompute(ours, ["0", "2"])
    results = []
    for model in (ours, plain):
        weights = {name: (value * 2).detach().requires_grad_() for name, value in model.named_parameters()}
        loss = torch.func.functional_call(
            model, {name: w * 3 for name, w in weights.items()}, (torch.ones(2, 3),)
        ).sum()
        results.append(torch.autograd.grad(loss, list(weights.values())))
        assert all(isinstance(value, nn.Parameter) for value in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("half", [torch.bfloat16, None])
def test_precision_is_that_of_the_forward_pass(half):
    plain, ours = twins(lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 1)))
    recompute(ours, ["0"])
    for model in (ours, plain):
        with torch.autocast("cpu", dtype=half, enabled=half is not None):
            loss = model(torch.ones(2, 3)).sum()
        loss.float().backward()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_a_network_of_plait():
    plain, ours = twins(lambda: create("resnet_v1_20", Shape(classes=3, channels=3, height=16, width=16)))
    recompute(ours, ["block1", "block2/unit_*"])
    assert len(classes(ours)) == 6
    results = []
    for model in (ours, plain):
        logits, points = model(torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16))
        (
            logits.square().sum() + points[next(name for name in points if name.endswith("block1/unit_2"))].sum()
        ).backward()
        results.append([*(value.grad for value in model.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Asks(nn.Module):
    """Makes a variable of its own where it is called."""

    def forward(self, x):
        return torch.tanh(x @ plait.get_variable("own", [4, 4]))


def fitted(scopes):
    model = Model(seed=3)

    def loss_fn(model, sample):
        with plait.variable_scope("tower"):
            x = plait.layer("fc", nn.Linear, 3, 4)(sample.x)
            x = plait.layer("norm", nn.BatchNorm1d, 4)(x)
            x = plait.layer("drop", nn.Dropout, 0.5)(x)
            x = plait.layer("asks", Asks)(x)
        return plait.layer("out", nn.Linear, 4, 1)(x).square().mean()

    def optimizer_fn(model, task):
        recompute(model, scopes)  # here, after the build and before the optimizers
        return optimizer_setter(lambda variables: torch.optim.SGD(variables, lr=0.1))(model, task)

    data = torch.arange(24.0).view(8, 3).sin()
    model.input_fn(lambda model, mode: [{"x": data}] * 5).loss_fn(loss_fn).optimizer_fn(optimizer_fn)
    model.compile()
    torch.manual_seed(4)
    with plait.Session(model) as session:
        for _ in range(5):
            session.run(model.train_op())
    return model


def test_modules_made_where_they_are_used():
    ours, plain = fitted(["tower", "out"]), fitted([])
    assert classes(ours) == {
        f"_scoped.{name}" for name in ("tower.fc", "tower.norm", "tower.drop", "tower.asks", "out")
    }
    assert_same(ours.variables(), plain.variables())
    assert ours.variables()["tower/norm/num_batches_tracked"] == 5
