"""Which layer saw what, and the gradients of what it gave: one backward pass without any gradient of a variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from plait.errors import ConfigError, DataError
from plait.privacy.checking import check_buffers, check_kinds, check_recomputed, check_variables, look_at_rows
from plait.privacy.layers import Layer, layers_of
from plait.privacy.rules.call import Call
from plait.privacy.rules.terms import Term, joined

__all__ = ["Gradients", "LayerReport", "Recorder"]


class LayerReport(NamedTuple):
    """One layer, and how the norms of its gradients are found."""

    layer: str
    kind: str
    path: str
    """`ghost` (without gradients of micro-batches), `direct` (from them), `vmap` (from torch.func), `-`: not called."""
    variables: int


class Gradients:
    """The gradients of the micro-batches, as yet neither added nor, most of them, computed."""

    def __init__(self, sets: Sequence[Sequence[tuple[str, Term | None]]], also: list[Tensor | None]) -> None:
        self._sets = sets
        self.also = also
        """The gradients of the tensors that were asked for besides."""
        self.squares: list[dict[str, Tensor]] = [_squares(terms) for terms in sets]
        """For each set, the squared norms [m] of each layer's gradients."""

    @torch.no_grad()
    def sums(self, weights: Sequence[Mapping[str, Tensor] | Tensor]) -> list[list[Tensor | None]]:
        """For each set and variable the sum of its gradients, each times its micro-batch's weight.

        It is None where the loss did not reach the variable. Weights are [m], for all layers or for each by its name.
        """
        return [
            [None if term is None else term.weighted(_weight(given, name)) for name, term in terms]
            for terms, given in zip(self._sets, weights, strict=True)
        ]


def _squares(terms: Sequence[tuple[str, Term | None]]) -> dict[str, Tensor]:
    squares: dict[str, Tensor] = {}
    for name, term in terms:
        if term is not None:
            squares[name] = squares[name] + term.squares() if name in squares else term.squares()
    return squares


def _weight(given: Mapping[str, Tensor] | Tensor, name: str) -> Tensor:
    return given if isinstance(given, Tensor) else given[name]


