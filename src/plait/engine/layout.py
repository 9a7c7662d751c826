"""How a model's modules lie in memory, and their compiled forms."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from plait.engine.strategy import Local
from plait.errors import FunctionError
from plait.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from plait.engine.calls import UserCall
    from plait.engine.model import Model

__all__ = ["compile_modules", "laid_like", "lay_back_if_refused", "lay_channels_last", "lay_states"]

_REFUSALS = ("view size is not compatible", "Cannot view a tensor")
"""What torch, and its compiler, say of a `view` that channels-last maps do not allow."""

log = logging.getLogger("plait")


def lay_channels_last(model: nn.Module) -> bool:
    """Keep the weights of convolutions as NHWC: the convolutions then work in that order, whatever comes in.

    Says whether there were any.
    """
    found = [variable for variable in model.parameters() if variable.dim() == 4]
    for variable in found:
        variable.data = variable.data.contiguous(memory_format=torch.channels_last)
    return bool(found)


def lay_back_if_refused(model: Model) -> None:
    """Nobody asked for channels-last: a function that cannot take such maps (`x.view(n, -1)`) gets what it had.

    Each function's first call tells; it is then made once more, as if it had not been.
    """
    for call in model.calls.values():
        _watch(call, model)


def _watch(call: UserCall, model: Model) -> None:
    function = call.fn

    def watched(sample: Any) -> Any:
        state, buffers = rng_state(), [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            found = function(sample)
        except RuntimeError as error:
            if not any(words in str(error) for words in _REFUSALS):
                raise
            if not isinstance(model.strategy, Local):
                raise FunctionError(
                    f"the function for {call.scope} needs maps in another order than a GPU works in ({error}): write"
                    " .flatten(1) or .reshape(...) for .view(...), or session_config={'channels_last': False}"
                ) from error
            _lay_back(model)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            set_rng_state(state)
            call.begin_again()
            found = function(sample)
        call.fn = function
        return found

    call.fn = watched


def _lay_back(model: Model) -> None:
    from plait.engine.capture import forget_graphs  # noqa: PLC0415 - capturing is above laying, except here

    log.warning(
        "convolutions run in the order NCHW, which is slower on a GPU: a view() of their maps needs it. Write"
        " .flatten(1) or .reshape(...) in its place"
    )
    for variable in model.parameters():
        if variable.dim() == 4:
            variable.data = variable.data.contiguous()
            variable.grad = None if variable.grad is None else variable.grad.contiguous()
    for optimizer in model.optimizers():
        lay_states(optimizer)
    forget_graphs()


def lay_states(optimizer: torch.optim.Optimizer) -> None:
    """Files have an optimizer's tensors in order, whatever the variable's memory is like."""
    for variable, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = laid_like(variable, value)


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
