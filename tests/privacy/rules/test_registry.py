"""Which rule is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.privacy.rules.linear import linear
from plait.privacy.rules.registry import ANYTHING, RULES, rule_of


def test_a_layer_goes_by_the_rule_of_its_kind():
    assert rule_of(nn.Linear(2, 2), ["weight", "bias"]).terms is linear
    assert rule_of(nn.PReLU(), ["weight"]) is ANYTHING


def test_a_subclass_goes_by_it_only_if_it_computes_the_same():
    class Named(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * 2

    assert rule_of(Named(2, 2), ["weight"]).terms is linear
    assert rule_of(Other(2, 2), ["weight"]) is ANYTHING


def test_a_layer_that_was_given_another_forward_goes_by_none():
    layer = nn.Linear(2, 2)
    layer.forward = lambda inputs: inputs @ layer.weight
    assert rule_of(layer, ["weight"]) is ANYTHING


def test_variables_that_a_rule_does_not_know_go_by_none():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.scale = nn.Parameter(torch.ones(1))

    assert rule_of(Scaled(), ["weight", "scale"]) is ANYTHING
    assert rule_of(nn.LSTM(2, 4, proj_size=2), ["weight_hr_l0"]) is ANYTHING


@pytest.mark.parametrize("kind", RULES)
def test_every_rule_knows_where_rows_are(kind):
    layer = nn.LSTM(2, 2, batch_first=True) if issubclass(kind, nn.RNNBase) else None
    assert RULES[kind].rows_dims(layer, 1) == [0]
