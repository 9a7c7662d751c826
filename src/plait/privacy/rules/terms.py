"""A variable's gradient for each micro-batch, in the form in which its layer gives it: norms and sums come from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DIRECT",
    "GHOST",
    "VMAP",
    "Dense",
    "Outer",
    "Term",
    "ghost_pays",
    "gram_squares",
    "joined",
    "row_squares",
    "wide",
]

DIRECT = "direct"
GHOST = "ghost"
VMAP = "vmap"
_ROUGH = {"high": 2.0**-10, "medium": 2.0**-7}
"""A rounding in products of float32, where they are allowed to be less exact than that."""


class Term:
    """The gradients of one variable, one for each of `m` micro-batches."""

    path = DIRECT
    """How its norms are found: from gradients of their own (`direct`, `vmap`), or without them (`ghost`)."""

    def squares(self) -> Tensor:
        """The squared norm of each gradient, [m]."""
        raise NotImplementedError

    def weighted(self, weights: Tensor) -> Tensor:
        """The sum of the gradients, each times its weight; in the variable's shape."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The gradients themselves, [m, *shape]."""
        raise NotImplementedError


class Dense(Term):
    """Gradients as they are, [m, *shape]; right where they are small."""

    def __init__(self, gradients: Tensor, path: str = DIRECT) -> None:
        self.gradients = gradients
        self.path = path
        self._squares: Tensor | None = None

    def squares(self) -> Tensor:
        if self._squares is None:
            self._squares = row_squares(self.gradients.flatten(1))
        return self._squares

    def weighted(self, weights: Tensor) -> Tensor:
        flat = weights.to(self.gradients.dtype) @ self.gradients.flatten(1)
        return flat.view(self.gradients.shape[1:])

    def dense(self) -> Tensor:
        return self.gradients


class Outer(Term):
    """Sums of outer products: each micro-batch's gradient is `outputs^T @ inputs`, over its `t` positions.

    Inputs are [m, t, i] and gradients of outputs [m, t, o]; or [m, i] and [m, o], which is one position and the
    quickest: the norm is the product of two norms. For a few positions, the squared norm is the sum over pairs of them
    of both inner products (Gram matrices, [t, t]). For many, the gradients themselves are cheaper: they are kept, and
    give the weighted sum, too.
    """

    def __init__(self, inputs: Tensor, outputs: Tensor, summed: Dense | None = None) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._summed = summed
        """The gradients added up over positions, where a bias has them, too: their norms are taken once."""
        self._kept: Tensor | None = None
        self.path = (
            GHOST if inputs.dim() == 2 or ghost_pays(inputs.shape[1], inputs.shape[2], outputs.shape[2]) else DIRECT
        )

    def squares(self) -> Tensor:
        if self.inputs.dim() == 2:
            summed = self._summed or Dense(self.outputs)
            return row_squares(self.inputs).mul_(summed.squares())
        if self.path == DIRECT:
            return row_squares(self.dense().flatten(1))
        return gram_squares(self.inputs, self.outputs)

    def weighted(self, weights: Tensor) -> Tensor:
        if self._kept is not None:
            return Dense(self._kept).weighted(weights)
        inputs, outputs = self.inputs, self.outputs
        scale = weights.to(outputs.dtype).view(-1, *[1] * (inputs.dim() - 1))
        if inputs.shape[-1] < outputs.shape[-1]:
            inputs = inputs * scale
        else:
            outputs = outputs * scale
        if inputs.dim() == 3:
            inputs, outputs = inputs.flatten(0, 1), outputs.flatten(0, 1)
        return outputs.t() @ inputs

    def dense(self) -> Tensor:
        if self._kept is None:
            inputs, outputs = self.positions()
            self._kept = torch.bmm(outputs.transpose(1, 2), inputs)
        return self._kept

    def positions(self) -> tuple[Tensor, Tensor]:
        """Inputs and outputs with three dimensions each."""
        one = self.inputs.dim() == 2
        return (self.inputs[:, None], self.outputs[:, None]) if one else (self.inputs, self.outputs)


def ghost_pays(positions: int, inputs: int, outputs: int, unfolding: int = 0) -> bool:
    """Whether Gram matrices cost less than gradients of each micro-batch; in multiplications, measured on a CPU.

    A number that goes through fresh memory costs about 40, and small products half as much again as a large one.
    """
    grams = positions * positions * (inputs + outputs) + unfolding * positions * inputs
    return grams < inputs * outputs * (40 + positions // 2)


def gram_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Squared norms of `outputs^T @ inputs`, from the inner products of positions alone; rather too large.

    Where positions cancel each other, little is left of large products, and that is their rounding. It grows with the
    square of the sum over positions of both norms, and was never found above 0.7 of a rounding of that.
    """
    products, others = torch.bmm(inputs, inputs.transpose(1, 2)), torch.bmm(outputs, outputs.transpose(1, 2))
    most = (products.diagonal(dim1=1, dim2=2) * others.diagonal(dim1=1, dim2=2)).sqrt_().sum(1).square_()
    return products.mul_(others).sum((1, 2)).add_(most, alpha=2 * _rounding(inputs.dtype)).clamp_min_(0)


def _rounding(dtype: torch.dtype) -> float:
    rough = _ROUGH.get(torch.get_float32_matmul_precision()) if dtype is torch.float32 else None
    return torch.finfo(dtype).eps if rough is None else rough


def joined(terms: list[Term]) -> Term:
    """One term for a variable that was used several times: the norm is that of the sum."""
    if len(terms) == 1:
        return terms[0]
    outer = [term for term in terms if isinstance(term, Outer)]
    if len(outer) == len(terms):
        inputs, outputs = zip(*(term.positions() for term in outer), strict=True)
        return Outer(torch.cat(inputs, 1), torch.cat(outputs, 1))
    return Dense(torch.stack([term.dense() for term in terms]).sum(0))


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least: a norm in half precision overflows, or loses what is small."""
    return tensor if tensor.dtype in {torch.float32, torch.float64} else tensor.float()


def row_squares(matrix: Tensor) -> Tensor:
    norms: Any = torch.linalg.vector_norm(matrix, dim=1)
    squares: Tensor = norms.square_()
    return squares
