"""One exporter for all doors: write every format, compare it with the module itself, publish it."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from plait.errors import ConfigError
from plait.export.check import compare, worked_out
from plait.export.describe import LABELS, check_facts, check_labels, write_about
from plait.export.formats import FORMATS, check_formats
from plait.export.program import in_evaluation, trace
from plait.export.pruning import prune
from plait.export.publish import NEXT, check_version, publish

__all__ = ["export", "write_export"]


def export(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    directory: str | os.PathLike[str],
    *,
    formats: Sequence[str] = ("torch",),
    version: int | str = NEXT,
    labels: Sequence[str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write `module` as a version of `directory`, whole or not at all, and give the version's directory.

    Args:
        module: `module(**inputs)` gives a tensor, or a dict of name: tensor. It is exported as it is in evaluation.
        inputs: an example of each input. The first dimension is the batch, which may then have any size. Whole
            numbers are only tried with values that stand here: an index into a table has to be in it.
        directory: where the versions are.
        formats: "torch" (`torch.export`), "onnx", "tf" (a SavedModel of TensorFlow).
        version: -1 for the next number; a number or a name is taken as it is and must be new.
        labels: the names of the classes.
        facts: of `step`, `metrics`, `epsilon` and `preprocess`, what is known.

    """
    check_version(directory, version)
    check_formats(formats)
    fill = functools.partial(write_export, module, inputs, formats=formats, labels=labels, facts=facts)
    return publish(directory, version, fill)


def write_export(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    folder: Path,
    *,
    formats: Sequence[str] = ("torch",),
    labels: Sequence[str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> list[str]:
    """Fill a folder that nobody reads yet, and give the names of the outputs."""
    wanted, known, names = check_formats(formats), check_facts(facts), check_labels(labels)
    _check_inputs(inputs)
    inputs = _beside(module, inputs)
    with in_evaluation(module):
        program = trace(module, inputs)
        prune(program)
        for name in wanted:
            FORMATS[name].check(program)
        trials = worked_out(module, inputs, program)
    body: dict[str, Any] = {"formats": wanted, "inputs": program.inputs, "outputs": program.outputs, **known}
    body["labels"] = LABELS if names else None
    if names:
        (folder / LABELS).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    for name in wanted:
        FORMATS[name].write(program, folder)
    body["checked"] = {name: compare(name, FORMATS[name].open_run(folder, body, None), trials) for name in wanted}
    write_about(folder, body)
    return [one["name"] for one in program.outputs]


def _beside(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The examples where the module is."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return {name: value if first is None else value.to(first.device) for name, value in inputs.items()}


def _check_inputs(inputs: Mapping[str, Any]) -> None:
    if not isinstance(inputs, Mapping) or not inputs:
        raise ConfigError(f"inputs is {inputs!r:.80}: write a dict of name: tensor, an example of each input")
    for name, value in inputs.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"inputs has the name {name!r}: write the name of a parameter of the module's forward")
        if not isinstance(value, Tensor):
            raise ConfigError(f"input {name!r} is a {type(value).__name__}: write a tensor as an example of it")
