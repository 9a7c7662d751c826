"""The format "tf": a SavedModel of TensorFlow with the signature `serving_default`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.errors import CheckpointError, ConfigError
from plait.export.formats import Arrays, Run
from plait.export.program import Program
from plait.export.tf_graph import check as check_operators
from plait.export.tf_graph import translate
from plait.export.tf_pointwise import as_dtype
from plait.export.tf_values import tf

__all__ = ["FILE", "SIGNATURE", "check", "open_run", "write", "write_savedmodel"]

FILE = "saved_model.pb"
SIGNATURE = "serving_default"


def check(program: Program) -> None:
    """Before anything is written: is there something in the module that TensorFlow has no word for?"""
    hidden = [one["name"] for one in program.inputs if one["name"].startswith("_")]
    if hidden:
        raise ConfigError(
            f"format 'tf' has no inputs with a name like {hidden[0]!r}: write one that starts with a letter"
        )
    check_operators(program.core)


def write(program: Program, folder: Path) -> None:
    write_savedmodel(program.core, folder, program.inputs, program.outputs)


def write_savedmodel(
    core: Any,
    directory: str | os.PathLike[str],
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Mapping[str, Any]],
) -> None:
    """Write a lowered program; TensorFlow Serving takes the directory as a version of a model.

    `inputs` and `outputs` are those of the program in their order, in the form that `model.json` has.
    """
    check_operators(core)
    _use_cpu()
    model, variables = tf.Module(), dict[tuple[str, str], Any]()

    def serve(*given: Any) -> dict[str, Any]:
        found = translate(core, given, variables)
        return {one["name"]: tensor for one, tensor in zip(outputs, found, strict=True)}

    specs = [tf.TensorSpec(one["shape"], as_dtype(getattr(torch, one["dtype"])), name=one["name"]) for one in inputs]
    try:
        with _quiet():
            serving = tf.function(serve, autograph=False).get_concrete_function(*specs)
            model.weights = _named(variables)
            tf.saved_model.save(model, os.fspath(directory), signatures={SIGNATURE: serving})
    except ConfigError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"TensorFlow cannot write this module: {first}. Nothing was published") from error


def _named(variables: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    """By the names that the module has for them; a weight that is used in several forms is there several times."""
    found: dict[str, Any] = {}
    for (name, form), one in variables.items():
        found[f"{name} {form}" if name in found else name] = one
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, TensorFlow does not tell what it writes."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _use_cpu() -> None:
    """Unless it was told before: TensorFlow takes the whole memory of a GPU, in which the training may still be."""
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")


def open_run(folder: Path, about: Mapping[str, Any], threads: int | None) -> Run:
    """`threads` is for all of TensorFlow in this process, and cannot be changed once it has worked."""
    _use_cpu()
    if threads is not None:
        _set_threads(threads)
    with _quiet():
        model = tf.saved_model.load(os.fspath(folder))
    serving = model.signatures[SIGNATURE]
    names = [one["name"] for one in about["outputs"]]

    def run(inputs: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
        found = serving(**{name: tf.constant(value) for name, value in inputs.items()})
        return {name: np.asarray(found[name].numpy()) for name in names}

    run.model = model  # type: ignore[attr-defined] # a signature alone would let go of the variables
    return run


def _set_threads(threads: int) -> None:
    settings = tf.config.threading
    if settings.get_intra_op_parallelism_threads() == threads:
        return
    try:
        settings.set_intra_op_parallelism_threads(threads)
        settings.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        raise ConfigError(
            f"threads is {threads}, but TensorFlow has worked in this process with"
            f" {settings.get_intra_op_parallelism_threads() or 'its own number of'} threads: load it in another process"
        ) from None
