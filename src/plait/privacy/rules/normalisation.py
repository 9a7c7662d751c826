"""Normalisations within a sample: a gradient is a product of the normalised input and the gradient of the output."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from plait.privacy.rules.call import Call
from plait.privacy.rules.terms import Dense, Term, wide

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"]


def layer_norm(layer: nn.LayerNorm, call: Call, names: Collection[str]) -> dict[str, Term]:
    shape = list(layer.normalized_shape)
    return _last(call, names, functional.layer_norm(wide(call.input.detach()), shape, None, None, layer.eps), shape)


def rms_norm(layer: nn.RMSNorm, call: Call, names: Collection[str]) -> dict[str, Term]:
    shape = list(layer.normalized_shape)
    return _last(call, names, functional.rms_norm(wide(call.input.detach()), shape, None, layer.eps), shape)


def group_norm(layer: nn.GroupNorm, call: Call, names: Collection[str]) -> dict[str, Term]:
    return _channels(
        call, names, functional.group_norm(wide(call.input.detach()), layer.num_groups, None, None, layer.eps)
    )


def instance_norm(layer: Any, call: Call, names: Collection[str]) -> dict[str, Term]:
    return _channels(call, names, functional.instance_norm(wide(call.input.detach()), eps=layer.eps))


def batch_norm(layer: Any, call: Call, names: Collection[str]) -> dict[str, Term]:
    """With frozen statistics, as after `.eval()`: they are the same for all samples."""
    inputs = wide(call.input.detach())
    return _channels(call, names, functional.batch_norm(inputs, layer.running_mean, layer.running_var, eps=layer.eps))


def _last(call: Call, names: Collection[str], normalised: Tensor, shape: list[int]) -> dict[str, Term]:
    """Variables over the last dimensions."""
    outputs = wide(call.gradient)
    width = outputs[(0,) * (outputs.dim() - len(shape))].numel()
    each = {"weight": lambda: outputs * normalised, "bias": lambda: outputs}
    return {name: Dense(call.positions(each[name](), width).sum(1).view(-1, *shape)) for name in names}


def _channels(call: Call, names: Collection[str], normalised: Tensor) -> dict[str, Term]:
    """Variables over the channels, the dimension after the rows'."""
    outputs = wide(call.gradient)
    each = {"weight": lambda: outputs * normalised, "bias": lambda: outputs}
    return {name: Dense(_by_channel(each[name](), call.microbatches)) for name in names}


def _by_channel(values: Tensor, microbatches: int) -> Tensor:
    sums = values.flatten(2).sum(2) if values.dim() > 2 else values
    return sums.view(microbatches, -1, sums.shape[1]).sum(1)
