from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.engine.layout import compile_modules, laid_like, lay_back_if_refused, lay_channels_last
from plait.errors import ConfigError


def test_weights_of_convolutions_lie_as_nhwc_with_the_same_values():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    before = [parameter.clone() for parameter in net.parameters()]
    lay_channels_last(net)
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(one, other) for one, other in zip(net.parameters(), before, strict=True))


class Viewing(nn.Module):
    """The most usual way to flatten, which channels-last maps do not allow."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv, self.out = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 25, 2)

    def forward(self, x):
        x = nn.functional.dropout(self.conv(self.norm(x)), 0.5, self.training)
        return self.out(x.view(x.size(0), -1))


def viewing(channels_last, strategy=None):
    torch.manual_seed(0)
    model = efl.Model()
    model.net = Viewing()
    x = torch.randn(32, 3, 5, 5)
    model.input_fn(lambda model, mode: plait.data.TensorSource({"x": x, "y": torch.arange(32) % 2}, 8))
    model.loss_fn(lambda model, sample: nn.functional.cross_entropy(model.net(sample.x), sample.y))
    model.eval_fn(lambda model, sample: model.net(sample.x))
    opt = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(opt))
    return model.compile(session_config={"device": "cpu", "channels_last": channels_last}, strategy=strategy)


def test_a_view_that_refuses_channels_last_maps_gets_the_weights_back_and_the_same_training(caplog):
    plain, model = viewing(None), viewing(True)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        viewing(True).fit(efl.procedure_fn.train())
    lay_back_if_refused(model)
    for one in (plain, model):
        torch.manual_seed(5)
        one.fit(efl.procedure_fn.train())
    assert "a view() of their maps" in caplog.text
    assert model.net.conv.weight.is_contiguous()
    assert not model.net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    for one in model.optimizers():
        assert all(state["momentum_buffer"].stride() == v.stride() for v, state in one.state.items())


def test_a_call_that_is_repeated_collects_once():
    model = efl.Model()
    model.net = nn.Linear(2, 1)
    model.input_fn(lambda model, mode: plait.data.TensorSource({"x": torch.ones(32, 2)}, 8))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda params: torch.optim.SGD(params, lr=0.1)))
    seen = []

    def loss(model, sample):
        plait.add_to_collection("losses", sample.x.sum())
        seen.append(len(plait.get_collection("losses")))
        if len(seen) == 2:
            raise RuntimeError("view size is not compatible with input tensor's size and stride")
        return model.net(sample.x).mean()

    model.loss_fn(loss)
    model.compile(session_config={"device": "cpu"})
    lay_back_if_refused(model)
    model.fit(efl.procedure_fn.train())
    assert seen == [1] * len(seen)
    assert len(seen) == 6  # the build, the first step twice, three more


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
