"""What is chosen for a device: how a model's modules lie in memory, their compiled forms, optimizers in one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

__all__ = ["compile_modules", "fuse", "lay_channels_last"]

FUSABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def lay_channels_last(model: nn.Module) -> None:
    """Keep the weights of convolutions as NHWC: the convolutions then work in that order, whatever comes in."""
    for variable in model.parameters():
        if variable.dim() == 4:
            variable.data = variable.data.contiguous(memory_format=torch.channels_last)


def fuse(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let optimizers on a GPU move all in one kernel, where nobody has said how, and gradients are not sparse."""
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if type(optimizer) not in FUSABLE or optimizer.state:
            continue
        open_ = all(group["foreach"] is group["fused"] is None and not group["differentiable"] for group in groups)
        variables = [variable for group in groups for variable in group["params"]]
        if open_ and all(variable.is_cuda and variable.is_floating_point() for variable in variables):
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined] # noqa: SLF001 - as with fused=True
            for group in groups:
                group["fused"] = True


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
