"""The functions that work on each number by itself are those that torch's own activations are made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.export import tf_pointwise  # noqa: F401 - it fills the table
from plait.export.program import in_evaluation, trace
from plait.export.tf_values import OPS


@pytest.mark.parametrize(
    "layer", [nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.ReLU6(), nn.LeakyReLU(), nn.Mish(), nn.Softplus()], ids=str
)
def test_activations_are_made_of_functions_that_keep_any_layout(layer):
    with in_evaluation(layer):
        program = trace(layer, {"input": torch.ones(2, 3)})
    used = [str(node.target) for node in program.core.graph.nodes if node.op == "call_function"]
    assert used
    assert {OPS[name].layout for name in used} == {"pointwise"}
