"""The model as it predicts, through `plait.export`; and exporters, which `train_and_evaluate` asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from plait.errors import ConfigError, FunctionError
from plait.train.program import Program
from plait.train.spec import EstimatorSpec, ModeKeys

if TYPE_CHECKING:
    from plait.train.estimator import Estimator

__all__ = [
    "BestExporter",
    "FinalExporter",
    "LatestExporter",
    "ServingInputReceiver",
    "build_raw_serving_input_receiver_fn",
    "export_model",
    "received",
]

DEFAULT = "serving_default"


class ServingInputReceiver(NamedTuple):
    """What a served model is given: an example of each feature. Both are the same tensors."""

    features: Any
    receiver_tensors: Any
    receiver_tensors_alternatives: None = None


def build_raw_serving_input_receiver_fn(
    features: Mapping[str, torch.Tensor], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """A `serving_input_receiver_fn` for a model whose inputs are the features themselves.

    `features` are examples, by name: their first dimension is the batch, which may then have any size.
    """
    del default_batch_size
    return lambda: ServingInputReceiver(features, features)


def received(serving_input_receiver_fn: Callable[[], Any]) -> ServingInputReceiver:
    """What the function gives, checked."""
    found = serving_input_receiver_fn()
    if not isinstance(found, ServingInputReceiver):
        raise FunctionError(
            f"the serving_input_receiver_fn returned {type(found).__name__}: write "
            "build_raw_serving_input_receiver_fn(features), or return a ServingInputReceiver"
        )
    features, given = _by_name(found.features), _by_name(found.receiver_tensors)
    if features.keys() != given.keys() or any(features[name] is not given[name] for name in features):
        raise FunctionError(
            "receiver_tensors are not the features: what is done to them between the two is not in an export; give "
            "the same tensors twice, and do it in the model_fn"
        )
    return ServingInputReceiver(found.features, given)


def _by_name(tensors: Any) -> dict[str, Any]:
    return dict(tensors) if isinstance(tensors, Mapping) else {"features": tensors}


class _Serving(nn.Module):
    """The model_fn in PREDICT mode, as a module of its features."""

    def __init__(self, program: Program, *, named: bool) -> None:
        super().__init__()
        self.model = program.model
        self._call = program.call
        self._named = named

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        with self.model.scope():
            spec = self._call(inputs if self._named else inputs["features"], None, ModeKeys.PREDICT)
        return _outputs(spec)


def _outputs(spec: EstimatorSpec) -> dict[str, torch.Tensor]:
    """The default signature, or the only one; without any, the predictions. What is no tensor is left out."""
    signatures = spec.export_outputs
    found = spec.predictions
    if signatures:
        nested = any(isinstance(value, Mapping) for value in signatures.values())
        found = signatures if not nested else signatures.get(DEFAULT) or next(iter(signatures.values()))
    if isinstance(found, torch.Tensor):
        return {"output": found}
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise FunctionError("no prediction is a tensor: give tensors in predictions= or export_outputs=")
    return tensors


def export_model(
    program: Program,
    receiver: ServingInputReceiver,
    directory: str | os.PathLike[str],
    *,
    formats: Sequence[str],
    labels: Sequence[str] | None,
) -> Path:
    """Write the next version below `directory`."""
    from plait.export import export  # noqa: PLC0415 - heavy

    module = _Serving(program, named=isinstance(receiver.features, Mapping))
    facts = {"step": program.model.global_step.value}
    return export(module, receiver.receiver_tensors, directory, formats=formats, labels=labels, facts=facts)


class _Exporter:
    """Asked after each evaluation of `train_and_evaluate`."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: None = None,
        as_text: bool = False,
        *,
        formats: Sequence[str] = ("torch",),
    ) -> None:
        del as_text
        if not name or assets_extra is not None:
            raise ConfigError("an exporter needs a name, and takes no assets_extra")
        self.name = name
        self._receiver = serving_input_receiver_fn
        self._formats = formats

    def _is_due(self, eval_result: Mapping[str, Any], *, final: bool) -> bool:
        raise NotImplementedError

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str | None,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Export below `export_path`, if it is this exporter's time; returns where to."""
        del checkpoint_path  # the living model is exported
        if not self._is_due(eval_result, final=is_the_final_export):
            return None
        return estimator.export_saved_model(export_path, self._receiver, formats=self._formats)


class FinalExporter(_Exporter):
    """Exports at the end."""

    def _is_due(self, eval_result: Mapping[str, Any], *, final: bool) -> bool:
        del eval_result
        return final


class LatestExporter(_Exporter):
    """Exports after every evaluation."""

    def _is_due(self, eval_result: Mapping[str, Any], *, final: bool) -> bool:
        del eval_result, final
        return True


class BestExporter(_Exporter):
    """Exports after each evaluation that is better than those before it: by default, of lower loss."""

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        compare_fn: Callable[..., bool] | None = None,
        *,
        formats: Sequence[str] = ("torch",),
    ) -> None:
        if serving_input_receiver_fn is None:
            raise ConfigError("BestExporter needs serving_input_receiver_fn=")
        super().__init__(name, serving_input_receiver_fn, formats=formats)
        self._better = compare_fn or _lower_loss
        self._best: Mapping[str, Any] | None = None

    def _is_due(self, eval_result: Mapping[str, Any], *, final: bool) -> bool:
        del final
        if self._best is not None and not self._better(best_eval_result=self._best, current_eval_result=eval_result):
            return False
        self._best = dict(eval_result)
        return True


def _lower_loss(best_eval_result: Mapping[str, Any], current_eval_result: Mapping[str, Any]) -> bool:
    return bool(current_eval_result["loss"] < best_eval_result["loss"])
