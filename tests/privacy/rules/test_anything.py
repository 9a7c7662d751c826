"""Layers without a rule of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.privacy.rules.anything import possible_splits
from plait.privacy.rules.call import Call

from .reference import KINDS, First, compare


class Scaled(nn.Module):
    """Variables of its own around a layer."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner, self.shift = nn.Parameter(torch.rand(5)), nn.Linear(6, 5), nn.Parameter(torch.rand(5))

    def forward(self, inputs, power=1):
        return self.inner(inputs).pow(power) * self.scale + self.shift


class Heads(nn.Module):
    """Attention with itself, and with a mask or without."""

    def __init__(self, first, mask=None, **options):
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, batch_first=first, **options)
        self.first, self.mask = first, mask

    def forward(self, inputs):
        found, _ = self.heads(inputs, inputs, inputs, attn_mask=self.mask)
        return found if self.first else found.transpose(0, 1)


@pytest.mark.parametrize(("dtype", "count"), KINDS)
def test_modules_with_parameters_of_their_own(dtype, count):
    torch.manual_seed(0)
    net = nn.Sequential(Scaled(), nn.PReLU(5), nn.Linear(5, 3))
    taken = compare(net, torch.randn(16, 6), dtype, count)
    assert taken == {"0": "vmap", "0.inner": taken["0.inner"], "1": "vmap", "2": taken["2"]}


def test_arguments_by_name():
    torch.manual_seed(1)
    compare(Scaled(), torch.randn(16, 6), torch.float64, 8, lambda net, x: net(inputs=x, power=3).sum(1))


@pytest.mark.parametrize("count", [1, 8, 16])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_attention(count, first, masked):
    torch.manual_seed(2)
    mask = torch.ones(5, 5).triu(1).bool() if masked else None
    inputs = torch.randn(16, 5, 8) if first else torch.randn(5, 16, 8)
    assert compare(Heads(first, mask), inputs, torch.float64, count)["heads"] == "vmap"


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", ["transposed", "bilinear"])
def test_other_kinds(kind):
    torch.manual_seed(3)
    if kind == "transposed":
        compare(nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2)), torch.randn(16, 3, 4, 4), torch.float64, 8)
    else:
        net = nn.Bilinear(6, 6, 4)
        compare(net, torch.randn(16, 6), torch.float64, 8, lambda net, x: net(x, x.tanh()).square().sum(1))


def test_several_outputs_of_which_some_are_not_used():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(6))

        def forward(self, inputs):
            return inputs * self.scale, {"unused": self.scale * inputs.sum(1, keepdim=True), "count": 3}

    compare(nn.Sequential(Two(), First()), torch.randn(16, 6), torch.float64, 8)


def test_a_transformer():
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    taken = compare(nn.Sequential(layer), torch.randn(16, 5, 8), torch.float64, 16)
    assert set(taken) == {"0.self_attn", "0.linear1", "0.linear2", "0.norm1", "0.norm2"}


def test_what_has_as_many_rows_as_the_batch_may_have_them_or_not():
    inputs, table = torch.randn(4, 6, requires_grad=True), torch.randn(4, 4)
    call = Call((inputs, table), {"power": 2}, [inputs * 2])
    call.take([inputs], [0], 4, 4)
    key, possible = possible_splits(call)
    assert possible == [[0, 0, None], [0, None, None]]
    call.splits = {key: [0, None, None]}
    assert possible_splits(call) == (key, [[0, None, None]])
