"""How a model's modules lie in memory, and their compiled forms."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["compile_modules", "laid_like", "lay_channels_last"]


def lay_channels_last(model: nn.Module) -> None:
    """Keep the weights of convolutions as NHWC: the convolutions then work in that order, whatever comes in."""
    for variable in model.parameters():
        if variable.dim() == 4:
            variable.data = variable.data.contiguous(memory_format=torch.channels_last)


def laid_like(variable: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same values, in memory as the variable's: kernels that take all variables at once want it so."""
    same = value.layout != torch.strided or value.shape != variable.shape or value.stride() == variable.stride()
    return value if same else torch.empty_like(variable, dtype=value.dtype).copy_(value)


def compile_modules(model: nn.Module) -> None:
    """Compile the outermost modules that compute something; names and variables stay as they are.

    Not the functions around them: these register metrics and hooks, which is no work for a compiler.
    """
    for module in _outermost(model):
        module.compile()


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if getattr(type(child), "forward", None) is nn.Module.forward:  # only holds others
            yield from _outermost(child)
        else:
            yield child
