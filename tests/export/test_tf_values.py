"""The table of operators names operators that there are; sizes and weights are handled without TensorFlow."""

from __future__ import annotations

import pytest
import torch

from plait.errors import ConfigError
from plait.export import tf_graph  # noqa: F401 - it fills the table
from plait.export.tf_values import OPS, Weight, dims_of, op, rank, refuse, sizes, static


@pytest.mark.parametrize("name", [name for name in OPS if name.startswith("aten.")])
def test_the_operator_is_one_of_torchs(name):
    _, packet, overload = name.split(".")
    assert overload in getattr(torch.ops.aten, packet).overloads()
    assert OPS[name].layout in {"plain", "pointwise", "any"}


def test_names_are_made_whole(monkeypatch):
    for name in ("aten.first.default", "aten.second.Tensor", "torch.third"):
        monkeypatch.setitem(OPS, name, None)
    op("first second.Tensor torch::third", "any")(print)
    assert [OPS[name].function for name in ("aten.first.default", "aten.second.Tensor", "torch.third")] == [print] * 3


def test_a_weight_in_another_form_is_another_one():
    weight = Weight("conv.weight", torch.zeros(2, 3), {})
    turned = weight.changed("permute", lambda value: value.permute(1, 0))
    assert (turned.name, turned.form, tuple(turned.value.shape)) == ("conv.weight", "permute", (3, 2))
    assert turned.variables is weight.variables
    assert rank(turned) == 2
    assert dims_of(turned, -1) == [1]
    assert dims_of(turned, None) == dims_of(turned, [-2, 1]) == [0, 1]


def test_sizes():
    assert static([1, 2]) == sizes([1, 2]) == [1, 2]
    with pytest.raises(ConfigError, match="a size that is not known until it runs"):
        static([None])


def test_what_is_refused_is_told_with_what_carries_it():
    with pytest.raises(ConfigError, match=r"format 'tf' has no operator x, which .* 'torch' carries .* 'onnx' most"):
        refuse("operator x")
