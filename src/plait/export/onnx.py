"""The format "onnx": written by PyTorch's exporter, run by onnxruntime."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import CheckpointError
from plait.export.formats import Arrays, Run
from plait.export.program import Program

__all__ = ["FILE", "open_run", "write"]

FILE = "model.onnx"

_MAX_BYTES = 3 * 2**29
"""With more, the weights go into a file beside it: one file of this kind cannot have 2 GiB."""
_ERROR = 3
"""onnxruntime's number for messages that are errors."""
_SPEAKERS = ("onnxscript", "onnx_ir", "torch.onnx")


def write(program: Program, folder: Path) -> None:
    weights = [value for value in program.exported.state_dict.values() if isinstance(value, Tensor)]
    large = sum(value.nbytes for value in weights) > _MAX_BYTES
    try:
        with _quiet():
            made = torch.onnx.export(
                program.exported,
                input_names=[one["name"] for one in program.inputs],
                output_names=_output_names(program.inputs, program.outputs),
                dynamo=True,
                verbose=False,
            )
            if made is None:
                raise RuntimeError("torch.onnx.export gave nothing")
            made.save(folder / FILE, external_data=large)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"torch.onnx cannot write this module: {first}. Nothing was published") from error


def _output_names(inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the outputs in the file: in a graph of ONNX an output cannot be called as an input is."""
    taken = {one["name"] for one in [*inputs, *outputs]}
    clash = {one["name"] for one in inputs}
    found = []
    for one in outputs:
        name = one["name"]
        while name in clash or (name != one["name"] and name in taken):
            name += "_out"
        found.append(name)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, nobody prints or warns: what goes wrong is an error anyway."""
    loggers = [logging.getLogger(name) for name in _SPEAKERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def open_run(folder: Path, about: Mapping[str, Any], threads: int | None) -> Run:
    onnxruntime: Any = importlib.import_module("onnxruntime")  # an extra; it has no types
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERROR
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / FILE), options, providers=["CPUExecutionProvider"])
    names = [one["name"] for one in about["outputs"]]
    inside = [one.name for one in session.get_outputs()]  # where one is also an input's, it is another

    def run(inputs: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
        return dict(zip(names, session.run(inside, dict(inputs)), strict=True))

    return run
