"""What a private model may not have, found on its first batch: samples that mix, variables that nobody sees used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from plait.errors import ConfigError
from plait.privacy.layers import Layer
from plait.privacy.rules.anything import recomputed

__all__ = ["check_gradients", "check_kinds", "check_recomputed", "rows_dims_of"]

CLOSE = 1e-3
"""How far, in proportion, sums of gradients may be from autograd's own."""

Probe = tuple[int, Iterator[Tensor | None]]
"""A row, and the gradients of its loss with respect to each output noted."""


def check_kinds(root: nn.Module) -> None:
    """Refuse layers that are known to mix samples, or to keep statistics of them without noise."""
    for name, module in root.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats):  # noqa: SLF001 - the base of them all
            raise ConfigError(
                f"layer {name!r} is a {kind}: it mixes the samples of a batch, so no sample's share can be bounded; "
                "write nn.GroupNorm instead, or freeze its statistics with .eval()"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:  # noqa: SLF001 - same
            raise ConfigError(
                f"layer {name!r} is a {kind} with track_running_stats=True: it keeps statistics of samples without "
                "noise; leave track_running_stats out"
            )


def rows_dims_of(layer: Layer, probes: Sequence[Probe], rows: int) -> list[int]:
    """Which dimension of each output holds the rows; refuses a layer where one sample's loss reaches other rows."""
    dims: list[int] = []
    for number, call in enumerate(layer.calls):
        expected = layer.rule.rows_dims(layer.module, len(call.shapes))
        fixed = layer.rule.fixed
        found = []
        for shape, first in zip(call.shapes, expected, strict=True):
            seen = [(row, next(gradients)) for row, gradients in probes]
            found.append(_rows_dim(layer, shape, seen, rows, (first,) if fixed else (0, 1)))
        if number and found != dims:
            raise ConfigError(
                f"layer {layer.name!r} is called with rows in dimension {dims[0]} and in dimension {found[0]}: "
                "transpose its input in one of the calls"
            )
        dims = found
    return dims


def _rows_dim(
    layer: Layer, shape: torch.Size, seen: list[tuple[int, Tensor | None]], rows: int, dims: tuple[int, ...]
) -> int:
    for dim in dims:
        fits = len(shape) > dim and (shape[dim] == rows or (dim == 0 and shape[0] and shape[0] % rows == 0))
        if fits and all(gradient is None or _only(gradient, dim, row, rows) for row, gradient in seen):
            return dim
    raise ConfigError(
        f"layer {layer.name!r} ({type(layer.module).__name__}): in its output of shape {list(shape)}, the loss of one "
        f"sample reaches more than the rows of that sample (a batch of {rows}). Samples may not mix, and every layer "
        "must be called with a row for each sample: [rows, ...], [rows * t, ...] sample by sample, or [t, rows, ...]"
    )


def _only(gradient: Tensor, dim: int, row: int, rows: int) -> bool:
    """Whether it is zero outside the row's place."""
    width = gradient.shape[dim] // rows
    rest = gradient.clone()
    rest.narrow(dim, row * width, width).zero_()
    return not rest.any()


def check_recomputed(layers: Sequence[Layer], rows: int, microbatches: int) -> None:
    """Refuse layers without a rule of their own that give something else when they are computed again."""
    for layer in layers:
        for call, outputs in zip(layer.calls, layer.outputs or (), strict=False):
            call.take([torch.zeros_like(output) for output in outputs], layer.dims(len(outputs)), rows, microbatches)
            try:
                again, _ = recomputed(layer.module, call, layer.variables)
            except Exception as error:
                raise ConfigError(f"{_alone(layer)}, but that fails: {error}") from error
            for output, values, dim in zip(outputs, again, call.rows_dims, strict=True):
                same = values.movedim(0, dim).flatten(dim, dim + 1)
                if not torch.allclose(same.to(output.dtype), output, rtol=CLOSE, atol=CLOSE * _size(output)):
                    raise ConfigError(
                        f"{_alone(layer)}, and then gives another output; if it draws random numbers, put the dropout "
                        "into a module of its own, outside, and if it keeps a state, take that out"
                    )


def _alone(layer: Layer) -> str:
    kind = type(layer.module).__name__
    return f"layer {layer.name!r} ({kind}) has no rule of its own for norms: it is computed again for each micro-batch"


def check_gradients(
    root: nn.Module, sets: Sequence[Sequence[Tensor]], sums: Sequence[Sequence[Tensor | None]], losses: Tensor
) -> None:
    """Refuse variables whose gradient is not the sum of what their modules' calls account for."""
    variables = [variable for one in sets for variable in one]
    theirs = torch.autograd.grad(losses.sum(), variables, retain_graph=True, allow_unused=True)
    ours = [value for one in sums for value in one]
    names: dict[Tensor, str] = {parameter: name for name, parameter in root.named_parameters()}
    wrong = [
        names.get(variable, f"a variable of shape {list(variable.shape)}")
        for variable, our, their in zip(variables, ours, theirs, strict=True)
        if not _same(our, their)
    ]
    if wrong:
        raise ConfigError(
            f"{', '.join(sorted(set(wrong)))}: the loss uses it outside of its module's call, so a sample's share in "
            "its gradient cannot be bounded. Put it into an nn.Module (nn.Linear, nn.Embedding or one of your own with "
            "an nn.Parameter) and use it by calling that module"
        )


def _same(our: Tensor | None, their: Tensor | None) -> bool:
    if their is None:
        return our is None or not our.any()
    if our is None:
        return not their.any()
    return bool((our.to(their.dtype) - their).norm() <= CLOSE * their.norm() + torch.finfo(their.dtype).tiny)


def _size(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
