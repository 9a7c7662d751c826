"""Optimizers that move all their variables in one kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from plait.optim.wrappers import chain

__all__ = ["begin_momentum", "fuse"]

FUSABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def fuse(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let optimizers on a GPU move all in one kernel, where nobody has said how, and gradients are not sparse."""
    if any(getattr(module, "sparse", None) is True for module in model.modules()):
        return
    for optimizer in (inner for outer in optimizers for inner in chain(outer)):
        groups = optimizer.param_groups
        if type(optimizer) not in FUSABLE or optimizer.state:
            continue
        unsaid = all(group["foreach"] is group["fused"] is None and not group["differentiable"] for group in groups)
        if unsaid and all(_is_plain(variable) for group in groups for variable in group["params"]):
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