class Recorder:
    """Notes the calls of the modules of `root` that own any of the variables in `sets`, one set an optimizer."""

    def __init__(self, root: nn.Module, sets: Sequence[Sequence[Tensor]]) -> None:
        self.sets = [list(variables) for variables in sets]
        self._root = root
        self._layers = layers_of(root, {variable for variables in self.sets for variable in variables})
        self._owners: dict[Tensor, str] = {}
        for layer in self._layers:
            for variable in layer.variables.values():
                self._owners.setdefault(variable, layer.name)
        _check_dtypes(root, self._owners)
        self._on = False
        self._before: dict[str, Tensor] | None = {}
        """Copies of buffers from before the loss was computed; None once the check has compared them."""
        self._recording = _Recording(self)
        self._hooks = [_hook(self, layer) for layer in self._layers]

    def recording(self) -> AbstractContextManager[None]:
        """Calls inside are noted; what was noted before is dropped."""
        return self._recording

    def gradients(
        self, total: Tensor, rows: int, microbatches: int, also: Sequence[Tensor] = (), *, keep: bool = False
    ) -> Gradients:
        """The gradients of `total`, the sum of the micro-batches' losses, for each micro-batch.

        `also` are tensors whose gradients are wanted, too, for the batch as a whole. `keep` keeps the graph and what
        was noted, for another call.
        """
        if rows and rows % microbatches:
            raise DataError(f"{rows} rows cannot be put into {microbatches} micro-batches of equal size")
        calls = [(layer, call) for layer in self._layers for call in layer.calls if call.edges] if rows else []
        self._on = False
        found = _gradients(total, [edge for _, call in calls for edge in call.edges], also, keep=keep)
        with torch.no_grad():
            terms = self._terms(calls, found, rows, microbatches)
            result = Gradients(self._arranged(terms), found[len(found) - len(also) :])
        if not keep:
            self._drop()
        return result

    def _terms(
        self, calls: list[tuple[Layer, Call]], found: list[Tensor | None], rows: int, microbatches: int
    ) -> dict[Tensor, list[Term]]:
        terms: dict[Tensor, list[Term]] = {}
        start = 0
        for layer, call in calls:
            gradients = found[start : start + len(call.edges)]
            start += len(call.edges)
            if all(gradient is None for gradient in gradients):
                continue
            dims = layer.dims(len(call.edges))
            _check_call(layer, call, dims, rows)
            call.take(gradients, dims, rows, microbatches)
            for name, term in layer.rule.terms(layer.module, call, layer.variables).items():
                terms.setdefault(layer.variables[name], []).append(term)
                layer.path = term.path if name.startswith("weight") or layer.path == "-" else layer.path
        return terms

    def _arranged(self, terms: Mapping[Tensor, list[Term]]) -> list[list[tuple[str, Term | None]]]:
        return [
            [
                (self._owners.get(variable, "?"), joined(terms[variable]) if variable in terms else None)
                for variable in variables
            ]
            for variables in self.sets
        ]

    def check(self, losses: Tensor, microbatches: int | None = None) -> bool:
        """Refuse what the norms would be wrong for: samples that mix, variables used outside their modules.

        `losses` [rows] come from calls that were noted. The graph and what was noted stay. It gives whether that was
        all: False if a layer was not called, or had no gradients but zeros, and is to be looked at in a later step.
        """
        rows = len(losses)
        if rows < 2:
            raise DataError(f"whether samples mix cannot be seen in a batch of {rows}: start with two rows or more")
        if not losses.isfinite().all():
            raise DataError("a loss of the first steps is not finite: look for bad input, or start with smaller values")
        layers = [layer for layer in self._layers if layer.calls]
        first = self._before is not None
        if first:
            check_kinds(self._root)
            check_buffers(self._root, self._before or {})
        if (first or not all(layer.looked for layer in layers)) and (look_at_rows(layers, losses) or first):
            self._check_variables(layers, losses, microbatches or rows)
        self._before = None
        return all(layer.looked for layer in self._layers)

    def _check_variables(self, layers: Sequence[Layer], losses: Tensor, microbatches: int) -> None:
        check_recomputed(layers, len(losses), microbatches)
        weights = torch.rand(len(losses), generator=torch.Generator().manual_seed(0)) + 0.5
        weighted = losses * weights.to(losses)  # for a model at its best, all together cancel
        found = self.gradients(weighted.sum(), len(losses), microbatches, keep=True)
        sums = found.sums([losses.new_ones(microbatches)] * len(self.sets))
        check_variables(self._root, layers, self.sets, weighted, sums)
        for layer in layers:
            layer.outputs = None if layer.looked else layer.outputs

    def report(self) -> list[LayerReport]:
        """Each layer and the way that its norms were found by last."""
        return [
            LayerReport(
                layer.name, type(layer.module).__name__, layer.path, sum(map(torch.numel, layer.variables.values()))
            )
            for layer in self._layers
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._drop()

    def _drop(self) -> None:
        for layer in self._layers:
            layer.drop()


class _Recording(AbstractContextManager[None]):
    """Entered once a step, it is one object for all of them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        recorder = self._recorder
        recorder._drop()  # noqa: SLF001 - its own
        recorder._on = True  # noqa: SLF001 - same
        if recorder._before is not None:  # noqa: SLF001 - same
            recorder._before = {name: one.clone() for name, one in recorder._root.named_buffers()}  # noqa: SLF001 - same

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder._on = False  # noqa: SLF001 - same


def _hook(recorder: Recorder, layer: Layer) -> RemovableHandle:
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if recorder._on and torch.is_grad_enabled():  # noqa: SLF001 - same
            return layer.note(args, kwargs, output)
        return None

    return layer.module.register_forward_hook(note, with_kwargs=True, prepend=True)


def _check_dtypes(root: nn.Module, owners: Mapping[Tensor, str]) -> None:
    for name, variable in root.named_parameters():
        if variable in owners and variable.dtype not in {torch.float32, torch.float64}:
            kind = str(variable.dtype).removeprefix("torch.")
            raise ConfigError(
                f"variable {name!r} is of {kind}, and its optimizer is private: sums "
                "would be rounded by more than the noise hides. Make it float32; precision='bf16' computes in half "
                "precision all the same"
            )


def _gradients(total: Tensor, edges: Sequence[Any], also: Sequence[Tensor], *, keep: bool) -> list[Tensor | None]:
    wanted = [*edges, *also]
    if not wanted or not total.requires_grad:
        return [None] * len(wanted)
    return list(torch.autograd.grad(total, wanted, retain_graph=keep, allow_unused=True))


def _check_call(layer: Layer, call: Call, dims: Sequence[int], rows: int) -> None:
    if call.changed:
        raise ConfigError(
            f"layer {layer.name!r}: its input was changed in place after the call; write x = x + y for x += y"
        )
    if any(len(shape) <= dim or shape[dim] % rows for shape, dim in zip(call.shapes, dims, strict=True)):
        raise DataError(
            f"layer {layer.name!r}: its output of shape {list(call.shapes[0])} has no row for each of {rows} samples"
        )
