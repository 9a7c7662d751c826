"""What a private model may not have, found in its first steps: samples that mix, variables that nobody sees used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.errors import ConfigError
from plait.privacy.layers import Layer
from plait.privacy.rules.anything import possible_splits, recomputed
from plait.variables.graph import leaves

__all__ = ["check_buffers", "check_kinds", "check_recomputed", "check_variables", "look_at_rows"]

CLOSE = 1e-3
"""How far, in proportion, sums of gradients may be from autograd's own."""
ROUNDINGS = 8
"""How many roundings they may be apart where numbers are so short that this is more."""

Sums = Sequence[Sequence[Tensor | None]]
Start = tuple[Tensor, int]
"""A tensor to be led back from, and which dimension of it holds the rows."""
Probe = tuple[Tensor, Iterator[Tensor | None]]
"""Which rows were led back [rows], and the gradients of each output noted."""


def check_kinds(root: nn.Module) -> None:
    """Refuse layers that are known to mix samples, or to keep something of them without noise."""
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
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"layer {name!r} is an {kind} with max_norm={module.max_norm}: it shrinks the rows that samples look "
                "up, without noise, and so shows which they are; leave max_norm out"
            )


def check_buffers(root: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Refuse buffers that are not what they were `before` the loss was computed; a whole number may count steps."""
    for name, buffer in root.named_buffers():
        counts = buffer.dim() == 0 and not buffer.is_floating_point()
        if name in before and not counts and not torch.equal(before[name], buffer):
            raise ConfigError(
                f"buffer {name!r} is changed where the loss is computed: what it keeps of samples, it keeps without "
                "noise. Fill it before training, or leave it out"
            )


# ---- rows


def look_at_rows(layers: Sequence[Layer], losses: Tensor) -> bool:
    """Find where each output has its rows; refuse layers where a sample reaches the rows of others.

    Half of the samples are led back without the others, then the others: from their losses, and then also from what
    layers were given, for a layer of zeros lets nothing through as yet. Gives whether anything new was seen.
    """
    before = _seen(layers)
    _look(layers, [(losses, 0)], len(losses))
    while given := list(_given(layers)):
        known = _seen(layers)
        _look(layers, [(losses, 0), *given], len(losses))
        if _seen(layers) == known:
            break
    for layer in layers:
        layer.looked = layer.looked or (bool(layer.seen) and layer.seen >= layer.reached)
    return _seen(layers) > before


def _seen(layers: Sequence[Layer]) -> int:
    return sum(len(layer.seen) for layer in layers)


def _given(layers: Sequence[Layer]) -> Iterator[Start]:
    """What was given to layers whose rows are known."""
    for layer in layers:
        dim = layer.rows_dims[0] if layer.rows_dims else 0
        for number, call in enumerate(layer.calls):
            given = next((one for one in (*call.args, *call.kwargs.values()) if isinstance(one, Tensor)), None)
            if given is None or given.grad_fn is None or (number, 0) not in layer.seen:
                continue
            if given.dim() > dim and given.shape[dim] == call.shapes[0][dim]:
                yield given, dim


def _look(layers: Sequence[Layer], starts: Sequence[Start], rows: int) -> None:
    half = torch.zeros(rows, dtype=torch.bool)
    half[torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[: rows // 2]] = True
    edges = [edge for layer in layers for call in layer.calls for edge in call.edges]
    probes: list[Probe] = [(some, iter(_led_back(starts, some, edges))) for some in (half, ~half)]
    for layer in layers:
        for number, call in enumerate(layer.calls):
            layer.rows_dims = [
                _rows_dim(layer, (number, output), shape, [(some, next(gradients)) for some, gradients in probes])
                for output, shape in enumerate(call.shapes)
            ]


def _led_back(starts: Sequence[Start], some: Tensor, edges: Sequence[Any]) -> Sequence[Tensor | None]:
    """The gradients of some rows, weighted at random, so that nothing cancels."""
    tensors = [tensor for tensor, _ in starts]
    if not edges or not tensors[0].requires_grad:
        return [None] * len(edges)
    random = torch.Generator().manual_seed(len(some))
    weights = []
    for tensor, dim in starts:
        own = some.repeat_interleave(tensor.shape[dim] // len(some)).view(-1, *[1] * (tensor.dim() - dim - 1))
        weights.append((own * (torch.rand(tensor.shape, generator=random) + 0.5)).to(tensor))
    return torch.autograd.grad(tensors, edges, weights, retain_graph=True, allow_unused=True)


def _rows_dim(
    layer: Layer, place: tuple[int, int], shape: torch.Size, found: Sequence[tuple[Tensor, Tensor | None]]
) -> int:
    """Which dimension of an output holds the rows; where nothing came back to it, the one known or likely."""
    output, rows = place[1], len(found[0][0])
    likely, known = layer.rule.rows_dims(layer.module, output + 1)[output], layer.proven.get(output)
    gradients = [(some, gradient) for some, gradient in found if gradient is not None]
    if gradients:
        layer.reached.add(place)
    seen = any(bool(gradient.any()) for _, gradient in gradients)
    if not seen and known is not None:
        return known
    dims = (likely,) if layer.rule.fixed else (0, 1)
    for dim in dims:
        fits = len(shape) > dim and (shape[dim] == rows or (dim == 0 and shape[0] and shape[0] % rows == 0))
        if fits and all(_only(gradient, dim, some) for some, gradient in gradients):
            break
    else:
        raise ConfigError(
            f"layer {layer.name!r} ({type(layer.module).__name__}): in its output of shape {list(shape)}, the loss of "
            f"one sample reaches more than the rows of that sample (a batch of {rows}). Samples may not mix, and every "
            "layer must be called with a row for each sample: [rows, ...], [rows * t, ...] sample by sample, or "
            "[t, rows, ...]"
        )
    if seen:
        layer.seen.add(place)
        if layer.proven.setdefault(output, dim) != dim:
            raise ConfigError(
                f"layer {layer.name!r} is called with rows in dimension {known} and in dimension {dim}: transpose its "
                "input in one of the calls"
            )
    return dim


def _only(gradient: Tensor, dim: int, some: Tensor) -> bool:
    """Whether it is zero outside those rows."""
    each = torch.unflatten(gradient, dim, (len(some), -1)).movedim(dim, 0)
    return not each[~some.to(each.device)].any()


# ---- variables


def check_recomputed(layers: Sequence[Layer], rows: int, microbatches: int) -> None:
    """Refuse layers without a rule of their own that give something else when they are computed again.

    Which of their inputs have rows is found here, and kept.
    """
    for layer in layers:
        for call, outputs in zip(layer.calls, layer.outputs or (), strict=False):
            call.take([torch.zeros_like(output) for output in outputs], layer.dims(len(outputs)), rows, microbatches)
            key, possible = possible_splits(call)
            failed: Exception | None = None
            for split in possible:
                layer.splits[key] = split
                try:
                    again, _ = recomputed(layer.module, call, layer.variables)
                except Exception as error:  # noqa: BLE001 - whatever the user's module raises
                    failed = failed or error
                    continue
                if all(map(_alike, outputs, again, call.rows_dims)):
                    break
            else:
                raise _not_alone(layer, failed) from failed


def _alike(output: Tensor, again: Tensor, dim: int) -> bool:
    close = _close(output.dtype)
    same = again.movedim(0, dim).flatten(dim, dim + 1)
    size = float(output.abs().max()) if output.numel() else 0.0
    return same.shape == output.shape and torch.allclose(same.to(output.dtype), output, rtol=close, atol=close * size)


def _not_alone(layer: Layer, failed: Exception | None) -> ConfigError:
    kind = type(layer.module).__name__
    start = f"layer {layer.name!r} ({kind}) has no rule of its own for norms: it is computed again for each micro-batch"
    if failed is not None:
        return ConfigError(f"{start}, but that fails: {failed}")
    return ConfigError(
        f"{start}, and then gives another output; if it draws random numbers, put the dropout into a module of its "
        "own, outside, and if it keeps a state, take that out"
    )


def check_variables(
    root: nn.Module, layers: Sequence[Layer], sets: Sequence[Sequence[Tensor]], losses: Tensor, sums: Sums
) -> None:
    """Refuse variables that the loss reaches otherwise than through calls of their modules.

    `sums` are the gradients of all, as calls account for them. Where all is computed in full precision they are
    compared with autograd's own, too, whose sums in half precision may be far off.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in root.named_parameters()}
    variables = [variable for one in sets for variable in one]
    wrong = _outside(layers, variables, losses)
    calls = [call for layer in layers for call in layer.calls]
    dtypes = {gradient.dtype for call in calls for gradient in call.gradients if gradient is not None}
    if not wrong and dtypes <= {torch.float32, torch.float64}:
        theirs = torch.autograd.grad(losses.sum(), variables, retain_graph=True, allow_unused=True)
        wrong = _different(variables, [value for one in sums for value in one], theirs)
    if wrong:
        found = {names.get(variable, f"a variable of shape {list(variable.shape)}") for variable in wrong}
        raise ConfigError(
            f"{', '.join(sorted(found))}: the loss uses it outside of its module's call, so a sample's share in "
            "its gradient cannot be bounded. Put it into an nn.Module (nn.Linear, nn.Embedding or one of your own with "
            "an nn.Parameter) and use it by calling that module"
        )


def _outside(layers: Sequence[Layer], variables: Sequence[Tensor], losses: Tensor) -> set[Tensor]:
    """Variables that a way through the graph leads to, past the outputs of the modules that own them."""
    owners: dict[Tensor, tuple[Layer, ...]] = dict.fromkeys(variables, ())
    for layer in layers:
        for variable in layer.variables.values():
            owners[variable] = (*owners.get(variable, ()), layer)
    wrong: set[Tensor] = set()
    for some in set(owners.values()):
        calls = [call for layer in some for call in layer.calls]
        given = [one for call in calls for one in tree_leaves((call.args, call.kwargs)) if isinstance(one, Tensor)]
        outputs = {edge.node for call in calls for edge in call.edges}
        wrong |= {variable for variable in leaves([losses, *given], outputs) if owners.get(variable) == some}
    return wrong


def _different(
    variables: Sequence[Tensor], ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]
) -> set[Tensor]:
    known = [their for their in theirs if their is not None]
    largest = max((float(their.norm()) for their in known), default=0.0)
    rest = [largest * 8 * ROUNDINGS * torch.finfo(variable.dtype).eps for variable in variables]  # of what is all but 0
    return {
        variable
        for variable, our, their, least in zip(variables, ours, theirs, rest, strict=True)
        if float((_or_zero(our, variable) - _or_zero(their, variable)).norm())
        > least + CLOSE * float(_or_zero(their, variable).norm())
    }


def _or_zero(value: Tensor | None, variable: Tensor) -> Tensor:
    return torch.zeros_like(variable) if value is None else value


def _close(dtype: torch.dtype) -> float:
    return max(CLOSE, ROUNDINGS * torch.finfo(dtype).eps)
