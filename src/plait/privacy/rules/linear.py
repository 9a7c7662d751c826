"""Linear layers: a gradient is an outer product of what went in and the gradient of what came out."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from plait.privacy.rules.call import Call
from plait.privacy.rules.terms import Dense, Outer, Term, wide

__all__ = ["linear"]


def linear(layer: nn.Linear, call: Call, names: Collection[str]) -> dict[str, Term]:
    inputs, outputs = call.input.detach(), call.gradient
    if outputs.dim() == 2 and len(outputs) == call.microbatches:
        inputs, outputs = wide(inputs), wide(outputs)
        summed = Dense(outputs)
    else:
        inputs, outputs = call.positions(inputs, layer.in_features), call.positions(outputs, layer.out_features)
        summed = Dense(outputs.sum(1))
    terms: dict[str, Term] = {}
    if "weight" in names:
        terms["weight"] = Outer(inputs, outputs, summed)
    if "bias" in names:
        terms["bias"] = summed
    return terms
