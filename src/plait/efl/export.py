"""`efl.export`: what a model predicts, as files for those who only use it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from plait.data import Sample
from plait.engine.calls import UserCall
from plait.engine.model import Model
from plait.engine.report import log
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, FunctionError, TaskError
from plait.export import exporter
from plait.export.formats import check_formats
from plait.export.publish import NEXT, check_version
from plait.export.script import asked
from plait.export.served import Served, facts_of
from plait.rng import isolated_rng

__all__ = ["PredictFn", "export"]


class PredictFn(Protocol):
    """What is exported."""

    def __call__(self, model: Any, sample: Sample, /) -> Tensor | Mapping[str, Tensor]:
        """The outputs for a batch with the fields that `inputs` names: a tensor, or a dict of name: tensor."""


def export(
    model: Model,
    predict_fn: PredictFn,
    inputs: Mapping[str, Tensor],
    directory: str | os.PathLike[str],
    *,
    formats: Sequence[str] = ("torch",),
    version: int | str = NEXT,
    labels: Sequence[str] | None = None,
    preprocess: Mapping[str, Any] | None = None,
) -> Path | None:
    """Write `predict_fn` with the model's variables as a version of `directory`, and give where it is.

    The step, what the last evaluation found and the epsilon of private training go with it. Of several workers the
    first one writes; the others get None.

    Args:
        model: compiled; usually trained.
        predict_fn: `predict_fn(model, sample)` gives the outputs: a tensor, or a dict of name: tensor.
        inputs: an example of each field of the sample. The first dimension is the batch, which may have any size.
        directory: where the versions are.
        formats: "torch", "onnx", "tf".
        version: -1 for the next number; a number or a name is taken as it is and must be new.
        labels: the names of the classes.
        preprocess: how a picture becomes an input.

    """
    request = asked()
    if request is not None:
        formats = request.formats or formats
        version = version if request.version is None else request.version
        directory = request.directory or directory
    check_formats(formats)
    check_version(directory, version)
    if not callable(predict_fn):
        raise FunctionError(f"predict_fn is a {type(predict_fn).__name__}: give a function of (model, sample)")
    if not model.compiled:
        raise TaskError("the model is not compiled, so its variables are not known: call compile(), or fit()")
    if request is not None:
        request.take_up(model)
    if model.strategy.worker_id > 0:
        return None
    _check_rows(model)
    where = exporter.export(
        Served(model, _call(model, predict_fn)),
        inputs,
        directory,
        formats=formats,
        version=version,
        labels=labels,
        facts={**facts_of(model), "preprocess": preprocess},
    )
    log.info("exported: %s", where)
    if request is not None:
        request.done(where)
    return where


def _call(model: Model, predict_fn: PredictFn) -> UserCall:
    def predicted(given: Mapping[str, Tensor]) -> Any:
        with isolated_rng(model.seed):
            return predict_fn(model, Sample.of(dict(given)))

    return UserCall(predicted, TaskScope(MODE.EVAL, None), model._store, model._now)  # noqa: SLF001 - a friend


def _check_rows(model: Model) -> None:
    from plait.cluster.embedding import SparseEmbedding  # noqa: PLC0415 - brings tables, which few need

    if any(isinstance(module, SparseEmbedding) for module in model.modules()):
        raise ConfigError("a SparseEmbedding has no fixed rows that could be exported: use nn.Embedding")
