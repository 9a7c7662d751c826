"""Convolutions: gradients from one grouped convolution, or norms from patches alone where maps are small."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.privacy.rules.call import Call
from plait.privacy.rules.terms import DIRECT, GHOST, Dense, Term, ghost_pays, gram_squares, row_squares, wide

__all__ = ["convolution"]

UNFOLDING = 20
"""What it costs to copy a number into a patch, in multiplications."""
MOST_UNFOLDED = 1 << 21
"""How many numbers all patches may have together: more of them cost more in fresh memory than they save."""
LEAST_PART = 1 << 20
"""So many numbers, at least, the patches of a part have that a GPU looks at at once."""


class Convolution(Term):
    """The weight of a convolution.

    Gradients of their own are products of patches of the input with the gradients of the output. Where patches would
    take much memory, they come from the ordinary backward pass, with each micro-batch as a group of channels. Norms
    alone come from the inner products of patches, which is less where maps are small and channels many.
    """

    def __init__(self, layer: Any, inputs: Tensor, outputs: Tensor, microbatches: int) -> None:
        self.layer, self.inputs, self.outputs, self.microbatches = layer, inputs, outputs, microbatches
        positions = prod(outputs.shape[2:]) * (len(outputs) // microbatches)
        patch = layer.weight[0].numel()
        pays = ghost_pays(positions, patch, layer.out_channels // layer.groups, UNFOLDING)
        self.path = GHOST if pays else DIRECT
        self._unfolds = (
            outputs.device.type == "cpu" and microbatches * layer.groups * patch * positions <= MOST_UNFOLDED
        )
        self._kept: Tensor | None = None

    def squares(self) -> Tensor:
        if self.path == DIRECT:
            on_cpu = self.outputs.device.type == "cpu"
            return row_squares(self.dense().flatten(1)) if on_cpu else self._squares_in_parts()
        patches, outputs = self._patches(), self._positions()
        squares = gram_squares(patches.transpose(1, 2), outputs.transpose(1, 2))
        return squares.view(self.microbatches, self.layer.groups).sum(1)

    def _squares_in_parts(self) -> Tensor:
        """On a GPU patches are quick, groups by the thousand are not, and memory is short: so, some at a time.

        Nothing is kept: the weighted sum is an ordinary backward pass.
        """
        most = max(LEAST_PART, self.inputs.numel() + self.outputs.numel())
        rows, layer = len(self.outputs) // self.microbatches, self.layer
        numbers = layer.groups * layer.weight[0].numel() * prod(self.outputs.shape[2:]) * rows
        size = max(1, most // numbers)
        found = []
        for begin in range(0, self.microbatches, size):
            end = min(begin + size, self.microbatches)
            inputs, outputs = (one[begin * rows : end * rows] for one in (self.inputs, self.outputs))
            part = Convolution(layer, inputs, outputs, end - begin)
            part._unfolds = True
            found.append(row_squares(part.dense().flatten(1)))
        return torch.cat(found)

    def weighted(self, weights: Tensor) -> Tensor:
        if self._kept is not None:
            return Dense(self._kept).weighted(weights)
        scale = weights.to(self.outputs.dtype).repeat_interleave(len(self.outputs) // self.microbatches)
        outputs = self.outputs * scale.view(-1, *[1] * (self.outputs.dim() - 1))
        return self._backward(self.inputs, outputs, self.layer.weight.to(outputs.dtype), self.layer.groups)

    def dense(self) -> Tensor:
        if self._kept is None:
            found = torch.bmm(self._positions(), self._patches().transpose(1, 2)) if self._unfolds else self._grouped()
            self._kept = found.view(self.microbatches, *self.layer.weight.shape)
        return self._kept

    def _grouped(self) -> Tensor:
        shape = self.layer.weight.shape
        weight = self.inputs.new_empty((self.microbatches * shape[0], *shape[1:]))  # only its shape is read
        inputs, outputs = self._side_by_side(self.inputs), self._side_by_side(self.outputs)
        return self._backward(inputs, outputs, weight, self.microbatches * self.layer.groups)

    def _side_by_side(self, values: Tensor) -> Tensor:
        """[rows, channels, ...] as [rows of a micro-batch, micro-batches * channels, ...]."""
        return torch.unflatten(values, 0, (self.microbatches, -1)).transpose(0, 1).flatten(1, 2)

    def _backward(self, inputs: Tensor, outputs: Tensor, weight: Tensor, groups: int) -> Tensor:
        layer, none = self.layer, [0] * (inputs.dim() - 2)
        padding = none if _pads_itself(layer) else list(layer.padding)
        gradient: Tensor = torch.ops.aten.convolution_backward(
            outputs,
            inputs,
            weight,
            None,
            layer.stride,
            padding,
            layer.dilation,
            False,
            none,
            groups,
            [False, True, False],
        )[1]
        return gradient

    def _patches(self) -> Tensor:
        """[m * groups, patch, positions], a patch in the order of the weight."""
        layer, inputs = self.layer, self.inputs
        if not _pads_itself(layer):
            inputs = functional.pad(inputs, [size for size in reversed(layer.padding) for _ in range(2)])
        dims = range(2, inputs.dim())
        for dim, size, stride, dilation in zip(dims, layer.kernel_size, layer.stride, layer.dilation, strict=True):
            inputs = inputs.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
        windows = torch.unflatten(torch.unflatten(inputs, 1, (layer.groups, -1)), 0, (self.microbatches, -1))
        spots, taps = range(4, 4 + len(dims)), range(4 + len(dims), windows.dim())  # after m, k, groups, channels
        order = (0, 2, 3, *taps, 1, *spots)
        return windows.permute(order).reshape(self.microbatches * layer.groups, layer.weight[0].numel(), -1)

    def _positions(self) -> Tensor:
        """[m * groups, channels of a group, positions]."""
        outputs = torch.unflatten(self.outputs.flatten(2), 1, (self.layer.groups, -1))
        outputs = torch.unflatten(outputs, 0, (self.microbatches, -1)).permute(0, 2, 3, 1, 4)
        return outputs.reshape(self.microbatches * self.layer.groups, self.layer.out_channels // self.layer.groups, -1)


def convolution(layer: Any, call: Call, names: Collection[str]) -> dict[str, Term]:
    outputs = wide(call.gradient)
    terms: dict[str, Term] = {}
    if "weight" in names:
        inputs = wide(call.input.detach())
        terms["weight"] = Convolution(layer, _padded(layer, inputs), outputs, call.microbatches)
    if "bias" in names:
        rows = outputs.flatten(2).sum(2) if outputs.is_contiguous() else outputs.sum(tuple(range(2, outputs.dim())))
        terms["bias"] = Dense(rows.view(call.microbatches, -1, layer.out_channels).sum(1))
    return terms


def _pads_itself(layer: nn.Module) -> bool:
    """Whether the padding is of a kind that the convolution proper does not know: it is then put on before."""
    return isinstance(layer.padding, str) or layer.padding_mode != "zeros"


def _padded(layer: Any, inputs: Tensor) -> Tensor:
    if not _pads_itself(layer):
        return inputs
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return functional.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)  # noqa: SLF001 - as torch pads
