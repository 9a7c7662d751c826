"""The export of one party's part of a federated model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from plait.engine.calls import UserCall
from plait.engine.model import Model
from plait.errors import ConfigError
from plait.export.exporter import export
from plait.export.publish import NEXT
from plait.export.served import Served, facts_of

__all__ = ["Part", "export_part"]


@runtime_checkable
class Part(Protocol):
    """What `FederalModel.part` gives: it knows its inputs, and which of them come from the other party."""

    model: Model
    call: UserCall
    inputs: dict[str, Tensor]
    facts: dict[str, Any]


def export_part(
    part: Part,
    directory: str | os.PathLike[str],
    *,
    formats: Sequence[str] = ("torch",),
    version: int | str = NEXT,
    labels: Sequence[str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write a party's part as `plait.export.export` writes a module; `model.json` says under `party` what travels.

    Both parties export at the same moment of their training: only parts of one pair are served together. The step, what
    the last evaluation found and the epsilon of private training go with it; `facts` says what else is known.
    """
    if not isinstance(part, Part):
        raise ConfigError(f"part is a {type(part).__name__}: write model.part(predict_fn, inputs) of a FederalModel")
    known = {**facts_of(part.model), **(facts or {}), "party": part.facts}
    module = Served(part.model, part.call)
    return export(module, part.inputs, directory, formats=formats, version=version, labels=labels, facts=known)
