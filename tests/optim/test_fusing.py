from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.optim import fusing
from plait.optim.fusing import fuse


def fused(factory, net):
    optimizer = factory(net.parameters())
    fuse(net, [optimizer])
    return [group.get("fused") for group in optimizer.param_groups]


@pytest.fixture
def on_gpu(monkeypatch):
    """Parameters are taken for such that are on a GPU."""
    monkeypatch.setattr(fusing, "_is_plain", lambda variable: isinstance(variable, nn.Parameter))


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
