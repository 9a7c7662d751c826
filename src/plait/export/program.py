"""A module as a program of `torch.export`: the format "torch", and what the other formats are made from."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.errors import CheckpointError, FunctionError
from plait.export.describe import form
from plait.export.formats import Arrays, Run

__all__ = ["FILE", "Program", "in_evaluation", "named_outputs", "open_run", "trace", "write"]

FILE = "model.pt2"

_LEAST_ROWS = 2
_ARRAYS = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
}  # fmt: skip
"""What NumPy has, too."""


@dataclass(frozen=True)
class Program:
    """A module that was followed with example inputs, on the CPU."""

    exported: Any
    """Takes the inputs by their names, gives a dict of outputs."""
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    """In the form that `model.json` has."""

    @functools.cached_property
    def core(self) -> Any:
        """The program with the few operators that all others are made of."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of itself
            return self.exported.run_decompositions()


def named_outputs(output: Any) -> dict[str, Any]:
    """A dict as it is; a tensor is "output", and several are "output_0", "output_1", ..."""
    if isinstance(output, Tensor):
        return {"output": output}
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, (list, tuple)):
        return {f"output_{number}": value for number, value in enumerate(output)}
    raise FunctionError(f"the module returns a {type(output).__name__}: return a tensor, a dict or a tuple of them")


@contextlib.contextmanager
def in_evaluation(module: nn.Module) -> Iterator[None]:
    """Inside, the module evaluates; afterwards each of its parts is in the mode in which it was."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for one, training in modes:
            one.training = training


class _Named(nn.Module):
    """The module with inputs by name, and outputs as a dict."""

    def __init__(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.module = module

        def forward(**given: Tensor) -> Any:
            return named_outputs(module(**given))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        named = inspect.Signature([inspect.Parameter(name, kind) for name in inputs])
        forward.__signature__ = named  # type: ignore[attr-defined] # how torch.export learns the names
        self.forward = forward


def trace(module: nn.Module, inputs: Mapping[str, Tensor]) -> Program:
    """Follow the module, which is in evaluation, through one call; the batch may then have any size."""
    rows = max([_LEAST_ROWS, *(value.shape[0] for value in inputs.values() if value.ndim)])
    examples = {name: _example(value, rows) for name, value in inputs.items()}
    outputs = named_outputs(module(**examples))
    _check_outputs(outputs)
    exported = _exported(_Named(module, examples), examples)
    forms = {node.name: node.meta["val"] for node in exported.graph.nodes if "val" in node.meta}
    traced = zip(examples, (forms[one] for one in exported.graph_signature.user_inputs), strict=True)
    described = [form(name, value.dtype, value.shape) for name, value in traced]
    _check_batch(examples, described)
    given = zip(outputs, (forms[one] for one in exported.graph_signature.user_outputs), strict=True)
    _forget_sources(exported)
    return Program(_on_cpu(exported), described, [form(name, value.dtype, value.shape) for name, value in given])


def _example(value: Tensor, rows: int) -> Tensor:
    """With at least two rows: a size of 1 would be followed as a constant."""
    if value.ndim == 0 or value.shape[0] >= _LEAST_ROWS:
        return value
    return value.expand(rows, *value.shape[1:]).clone() if len(value) else value.new_zeros(rows, *value.shape[1:])


def _check_outputs(outputs: Mapping[str, Any]) -> None:
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            raise FunctionError(
                f"the module returns a {type(value).__name__} as {name!r}: return a tensor, or a dict of"
                " name: tensor; a module around yours can choose what of its outputs is exported"
            )
        if value.dtype not in _ARRAYS:
            raise FunctionError(f"the module returns {value.dtype} as {name!r}: let it return .float()")


def _exported(named: _Named, examples: Mapping[str, Tensor]) -> Any:
    from torch.export import Dim, export  # noqa: PLC0415 - heavy

    dims: dict[str, Any] = {name: {0: Dim.AUTO} if value.ndim else None for name, value in examples.items()}
    try:
        return export(named, (), dict(examples), dynamic_shapes=dims)
    except Exception as error:
        raise CheckpointError(f"torch.export cannot follow the module: {error}. Nothing was written") from error


def _check_batch(examples: Mapping[str, Tensor], described: list[dict[str, Any]]) -> None:
    """An input with as many rows as the first one has is a batch. Others, such as a table, may have a fixed size."""
    rows = [value.shape[0] for value in examples.values() if value.ndim]
    for one in described:
        if one["shape"] and one["shape"][0] == rows[0]:
            raise FunctionError(
                f"the module works for batches of {rows[0]} only, as {one['name']!r} shows: write -1 or"
                " x.shape[0] in it where the size of the batch stands as a number"
            )


def _forget_sources(exported: Any) -> None:
    """The lines of whoever trained the module, and the example, which may be somebody's data, are for nobody else."""
    exported.example_inputs = None
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)


def _on_cpu(exported: Any) -> Any:
    """Where most exports are used; a file for a GPU could not be read without one."""
    tensors = [*exported.state_dict.values(), *exported.constants.values()]
    if all(value.device.type == "cpu" for value in tensors if isinstance(value, Tensor)):
        return exported
    from torch.export.passes import move_to_device_pass  # noqa: PLC0415 - heavy

    return move_to_device_pass(exported, "cpu")


def write(program: Program, folder: Path) -> None:
    with (folder / FILE).open("wb") as stream:  # which says in plain words what a disk lacks
        torch.export.save(program.exported, stream)


def open_run(folder: Path, about: Mapping[str, Any], threads: int | None) -> Run:
    """`threads` is for all of PyTorch in this process: it has no number for each program."""
    if threads is not None:
        torch.set_num_threads(threads)
    module: Callable[..., dict[str, Tensor]] = torch.export.load(folder / FILE).module()
    names = [one["name"] for one in about["outputs"]]

    def run(inputs: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
        with torch.inference_mode():
            found = module(**{name: torch.from_numpy(value) for name, value in inputs.items()})
        return {name: found[name].numpy() for name in names}

    return run
