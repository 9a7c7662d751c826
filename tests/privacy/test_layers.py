"""The modules that own private variables."""

from __future__ import annotations

import torch
from torch import nn

from plait.privacy.layers import layers_of


def names(net, variables=None):
    found = layers_of(net, set(net.parameters()) if variables is None else set(variables))
    return {layer.name: list(layer.variables) for layer in found}


def test_modules_with_variables_of_their_own():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.LayerNorm(3)))
    assert names(net) == {"0": ["weight", "bias"], "2.0": ["weight", "bias"]}
    assert names(net, [net[0].bias]) == {"0": ["bias"]}
    assert names(nn.Linear(2, 3)) == {"Linear": ["weight", "bias"]}


def test_attention_uses_what_is_inside_it_without_calling_it():
    found = names(nn.MultiheadAttention(4, 2))
    assert found == {"MultiheadAttention": ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]}


def test_calls_are_noted_and_dropped():
    net = nn.PReLU()
    (layer,) = layers_of(net, set(net.parameters()))
    inputs = torch.randn(3, 2)
    layer.note((inputs,), {}, net(inputs))
    assert len(layer.calls) == len(layer.outputs) == 1
    layer.drop()
    assert layer.calls == layer.outputs == []


def test_autocast_is_noted_of_layers_that_are_computed_again():
    inputs = torch.randn(3, 2)
    for net, noted in ((nn.PReLU(), ("cpu", torch.bfloat16)), (nn.Linear(2, 2), None)):
        (layer,) = layers_of(net, set(net.parameters()))
        with torch.autocast("cpu", torch.bfloat16):
            layer.note((inputs,), {}, net(inputs))
        layer.note((inputs,), {}, net(inputs))
        assert [call.half for call in layer.calls] == [noted, None]
