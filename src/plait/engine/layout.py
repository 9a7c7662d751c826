"""What is chosen for a device: how a model's modules lie in memory, their compiled forms, optimizers in one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

__all__ = ["begin_momentum", "compile_modules", "fuse", "laid_like", "lay_channels_last"]

FUSABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def lay_channels_last(model: nn.Module) -> None:
    """Keep the weights of convolutions as NHWC: the convolutions then work in that order, whatever comes in."""
    for variable in model.parameters():
        if variable.dim() == 4:
            variable.data = variable.data.contiguous(memory_format=torch.channels_last)


def fuse(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let optimizers on a GPU move all in one kernel, where nobody has said how, and gradients are not sparse."""
    if any(getattr(module, "sparse", None) is True for module in model.modules()):
        return
    for optimizer in optimizers:
        groups = optimizer.param_groups
        if type(optimizer) not in FUSABLE or optimizer.state:
            continue
        open_ = all(group["foreach"] is group["fused"] is None and not group["differentiable"] for group in groups)
        if open_ and all(_is_plain(variable) for group in groups for variable in group["params"]):
            for group in groups:
                group["fused"] = True
            begin_momentum(optimizer)


def _is_plain(variable: torch.Tensor) -> bool:
    """On a GPU, and no tensor of another kind: a part of one that is sharded has no such kernel."""
    return type(variable) in (nn.Parameter, torch.Tensor) and variable.is_cuda and variable.is_floating_point()


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give every variable of a fused SGD its momentum now: zeros, with which the first step is what it would be.

    The kernel takes either all first steps or none, and what it makes itself has no values where the first step
    overflows. With dampening, a first step is another one: then it stays as torch has it.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        if group["dampening"]:
            group["fused"] = None
            continue
        for variable in group["params"]:
            optimizer.state[variable].setdefault("momentum_buffer", torch.zeros_like(variable))


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
