from __future__ import annotations

import pytest
import torch
from torch import nn

from plait import efl
from plait.engine import layout
from plait.engine.layout import compile_modules, fuse, laid_like, lay_channels_last
from plait.errors import ConfigError


def test_weights_of_convolutions_lie_as_nhwc_with_the_same_values():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    before = [parameter.clone() for parameter in net.parameters()]
    lay_channels_last(net)
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), before, strict=True))


def test_the_outermost_modules_that_compute_are_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))  # noqa: PLW0108 - a method
    model = efl.Model()
    model.tower = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    compile_modules(model)
    assert compiled == [model.tower, *model.parts]


def test_a_compiled_model_trains_as_always():
    def trained(**config):
        torch.manual_seed(0)
        model = efl.Model()
        model.net = nn.Linear(4, 2)
        model.input_fn(lambda model, mode: [(torch.ones(3, 4), torch.zeros(3, 2))] * 4)
        model.loss_fn(lambda model, sample: (model.net(sample[0]) - sample[1]).square().mean())
        model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda params: torch.optim.SGD(params, lr=0.1)))
        model.compile(session_config={"device": "cpu", **config})
        if config:
            model.net._compiled_call_impl = torch.compile(model.net._call_impl, backend="eager")
        model.fit(efl.procedure_fn.train())
        return model.net.weight.detach().clone()

    assert torch.equal(trained(), trained(compile=True))


@pytest.mark.parametrize("switch", ["compile", "capture"])
def test_compiled_modules_are_not_for_private_optimizers(switch):
    model = efl.Model()
    model.net = nn.Linear(4, 1)
    model.input_fn(lambda model, mode: [(torch.ones(3, 4),)] * 4)
    model.loss_fn(lambda model, sample: model.net(sample[0]).squeeze(1))
    private = efl.privacy.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, samples=12)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(private))
    with pytest.raises(ConfigError, match="Leave compile out"):
        model.compile(session_config={"device": "cpu", switch: True})


def fused(factory, net):
    optimizer = factory(net.parameters())
    fuse(net, [optimizer])
    return [group.get("fused") for group in optimizer.param_groups]


@pytest.fixture
def on_gpu(monkeypatch):
    """Parameters are taken for such that are on a GPU."""
    monkeypatch.setattr(layout, "_is_plain", lambda variable: isinstance(variable, nn.Parameter))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_on_a_gpu_move_all_in_one_kernel(kind):
    assert fused(lambda params: kind(params, lr=0.1), nn.Linear(2, 2)) == [True]


class Named(nn.Linear):
    """Has something of that name, which says nothing of gradients."""

    def sparse(self):
        return True


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("factory", "net", "how"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1, foreach=True), nn.Linear(2, 2), None),
        (lambda params: torch.optim.SGD(params, lr=0.1, fused=False), nn.Linear(2, 2), False),
        (lambda params: torch.optim.SGD(params, lr=0.1), nn.Embedding(3, 2, sparse=True), None),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1), nn.Linear(2, 2), None),
        (lambda params: torch.optim.RMSprop(params, lr=0.1), nn.Linear(2, 2), None),
        (lambda params: torch.optim.SGD(params, lr=0.1), Named(2, 2), True),
    ],
    ids=["foreach", "not fused", "sparse", "dampening", "has no such kernel", "named like a setting"],
)
def test_what_was_said_stays_and_what_cannot_be_is_not(factory, net, how):
    assert fused(factory, net) == [how]


def test_optimizers_on_the_cpu_stay_as_torch_has_them():
    assert fused(lambda params: torch.optim.SGD(params, lr=0.1), nn.Linear(2, 2)) == [None]


@pytest.mark.usefixtures("on_gpu")
def test_fused_momentum_is_the_same_whichever_variables_have_gradients():
    def moved(fuses):
        torch.manual_seed(0)
        net = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
        if fuses:
            fuse(net, [optimizer])
        for name in "aabab":  # at first, only some have gradients
            optimizer.zero_grad()
            net[name](torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in net.parameters()]

    for one, other in zip(moved(True), moved(False), strict=True):
        torch.testing.assert_close(one, other)


def test_values_are_laid_in_memory_as_their_variable_is():
    variable = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    value = torch.randn(2, 3, 4, 4)
    laid = laid_like(variable, value)
    assert laid.stride() == variable.stride()
    assert torch.equal(laid, value)
    assert laid_like(laid, laid) is laid
    assert laid_like(variable, torch.tensor(3.0)) == 3
    sparse = value.to_sparse()
    assert laid_like(variable, sparse) is sparse
