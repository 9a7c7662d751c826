"""Embeddings: rows looked up once, often, and never."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.errors import ConfigError
from plait.privacy.recorder import Recorder

from .reference import KINDS, compare, squared


@pytest.mark.parametrize(("dtype", "count"), KINDS)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}])
@pytest.mark.parametrize("positions", [1, 6])
def test_embedding_and_mlp(dtype, count, options, positions):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(5, 4, **options), nn.Flatten(), nn.Linear(4 * positions, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    compare(net, torch.randint(0, 5, (16, positions)), dtype, count)


@pytest.mark.parametrize("count", [1, 8, 16])
def test_indices_without_positions_and_with_rows_second(count):
    torch.manual_seed(1)
    compare(nn.Sequential(nn.Embedding(5, 4)), torch.randint(0, 5, (16,)), torch.float64, count)
    compare(
        nn.Sequential(nn.Embedding(5, 4)),
        torch.randint(0, 5, (3, 16), dtype=torch.int32),
        torch.float64,
        count,
        lambda net, inputs: net(inputs).square().sum((0, 2)),
    )


def test_a_table_shared_with_the_last_layer_counts_once():
    torch.manual_seed(2)
    net = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 5, bias=False))
    net[2].weight = net[0].weight
    for count in (1, 8, 16):
        compare(net, torch.randint(0, 5, (16, 3)), torch.float64, count)


def test_counts_of_others_are_refused():
    net, inputs = nn.Embedding(5, 4, scale_grad_by_freq=True), torch.randint(0, 5, (4, 3))
    recorder = Recorder(net, [list(net.parameters())])
    with recorder.recording():
        losses = squared(net, inputs)
    with pytest.raises(ConfigError, match="scale_grad_by_freq"):
        recorder.check(losses)
