"""Convolutions of one, two and three dimensions, with every option."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.privacy.rules import convolution as rule

from .reference import KINDS, compare

OPTIONS = [
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 2, "stride": 3},
    {"kernel_size": 3, "dilation": 2, "padding": 2, "bias": False},
    {"kernel_size": 3, "groups": 2, "stride": 2},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 3, "padding": "valid", "groups": 4},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": "same", "padding_mode": "circular", "dilation": 2},
]
SIZES = {nn.Conv1d: (9,), nn.Conv2d: (8, 7), nn.Conv3d: (5, 6, 5)}


@pytest.fixture(params=["ghost", "direct", "grouped", "in parts"])
def path(request, monkeypatch):
    """Every way for all shapes, also where another one would be chosen."""
    monkeypatch.setattr(rule, "ghost_pays", lambda *_: request.param == "ghost")
    if request.param == "grouped":
        monkeypatch.setattr(rule, "MOST_UNFOLDED", 0)
    if request.param == "in parts":  # as on a GPU
        monkeypatch.setattr(rule, "LEAST_PART", 1)
        monkeypatch.setattr(rule.Convolution, "squares", rule.Convolution._squares_in_parts)
    return "ghost" if request.param == "ghost" else "direct"


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", SIZES)
def test_every_option(path, options, kind):
    torch.manual_seed(0)
    net = nn.Sequential(kind(4, 8, **options))
    for count in (4, 8):
        assert compare(net, torch.randn(8, 4, *SIZES[kind]), torch.float64, count) == {"0": path}


@pytest.mark.parametrize(("dtype", "count"), KINDS)
def test_network(path, dtype, count):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 8, 2, 3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(4, 6, 4, 2), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(6 * 9, 3),
    )  # fmt: skip
    compare(net, torch.randn(16, 1, 20, 20), dtype, count)


def test_small_maps_of_many_channels_go_without_gradients():
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1))
    assert compare(net, torch.randn(8, 64, 2, 2), torch.float64, 8) == {"0": "ghost"}
    assert compare(nn.Sequential(nn.Conv2d(1, 4, 3)), torch.randn(8, 1, 12, 12), torch.float64, 8) == {"0": "direct"}


def test_channels_last():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 2))
    compare(net, torch.randn(16, 4, 9, 9).to(memory_format=torch.channels_last), torch.float64, 8)
