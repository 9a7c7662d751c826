"""Normalisations within a sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .reference import KINDS, compare

NETS = {
    "layer": (lambda: nn.LayerNorm(6), (16, 6)),
    "layer, positions": (lambda: nn.LayerNorm((5, 6)), (16, 3, 5, 6)),
    "layer, no bias": (lambda: nn.LayerNorm(6, bias=False), (16, 3, 6)),
    "rms": (lambda: nn.RMSNorm(6), (16, 3, 6)),
    "group": (lambda: nn.GroupNorm(2, 6), (16, 6, 3, 4)),
    "group, no map": (lambda: nn.GroupNorm(3, 6), (16, 6)),
    "instance": (lambda: nn.InstanceNorm2d(6, affine=True), (16, 6, 3, 4)),
    "instance, one dimension": (lambda: nn.InstanceNorm1d(6, affine=True), (16, 6, 5)),
    "batch, frozen": (lambda: nn.BatchNorm2d(6).eval(), (16, 6, 3, 4)),
    "batch, frozen, no map": (lambda: nn.BatchNorm1d(6).eval(), (16, 6)),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize(("dtype", "count"), KINDS)
def test_every_kind(name, dtype, count):
    torch.manual_seed(0)
    make, shape = NETS[name]
    net = nn.Sequential(make())
    for variable in net.parameters():
        nn.init.normal_(variable)
    assert compare(net, torch.randn(shape) * 2 + 1, dtype, count) == {"0": "direct"}


@pytest.mark.parametrize(("dtype", "count"), KINDS)
def test_group_norm_network(dtype, count):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip
    compare(net, torch.randn(16, 2, 10, 10), dtype, count)


def test_rows_second():
    torch.manual_seed(2)
    for net in (nn.Sequential(nn.LayerNorm(6)), nn.Sequential(nn.RMSNorm(6))):
        compare(net, torch.randn(3, 16, 6), torch.float64, 8, lambda net, inputs: net(inputs).pow(3).sum((0, 2)))
