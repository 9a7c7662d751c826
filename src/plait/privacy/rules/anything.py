"""Any layer: its own backward pass, alone, vectorised over micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from plait.privacy.rules.call import Call, Split
from plait.privacy.rules.terms import VMAP, Dense, Term, wide

__all__ = ["anything", "half_of", "possible_splits", "recomputed", "tensors_of"]


def anything(layer: nn.Module, call: Call, names: Collection[str]) -> dict[str, Term]:
    """The layer is computed again from what it was given, for a group of rows at a time, and led back from there."""
    _, gradients = recomputed(layer, call, names)
    return {name: Dense(wide(gradient), VMAP) for name, gradient in gradients.items()}


def recomputed(layer: nn.Module, call: Call, names: Collection[str]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs and the gradients of the variables, each [m, ...]."""
    leaves, form = tree_flatten((call.args, call.kwargs))
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    dims = call.splits.get(_key(leaves, form)) or [_rows_dim(leaf, call) for leaf in leaves]
    split = [leaf if dim is None else _split(leaf, dim, call) for leaf, dim in zip(leaves, dims, strict=True)]
    parts = [_split(part, dim, call) for part, dim in zip(_whole(call), call.rows_dims, strict=True)]
    variables = {name: layer.get_parameter(name).detach() for name in names}

    def back(given: list[Any], gradients: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        def forward(own: dict[str, Tensor]) -> list[Tensor]:
            args, kwargs = tree_unflatten(given, form)
            outputs = tensors_of(functional_call(layer, own, args, kwargs))
            return [outputs[number] for number in call.picked]

        outputs, pull = vjp(forward, variables)[:2]
        return outputs, pull([part.to(output.dtype) for part, output in zip(gradients, outputs, strict=True)])[0]

    # Other kernels than MATH know nothing of vmap, and would go micro-batch by micro-batch.
    with sdpa_kernel(SDPBackend.MATH), _in_half(call):
        return vmap(back, in_dims=(dims, list(call.rows_dims)))(split, parts)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output that gradients can come back through."""
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def half_of(outputs: Sequence[Tensor]) -> tuple[str, torch.dtype] | None:
    """The device and the dtype of autocast, if it is on."""
    device = outputs[0].device.type if outputs else "cpu"
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _in_half(call: Call) -> AbstractContextManager[Any]:
    return torch.autocast(*call.half, cache_enabled=False) if call.half is not None else nullcontext()


def possible_splits(call: Call) -> tuple[Any, list[Split]]:
    """What the split of such inputs is known by, and which it may be: a table can have as many rows as the batch."""
    leaves, form = tree_flatten((call.args, call.kwargs))
    key = _key(leaves, form)
    if key in call.splits:
        return key, [call.splits[key]]
    likely = [_rows_dim(leaf, call) for leaf in leaves]
    _, *others = [place for place, dim in enumerate(likely) if dim is not None] or [0]
    less = [[*likely[:place], None, *likely[place + 1 :]] for place in others]
    return key, [likely, *less]


def _key(leaves: Sequence[Any], form: TreeSpec) -> Any:
    return form, tuple(leaf.dim() if isinstance(leaf, Tensor) else -1 for leaf in leaves)


def _rows_dim(leaf: Any, call: Call) -> int | None:
    """Which dimension of an input holds the rows: that of the output, or the first, as a mask's; or none."""
    if not isinstance(leaf, Tensor):
        return None
    dim = call.rows_dims[0]
    for one, size in ((dim, call.shapes[0][dim]), (dim, call.rows), (0, call.rows)):
        if leaf.dim() > one and leaf.shape[one] == size:
            return one
    return None


def _whole(call: Call) -> list[Tensor]:
    """The gradients of the outputs, zeros where the loss did not reach one."""
    known = next(gradient for gradient in call.gradients if gradient is not None)
    pairs = zip(call.gradients, call.shapes, strict=True)
    return [known.new_zeros(shape) if gradient is None else gradient for gradient, shape in pairs]


def _split(values: Tensor, dim: int, call: Call) -> Tensor:
    return torch.unflatten(values, dim, (call.microbatches, -1))
