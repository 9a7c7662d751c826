"""Does an exported module give what the module itself gives?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.errors import CheckpointError
from plait.export.formats import Arrays, Run
from plait.export.program import Program, named_outputs

__all__ = ["TOLERANCE", "Trial", "compare", "difference", "worked_out"]

TOLERANCE = 1e-4
"""The greatest relative difference that is published."""

_ROWS = (1, 3)
_LARGE = 100.0
"""How much larger than usual the large values are: pictures that nobody has scaled."""
_NUDGE = 2.0**-20
"""Some roundings of float32: how far inputs are moved to see what rounding alone does to the outputs."""
_NUDGES = 8.0
"""So much more than a nudge does may a runtime that rounds elsewhere differ."""
_MOST = 1e-3
"""But not more than this, unless the inputs are large: deep networks pass, a layer with other settings does not."""
_NEAR_ZERO = 0.1
"""Below this part of a row's largest value, differences are measured by that instead of the value itself."""


@dataclass(frozen=True)
class Trial:
    """Inputs, and what the module gives for them."""

    kind: str
    inputs: Arrays
    outputs: Arrays
    tolerance: float
    """More than usual where roundings alone make a greater difference."""


def worked_out(module: nn.Module, inputs: Mapping[str, Tensor], program: Program) -> list[Trial]:
    """Random inputs, zeros and large ones, in batches of 1 and 3, through the module, which is in evaluation."""
    generator = torch.Generator().manual_seed(0)
    batches = {one["name"] for one in program.inputs if one["shape"] and one["shape"][0] is None}
    trials = []
    with _full_precision():
        for kind in ("random", "zeros", "large"):
            for rows in _ROWS:
                made = {
                    name: _made(kind, value, rows if name in batches else None, generator)
                    for name, value in inputs.items()
                }
                trials.append(_trial(module, kind, made, generator))
    return trials


def _trial(module: nn.Module, kind: str, made: dict[str, Tensor], generator: torch.Generator) -> Trial:
    outputs = _outputs(module, made)
    nudged = _outputs(module, {name: _nudged(value, generator) for name, value in made.items()})
    tolerance = max(TOLERANCE, *(_NUDGES * difference(outputs[name], nudged[name]) for name in outputs))
    tolerance = tolerance if kind == "large" else min(tolerance, _MOST)
    return Trial(kind, {name: value.cpu().numpy() for name, value in made.items()}, outputs, tolerance)


def _outputs(module: nn.Module, inputs: Mapping[str, Tensor]) -> Arrays:
    return {name: value.detach().cpu().numpy() for name, value in named_outputs(module(**inputs)).items()}


def _made(kind: str, example: Tensor, rows: int | None, generator: torch.Generator) -> Tensor:
    shape = list(example.shape) if rows is None else [rows, *example.shape[1:]]
    if example.is_floating_point():
        made = torch.randn(shape, generator=generator) * {"random": 1.0, "zeros": 0.0, "large": _LARGE}[kind]
    elif kind != "random" or not example.numel():
        values = example.flatten()
        edge = (values.max() if kind == "large" else values.min()) if values.numel() else torch.tensor(0)
        made = edge.cpu().expand(shape).clone()
    else:
        chosen = torch.randint(example.numel(), shape, generator=generator)
        made = example.flatten().cpu()[chosen]
    return made.to(example.dtype).to(example.device)


def _nudged(value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    signs = torch.randint(2, value.shape, generator=generator).to(value) * 2 - 1
    return value + _NUDGE * signs * value.abs().clamp(min=1)  # zeros, too: what follows them is rounded as well


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Inside, products and convolutions have all digits of float32, on a GPU as well."""
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    with contextlib.ExitStack() as stack:
        if before != "highest":
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, before)
        if torch.cuda.is_available():
            stack.enter_context(cudnn.flags(enabled=cudnn.enabled, allow_tf32=False))
        yield


def compare(name: str, run: Run, trials: list[Trial]) -> float:
    """The greatest relative difference from the module's outputs; an error if it is too great."""
    greatest = 0.0
    for trial in trials:
        try:
            found = run(trial.inputs)
        except Exception as error:
            raise CheckpointError(
                f"format {name!r} cannot be run with {trial.kind} inputs: {error}. Nothing was published"
            ) from error
        for output, expected in trial.outputs.items():
            apart = _apart(trial, expected, found[output])
            if apart > trial.tolerance:
                raise CheckpointError(
                    f"format {name!r} gives another {output!r} than the module for {trial.kind} inputs: the relative"
                    f" difference is {apart:.2g}, {trial.tolerance:.2g} is allowed. Nothing was published"
                )
            greatest = max(greatest, apart)
    return float(greatest)


def _apart(trial: Trial, expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if np.issubdtype(expected.dtype, np.floating):
        return difference(expected, found)
    # whole numbers are often places of largest values: at the edges many values are equal, and any place is right
    return float("inf") if trial.kind == "random" and not np.array_equal(expected, found) else 0.0


def difference(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    """The greatest relative difference, row by row; where `expected` is not finite there is nothing to compare.

    With less than TOLERANCE, the largest value of a row is the same in both unless two values are nearly equal.
    """
    if not expected.size or not np.issubdtype(expected.dtype, np.floating):
        return 0.0
    rows = expected.reshape(len(expected) if expected.ndim else 1, -1).astype(np.float64)
    others = found.reshape(rows.shape).astype(np.float64)
    finite = np.isfinite(rows)
    sizes = np.where(finite, np.abs(rows), 0.0)
    scale = sizes + _NEAR_ZERO * sizes.max(axis=1, keepdims=True)
    apart = np.where(finite, np.abs(np.where(finite, others - np.where(finite, rows, 0.0), 0.0)), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(apart == 0.0, 0.0, apart / scale)
    return float("inf") if np.isnan(relative).any() else float(relative.max())
