"""Linear layers, in every layout of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .reference import KINDS, compare, squared


@pytest.mark.parametrize(("dtype", "count"), KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_mlp(dtype, count, bias):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 16, bias=bias), nn.ReLU(inplace=True), nn.Linear(16, 5, bias=bias))
    compare(net, torch.randn(16, 20), dtype, count)


@pytest.mark.parametrize(("dtype", "count"), KINDS)
@pytest.mark.parametrize("layout", ["rows first", "rows second", "merged"])
def test_positions(dtype, count, layout):
    torch.manual_seed(1)
    net, inputs = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), torch.randn(16, 5, 6)

    def losses(net, inputs):
        if layout == "rows first":
            return squared(net, inputs)
        if layout == "rows second":
            return net(inputs.transpose(0, 1)).square().sum((0, 2))
        return net(inputs.reshape(-1, 6)).view(16, 5, 3).square().sum((1, 2))

    compare(net, inputs, dtype, count, losses)


@pytest.mark.parametrize("positions", [2, 200])
def test_few_positions_go_without_gradients_and_many_with_them(positions):
    torch.manual_seed(2)
    path = compare(nn.Sequential(nn.Linear(8, 8)), torch.randn(16, positions, 8), torch.float64, 16)
    assert path == {"0": "ghost" if positions == 2 else "direct"}


def test_frozen_variables_are_left_out():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    net[0].weight.requires_grad_(False)
    net[1].bias.requires_grad_(False)
    compare(net, torch.randn(16, 6), torch.float64, 8)
