"""Which rule a layer goes by."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn

from plait.privacy.rules.anything import anything
from plait.privacy.rules.call import Call
from plait.privacy.rules.convolution import convolution
from plait.privacy.rules.embedding import embedding
from plait.privacy.rules.linear import linear
from plait.privacy.rules.normalisation import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from plait.privacy.rules.recurrent import cell, knows, recurrent, rows_dims
from plait.privacy.rules.terms import Term

__all__ = ["ANYTHING", "WHOLE", "Rule", "rule_of"]


def _first(_: Any, outputs: int) -> list[int]:
    return [0] * outputs


class Rule(NamedTuple):
    """How a kind of layer gives the terms of its variables."""

    terms: Callable[[Any, Call, Collection[str]], dict[str, Term]]
    names: Callable[[str], bool] = {"weight", "bias"}.__contains__
    """Whether it knows a variable of this name."""
    fixed: bool = False
    """Whether the kind of layer says which dimension of its output holds the rows."""
    rows_dims: Callable[[Any, int], list[int]] = _first
    """That dimension, for each of so many outputs; where the kind does not say, the likely one."""


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(linear),
    nn.Conv1d: Rule(convolution, fixed=True),
    nn.Conv2d: Rule(convolution, fixed=True),
    nn.Conv3d: Rule(convolution, fixed=True),
    nn.Embedding: Rule(embedding),
    nn.LayerNorm: Rule(layer_norm),
    nn.RMSNorm: Rule(rms_norm),
    nn.GroupNorm: Rule(group_norm, fixed=True),
    nn.InstanceNorm1d: Rule(instance_norm, fixed=True),
    nn.InstanceNorm2d: Rule(instance_norm, fixed=True),
    nn.InstanceNorm3d: Rule(instance_norm, fixed=True),
    nn.BatchNorm1d: Rule(batch_norm, fixed=True),
    nn.BatchNorm2d: Rule(batch_norm, fixed=True),
    nn.BatchNorm3d: Rule(batch_norm, fixed=True),
    nn.RNN: Rule(recurrent, knows, fixed=True, rows_dims=rows_dims),
    nn.LSTM: Rule(recurrent, knows, fixed=True, rows_dims=rows_dims),
    nn.GRU: Rule(recurrent, knows, fixed=True, rows_dims=rows_dims),
    nn.RNNCell: Rule(cell, knows, fixed=True),
    nn.LSTMCell: Rule(cell, knows, fixed=True),
    nn.GRUCell: Rule(cell, knows, fixed=True),
}
ANYTHING = Rule(anything, bool)

WHOLE: tuple[type[nn.Module], ...] = (nn.MultiheadAttention,)
"""Layers that use the variables of the modules inside them without calling those."""


def rule_of(layer: nn.Module, names: Collection[str]) -> Rule:
    """The rule of its kind, also for a subclass that computes the same; `ANYTHING` if there is none."""
    for kind in type(layer).__mro__:
        rule = RULES.get(kind)
        if rule is not None:
            own = "forward" in vars(layer) or type(layer).forward is not getattr(kind, "forward", None)
            same = not own and all(rule.names(name) for name in names)
            return rule if same else ANYTHING
    return ANYTHING
