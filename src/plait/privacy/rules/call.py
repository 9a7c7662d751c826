"""One call of a layer: what it was given, and the gradients of what it gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from plait.privacy.rules.terms import wide

__all__ = ["Call", "Split"]

Split = list[int | None]
"""Which dimension of each input holds the rows; None: it has none."""


class Call:
    """What a forward hook noted; `take` adds what the backward pass found.

    Of outputs it keeps the place in the graph, not the tensor: an activation may change it in place.
    """

    __slots__ = (
        "args",
        "edges",
        "gradients",
        "half",
        "kwargs",
        "microbatches",
        "picked",
        "rows",
        "rows_dims",
        "shapes",
        "splits",
        "versions",
    )

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
        self.args, self.kwargs = args, kwargs
        self.picked = [number for number, output in enumerate(outputs) if output.requires_grad]
        """Which of the outputs gradients can come back through."""
        led = outputs if len(self.picked) == len(outputs) else [outputs[number] for number in self.picked]
        self.edges: list[GradientEdge] = [get_gradient_edge(output) for output in led]
        self.shapes: list[torch.Size] = [output.shape for output in led]
        self.versions = _versions(args)
        self.gradients: Sequence[Tensor | None] = ()
        self.rows_dims: Sequence[int] = ()
        self.rows = self.microbatches = 0
        self.splits: Mapping[Any, Split] = {}
        """What is known of inputs of each form, where the layer is computed again."""
        self.half: tuple[str, torch.dtype] | None = None
        """The device and the dtype of autocast, where the layer is computed again and was first computed in it."""

    @property
    def input(self) -> Tensor:
        """The first thing that the layer was given."""
        given: Tensor = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return given

    @property
    def gradient(self) -> Tensor:
        """The gradient of the layer's only output."""
        found = self.gradients[0]
        assert found is not None  # noqa: S101 - calls that the loss does not reach come to no rule
        return found

    @property
    def changed(self) -> bool:
        """Whether an input was changed in place after the layer saw it."""
        return self.versions != _versions(self.args)

    def take(self, gradients: Sequence[Tensor | None], rows_dims: Sequence[int], rows: int, microbatches: int) -> None:
        self.gradients, self.rows_dims = gradients, rows_dims
        self.rows, self.microbatches = rows, microbatches

    def positions(self, values: Tensor, features: int) -> Tensor:
        """[m, t, features]: all positions of a micro-batch in a row."""
        if self.rows_dims[0] == 1:
            values = values.transpose(0, 1)
        return wide(values).reshape(self.microbatches, -1, features)


def _versions(values: Sequence[Any]) -> list[int]:
    return [value._version for value in values if isinstance(value, Tensor)]  # noqa: SLF001 - torch has no other way
