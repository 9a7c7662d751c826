from __future__ import annotations

import torch
from torch import nn

from plait import efl
from plait.engine.layout import compile_modules, lay_channels_last


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
