"""A `model_fn` in EXPORT mode: what its `ExportSpec` names becomes a module, and the module becomes files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.data import Sample
from plait.engine.calls import UserCall
from plait.engine.report import log
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, FunctionError
from plait.export.describe import check_facts, check_labels
from plait.export.exporter import export
from plait.export.formats import check_formats
from plait.export.program import in_evaluation
from plait.export.publish import check_version
from plait.export.script import asked
from plait.export.served import Served, facts_of
from plait.export.tracking import Tracking
from plait.mox.export_facts import labels_of, preprocess_of
from plait.mox.program import EVAL, TRAIN, Program
from plait.mox.spec import ExportKeys, ExportSpec, ModeKeys
from plait.rng import isolated_rng

__all__ = ["FORMATS", "Wanted", "prepared", "wanted"]

FORMATS = {ExportKeys.TF_SERVING: "tf", ExportKeys.ONNX: "onnx", ExportKeys.TORCH: "torch"}

_ROWS = 4
"""Of the first batch; an example needs no more."""


class Wanted(NamedTuple):
    """An export that the run ends with."""

    directory: Path
    formats: list[str]
    version: int | str | None
    """None: that of the ExportSpec."""


def wanted(export_model: Any, log_dir: str | None) -> Wanted | None:
    """What `export_model` or the command `plait export` asks for; what it needs is looked for before any work."""
    request = asked()
    if not export_model and request is None:
        return None
    if export_model and export_model not in FORMATS:
        keys = ", ".join(FORMATS)
        raise ConfigError(f"export_model={export_model!r}: write one of mox.ExportKeys, {keys}, or False")
    named = (request.formats if request else ()) or [FORMATS[export_model] if export_model else "torch"]
    directory = request.directory if request else None
    if directory is None and log_dir is None:
        raise ConfigError("the export goes into the directory `export` of log_dir: give log_dir= (or --out)")
    version = request.version if request else None
    return Wanted(directory or Path(str(log_dir), "export"), check_formats(named), version)


def prepared(program: Program, wanted: Wanted) -> Callable[[], Path]:
    """Call the model_fn once in EXPORT mode and check what it says; gives the function that writes the export.

    That writes the variables as they are when it is called.
    """
    model = program.model
    scope = TRAIN if TRAIN in model.streams else EVAL
    call = _ExportCall(program, model.streams[scope].read())
    served = Served(model, call)
    with in_evaluation(served), isolated_rng(model.seed):
        inputs, spec = call.first(served)
    version = spec.version if wanted.version is None else wanted.version
    check_version(wanted.directory, version)
    source = next(iter(program.sources.values()))  # that of training, where there is one
    labels = spec.labels if spec.labels is not None else labels_of(source, spec.outputs_dict)
    preprocess = spec.preprocess if spec.preprocess is not None else preprocess_of(source, inputs)
    check_labels(labels)
    check_facts({"preprocess": preprocess})

    def write() -> Path:
        facts = {**facts_of(model), "preprocess": preprocess}
        with isolated_rng(model.seed):
            where = export(
                served,
                inputs,
                wanted.directory,
                formats=wanted.formats,
                version=version,
                labels=labels,
                facts=facts,
            )
        log.info("exported: %s", where)
        return where

    return write


class _ExportCall(UserCall):
    """Calls the model_fn in EXPORT mode, with tensors of ours for the batch and for placeholders.

    Fields that are no inputs of the export, such as labels, are zeros: nothing of the data goes with it.
    """

    __slots__ = (
        "_batched",
        "_example_rows",
        "_fed",
        "_fields",
        "_inputs",
        "_made",
        "_named",
        "_program",
        "_rows",
        "_tracking",
    )

    def __init__(self, program: Program, batch: Sample) -> None:
        model = program.model
        super().__init__(self._answer, TaskScope(MODE.EVAL, None), model._store, model._now)  # noqa: SLF001 - a friend
        self._program = program
        self._named = batch.unnamed() is None
        self._batched = {name for name, value in batch.items() if _has_rows(value, batch.batch_size)}
        self._fields = {name: _example(value, name in self._batched) for name, value in batch.items()}
        self._example_rows = min(batch.batch_size or 1, _ROWS)
        self._rows: Any = self._example_rows
        """Of this call: a number, or torch's symbol for one."""
        self._inputs: dict[str, Any] = {}
        """The field, or the number of the placeholder, that each input of the export stands for."""
        self._made: list[Tensor] = []
        """The placeholders of the last call."""
        self._fed: dict[int, Tensor] = {}
        self._tracking: Tracking | None = None

    def first(self, served: Served) -> tuple[dict[str, Tensor], ExportSpec]:
        """Find the inputs among fields and placeholders, and check that the outputs are made of nothing else."""
        tensors = {name: value for name, value in self._fields.items() if isinstance(value, Tensor)}
        with Tracking() as tracking:
            self._tracking = tracking
            for name, value in tensors.items():
                tracking.begin(value, f"field {name!r} of the batch")
            served()
            self._tracking = None
        written = [name for name, value in tensors.items() if value._version]  # noqa: SLF001 - torch has no other name
        if written:
            raise FunctionError(
                f"the model_fn writes into field {written[0]!r} of its batch: let it make a new tensor, as in x = x / 2"
            )
        spec = self._program.specs[ModeKeys.EXPORT].export_spec
        assert spec is not None  # noqa: S101 - the first call of a mode is checked
        for name, value in spec.inputs_dict.items():
            self._inputs[name] = self._place(name, value, tracking)
        _check_outputs(spec, tracking)
        return dict(spec.inputs_dict), spec

    def _place(self, name: str, value: Tensor, tracking: Tracking) -> Any:
        if not isinstance(name, str) or not name.isidentifier():
            raise FunctionError(f"ExportSpec inputs_dict has {name!r}: write a name of letters, digits and '_'")
        places: list[Any] = [field for field, found in self._fields.items() if found is value]
        places += [("placeholder", number) for number, made in enumerate(self._made) if made is value]
        taken = [other for other, place in self._inputs.items() if place in places]
        if taken:
            raise FunctionError(f"ExportSpec inputs_dict has {taken[0]!r} and {name!r} for one tensor: write one")
        if not places:
            sources = "".join(f", but made of {one}" for one in sorted(tracking.made_of(value))[:1])
            raise FunctionError(
                f"ExportSpec inputs_dict[{name!r}] is no field of the batch and no mox.placeholder{sources}: write a"
                " tensor that the model_fn was given, before anything is done to it"
            )
        return places[0]

    def _answer(self, given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The outputs for what is given; for the example, if nothing is."""
        places = {self._inputs[name]: value for name, value in given.items()}
        self._rows = next((value.shape[0] for value in given.values() if value.ndim), self._example_rows)
        fields = self._fields if not given else {name: self._zeros(name) for name in self._fields}
        fields = {name: places.get(name, value) for name, value in fields.items()}
        self._fed = {place[1]: value for place, value in places.items() if isinstance(place, tuple)}
        self._made = []
        spec = self._program.one_spec(ModeKeys.EXPORT, Sample.of(fields if self._named else tuple(fields.values())))
        self._program.specs[ModeKeys.EXPORT] = spec
        assert spec.export_spec is not None  # noqa: S101 - the first call of a mode is checked
        return spec.export_spec.outputs_dict

    def _zeros(self, name: Any) -> Any:
        """In the place of a field that nobody gives."""
        value = self._fields[name]
        if not isinstance(value, Tensor):
            return value
        sizes = [self._rows, *value.shape[1:]] if name in self._batched else value.shape
        return torch.zeros(sizes, dtype=value.dtype, device=value.device)  # not like it, or it would go with it

    def placeholder(self, dtype: torch.dtype, shape: Sequence[int | None] | None, name: str | None) -> Tensor:
        number, made = len(self._made), self._fed.get(len(self._made))
        if made is None:
            sizes = [size or (1 if place else self._rows) for place, size in enumerate(shape or ())]
            made = torch.zeros(sizes, dtype=dtype, device=self.store.device)
        if self._tracking is not None:
            self._tracking.begin(made, f"placeholder {name or number}")
        self._made.append(made)
        return made


def _check_outputs(spec: ExportSpec, tracking: Tracking) -> None:
    known: frozenset[str] = frozenset().union(*(tracking.made_of(value) for value in spec.inputs_dict.values()))
    for name, value in spec.outputs_dict.items():
        others = sorted(tracking.made_of(value) - known)
        if others:
            raise FunctionError(
                f"ExportSpec outputs_dict[{name!r}] is made of {others[0]}, which is not among the inputs: add it to"
                " inputs_dict, or export what can do without it"
            )


def _has_rows(value: Any, rows: int | None) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows


def _example(value: Any, batched: bool) -> Any:
    """A few rows, in memory of their own."""
    return (value[:_ROWS] if batched else value).detach().clone() if isinstance(value, Tensor) else value
