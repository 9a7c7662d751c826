"""Embeddings: rows of the table that a micro-batch looked up, several lookups of one row counted together."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from plait.errors import ConfigError
from plait.privacy.rules.call import Call
from plait.privacy.rules.terms import GHOST, Term, row_squares

__all__ = ["embedding"]


class Lookup(Term):
    """The table of an embedding: `indices` [m, t] were looked up, `outputs` [m, t, d] are the gradients."""

    path = GHOST

    def __init__(self, shape: torch.Size, indices: Tensor, outputs: Tensor) -> None:
        self.shape, self.indices, self.outputs = shape, indices, outputs

    def squares(self) -> Tensor:
        microbatches, positions = self.indices.shape
        if positions == 1:
            return row_squares(self.outputs.flatten(1))
        places, order = self.indices.sort(1)
        outputs = self.outputs.gather(1, order[..., None].expand_as(self.outputs)).flatten(0, 1)
        starts = torch.ones_like(places)
        starts[:, 1:] = places[:, 1:] != places[:, :-1]
        which = starts.flatten().cumsum(0).sub_(1)  # one number for each row that a micro-batch looked up
        sums = torch.zeros_like(outputs).index_add_(0, which, outputs)
        owners = torch.arange(microbatches, device=which.device).repeat_interleave(positions)
        owner = torch.zeros_like(which).scatter_(0, which, owners)
        return outputs.new_zeros(microbatches).index_add_(0, owner, row_squares(sums))

    def weighted(self, weights: Tensor) -> Tensor:
        outputs = self.outputs * weights.to(self.outputs.dtype)[:, None, None]
        return outputs.new_zeros(self.shape).index_add_(0, self.indices.flatten(), outputs.flatten(0, 1))

    def dense(self) -> Tensor:
        microbatches, (size, width) = len(self.indices), self.shape
        offsets = torch.arange(microbatches, device=self.indices.device)[:, None] * size
        table = self.outputs.new_zeros(microbatches * size, width)
        table.index_add_(0, (self.indices + offsets).flatten(), self.outputs.flatten(0, 1))
        return table.view(microbatches, size, width)


def embedding(layer: nn.Embedding, call: Call, names: Collection[str]) -> dict[str, Term]:
    del names  # there is but one
    if layer.scale_grad_by_freq:
        raise ConfigError(
            "scale_grad_by_freq=True divides a sample's gradient by how often others looked the row up: leave it out"
        )
    indices = call.positions(call.input, 1).squeeze(2).long()
    outputs = call.positions(call.gradient, layer.embedding_dim)
    if layer.padding_idx is not None:
        outputs = outputs.masked_fill((indices == layer.padding_idx)[..., None], 0)
    return {"weight": Lookup(layer.weight.shape, indices, outputs)}
