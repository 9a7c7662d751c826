"""`ModelSpec` and what goes with it: what a `model_fn` returns, in which mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from plait.engine.hooks import SessionRunHook
from plait.errors import FunctionError

__all__ = ["ExportKeys", "ExportSpec", "ModeKeys", "ModelSpec"]


_NOTHING: Mapping[str, Any] = {}


class ModeKeys:
    """What a run, or a call of a user function, is for."""

    EVAL = "EVAL"
    EXPORT = "EXPORT"
    PREDICT = "PREDICT"
    TRAIN = "TRAIN"


class ExportKeys:
    """Formats in which a model leaves for serving."""

    ONNX = "ONNX"
    TF_SERVING = "TF_SERVING"
    TORCH = "TORCH"


@dataclasses.dataclass(frozen=True)
class ExportSpec:
    """The inputs and outputs of the model that is exported; `version` -1 is the next number.

    Inputs are fields of the batch, or placeholders. The names of the classes, and how a picture becomes an input, come
    from the data set if it knows them; `labels` and `preprocess` say otherwise.
    """

    inputs_dict: Mapping[str, torch.Tensor]
    outputs_dict: Mapping[str, torch.Tensor]
    version: int | str = -1
    labels: Sequence[str] | None = dataclasses.field(default=None, kw_only=True)
    preprocess: Mapping[str, Any] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for what in ("inputs_dict", "outputs_dict"):
            given = getattr(self, what)
            if not isinstance(given, Mapping) or not given:
                raise FunctionError(f"ExportSpec {what} is {given!r}: write {{'name': tensor, ...}}")
            for name, value in given.items():
                if not isinstance(value, torch.Tensor):
                    raise FunctionError(f"ExportSpec {what}[{name!r}] is a {type(value).__name__}: give a tensor")
        if not _is_version(self.version):
            raise FunctionError(f"ExportSpec version={self.version!r}: write a number from 1 on, a name, or -1")


def _is_version(version: Any) -> bool:
    if isinstance(version, int) and not isinstance(version, bool):
        return version > 0 or version == -1
    return isinstance(version, str) and bool(version)


class ModelSpec:
    """What a `model_fn` says about one batch.

    Args:
        loss: one number, or a list of them; needed in TRAIN.
        var_scopes: the scopes that the loss moves; for a list of losses, a list of scopes for each.
        log_info: numbers to log, by name; needed in EVAL.
        output_info: tensors for `output_fn`, by name; needed in PREDICT.
        export_spec: an `ExportSpec`; needed in EXPORT.
        hooks: hooks for this mode, each an `AggregativeSessionRunHook`.

    """

    def __init__(
        self,
        loss: torch.Tensor | Sequence[torch.Tensor] | None = None,
        var_scopes: Sequence[Any] | None = None,
        log_info: Mapping[str, Any] | None = None,
        output_info: Mapping[str, Any] | None = None,
        export_spec: ExportSpec | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        *,
        var_scope: Sequence[Any] | None = None,
        output_dict: Mapping[str, Any] | None = None,
    ) -> None:
        # made at every step: what is rare is looked at only where it is given
        if var_scope is not None or output_dict is not None:
            var_scopes = _one("var_scopes", var_scopes, "var_scope", var_scope)
            output_info = _one("output_info", output_info, "output_dict", output_dict)
        self.loss = list(loss) if isinstance(loss, (list, tuple)) else loss
        self.var_scopes = var_scopes
        self.log_info = _NOTHING if log_info is None else log_info
        self.output_info = _NOTHING if output_info is None else output_info
        self.export_spec = export_spec
        self.hooks = hooks or ()

    def check(self, mode: str) -> None:
        """Raise if a part is wrong, or missing in this mode."""
        if self.export_spec is not None and not isinstance(self.export_spec, ExportSpec):
            raise FunctionError(f"export_spec is a {type(self.export_spec).__name__}: write mox.ExportSpec(...)")
        for what, given in (("log_info", self.log_info), ("output_info", self.output_info)):
            if not isinstance(given, Mapping):
                raise FunctionError(f"{what} is a {type(given).__name__}: write {{'name': tensor, ...}}")
        for name, number in self.log_info.items():
            if isinstance(number, torch.Tensor) and number.dim():
                raise FunctionError(f"log_info[{name!r}] has shape {list(number.shape)}: log numbers, such as x.mean()")
        needed = {"TRAIN": "loss", "EVAL": "log_info", "PREDICT": "output_info", "EXPORT": "export_spec"}[mode]
        value = getattr(self, needed)
        if value is None or (isinstance(value, (dict, list)) and not value):
            raise FunctionError(f"in {mode} mode the model_fn's ModelSpec needs {needed}: add it")

    def scopes_of_losses(self) -> list[list[str] | None]:
        """For each loss, the scopes that it moves; None: everything."""
        losses = self.loss if isinstance(self.loss, list) else [self.loss]
        if self.var_scopes is None:
            return [None] * len(losses)
        groups = self.var_scopes if isinstance(self.loss, list) else [self.var_scopes]
        if len(groups) != len(losses):
            raise FunctionError(f"{len(losses)} losses, but var_scopes has {len(groups)}: write a list for each loss")
        return [[group] if isinstance(group, str) else list(group) for group in groups]


def _one(name: str, value: Any, other: str, alias: Any) -> Any:
    if value is not None and alias is not None:
        raise FunctionError(f"ModelSpec got {name} and {other}, two spellings of one thing: give one")
    return value if value is not None else alias
