"""Recurrent layers and cells."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from plait.errors import ConfigError
from plait.privacy.recorder import Recorder

from .reference import KINDS, First, compare

KINDS_OF_LAYER = {
    "rnn": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "lstm": nn.LSTM,
    "gru": nn.GRU,
}
OPTIONS = [
    {"num_layers": layers, "bidirectional": both, "batch_first": first, "bias": bias}
    for layers, both, first, bias in itertools.product([1, 2], [False, True], [False, True], [True, False])
]


def everything(net, inputs):
    """A loss of outputs over time and of the last states."""
    rows = 1 - int(net[0].batch_first)
    outputs, states = net[0](inputs)
    states = states if isinstance(states, tuple) else (states,)
    each = outputs.movedim(rows, 0).square().flatten(1).sum(1)
    return each + sum(state.movedim(1, 0).flatten(1).pow(3).sum(1) for state in states)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS_OF_LAYER)
def test_every_option(kind, options):
    torch.manual_seed(0)
    net = nn.Sequential(KINDS_OF_LAYER[kind](3, 4, **options))
    inputs = torch.randn(16, 5, 3) if options["batch_first"] else torch.randn(5, 16, 3)
    compare(net, inputs, torch.float64, 8, everything)


@pytest.mark.parametrize(("dtype", "count"), KINDS)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_network(kind, dtype, count):
    torch.manual_seed(1)
    net = nn.Sequential(KINDS_OF_LAYER[kind](3, 8, batch_first=True), First(), nn.Flatten(), nn.Linear(40, 3))
    compare(net, torch.randn(16, 5, 3), dtype, count)


@pytest.mark.parametrize("kind", KINDS_OF_LAYER)
def test_a_state_to_start_with(kind):
    torch.manual_seed(2)
    net, start = nn.Sequential(KINDS_OF_LAYER[kind](3, 4, num_layers=2)), torch.randn(2, 16, 4, dtype=torch.float64)

    def losses(net, inputs):
        given = (start, -start) if kind == "lstm" else start
        return net[0](inputs, hx=given)[0].square().sum((0, 2))

    compare(net, torch.randn(5, 16, 3), torch.float64, 16, losses)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("count", [1, 8, 16])
def test_cells_that_are_called_again_and_again(kind, count):
    torch.manual_seed(3)
    net = nn.Sequential(kind(3, 4))

    def losses(net, inputs):
        state = None
        for part in inputs.unbind(1):
            state = net[0](part, state)
        states = state if isinstance(state, tuple) else (state,)
        return sum(one.square().sum(1) for one in states)

    compare(net, torch.randn(16, 5, 3), torch.float64, count, losses)


def refused(net, inputs, message):
    recorder = Recorder(net, [list(net.parameters())])
    with recorder.recording():
        losses = net(inputs)[0]
        losses = losses.data if isinstance(losses, nn.utils.rnn.PackedSequence) else losses
    with pytest.raises(ConfigError, match=message):
        recorder.check(losses.flatten(1).sum(1))


def test_dropout_between_layers_is_refused():
    refused(nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True), torch.randn(4, 5, 3), "dropout=0")


def test_packed_sequences_are_refused():
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 1, 3), torch.ones(4), batch_first=True)
    refused(nn.LSTM(3, 4, batch_first=True), packed, "padded tensor")


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_projected_lstm_is_refused():
    refused(nn.LSTM(3, 4, proj_size=2, batch_first=True), torch.randn(4, 5, 3), "no rule")
