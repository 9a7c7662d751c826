"""TFRecord files: how many records of which sizes, and what features the Examples in them have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plait.data.example import parse_example
from plait.data.tfrecord import read_records
from plait.errors import DataError
from plait.inspection.reports import Grid, Report, progress
from plait.inspection.sources import statistics_cells
from plait.inspection.statistics import Statistics

__all__ = ["looks_like_records", "records_report"]

_FIRST = 100
"""Records in which features are looked for; with statistics it is all of them."""
_FRAME = 16
"""Bytes that a plain file has for each record beside it."""
_LISTS, _NUMBERS = 1 << 12, 1 << 20
"""What is kept of a feature before it is counted."""
_STATISTICS = ("mean", "deviation", "min", "max", "zeros", "nans", "infinite")


@dataclass
class _Span:
    """The least and the greatest of some whole numbers."""

    least: int | None = None
    greatest: int | None = None

    def add(self, value: int) -> None:
        self.least = value if self.least is None else min(self.least, value)
        self.greatest = value if self.greatest is None else max(self.greatest, value)

    def text(self) -> str:
        if self.least is None:
            return "-"
        return f"{self.least:,}" if self.least == self.greatest else f"{self.least:,} to {self.greatest:,}"


@dataclass
class _Feature:
    kinds: dict[str, None] = field(default_factory=dict)
    records: int = 0
    values: _Span = field(default_factory=_Span)
    lengths: _Span = field(default_factory=_Span)
    _statistics: Statistics = field(default_factory=Statistics)
    _kept: list[Any] = field(default_factory=list)
    _waiting: int = 0

    def add(self, value: Any, *, stats: bool) -> None:
        self.records += 1
        self.values.add(len(value))
        if isinstance(value, np.ndarray):
            self.kinds[str(value.dtype)] = None
            if stats:
                self._keep(value)
            return
        for item in value:
            self.kinds["bytes"] = None
            self.lengths.add(len(item))

    def statistics(self) -> dict[str, Any] | None:
        """Of all numbers so far; None of what has none."""
        self._take_in()
        return self._statistics.facts() if self._statistics.count else None

    def _keep(self, value: Any) -> None:
        """Many short lists are counted as one: most have a single number."""
        self._kept.append(value.astype(np.float64))
        self._waiting += len(value)
        if len(self._kept) >= _LISTS or self._waiting >= _NUMBERS:
            self._take_in()

    def _take_in(self) -> None:
        if self._kept:
            self._statistics.add(torch.from_numpy(np.concatenate(self._kept)))
            self._kept, self._waiting = [], 0


@dataclass
class _Survey:
    count: int = 0
    size: int = 0
    sizes: _Span = field(default_factory=_Span)
    looked_at: int = 0
    features: dict[str, _Feature] = field(default_factory=dict)
    odd: str | None = None
    """Why a record is no Example: the first of them, none is looked into after it."""

    def add(self, record: memoryview | bytes, *, stats: bool) -> None:
        self.count += 1
        self.size += len(record)
        self.sizes.add(len(record))
        if self.odd is None and (stats or self.count <= _FIRST):
            self._look(record, stats=stats)

    def _look(self, record: memoryview | bytes, *, stats: bool) -> None:
        try:
            found = parse_example(record)
        except DataError as error:
            self.odd = f"record {self.count - 1}: {error}"
            return
        self.looked_at += 1
        for name, value in found.items():
            self.features.setdefault(name, _Feature()).add(value, stats=stats)


def looks_like_records(path: Path) -> bool:
    """Whether the file is called so, or begins with a record whose checksums are right."""
    if "tfrecord" in path.name.lower():
        return True
    try:
        return next(iter(read_records(path)), None) is not None
    except DataError:
        return False


def records_report(path: Path, *, stats: bool) -> Report:
    """Read every record and its checksum, and look into the first ones; into all of them for statistics."""
    survey, size = _Survey(), path.stat().st_size
    with progress(f"reading {path.name}", size) as advance:
        for record in read_records(path):
            survey.add(record, stats=stats)
            advance(len(record) + _FRAME)
    facts: dict[str, Any] = {
        "kind": "TFRecord file",
        "path": str(path),
        "bytes": size,
        "compressed": size != survey.size + _FRAME * survey.count,
        "records": survey.count,
        "record_bytes": _span_facts(survey.sizes) | {"total": survey.size},
        "looked_at": survey.looked_at,
        "features": [_feature_facts(name, one, stats=stats) for name, one in sorted(survey.features.items())],
        "not_examples": survey.odd,
    }
    return Report(facts, _parts(path, survey, facts, stats=stats))


def _parts(path: Path, survey: _Survey, facts: dict[str, Any], *, stats: bool) -> list[str | Grid]:
    kind = "a compressed TFRecord file" if facts["compressed"] else "a TFRecord file"
    lines = [f"{path.name}: {kind}, {survey.count:,} records in {facts['bytes']:,} bytes, every checksum right"]
    if survey.count:
        mean = survey.size / survey.count
        lines.append(f"bytes of a record: {survey.sizes.text()}, {mean:,.1f} on average, {survey.size:,} in all")
    if survey.odd is not None:
        lines.append(f"not all are Examples: {survey.odd}")
    parts: list[str | Grid] = ["\n".join(lines)]
    if survey.features:
        rows = [_row(name, one, stats=stats) for name, one in sorted(survey.features.items())]
        more: Sequence[str] = _STATISTICS if stats else ()
        right = frozenset({"records", "values", "length", *_STATISTICS})
        title = f"features of {'all' if survey.looked_at == survey.count else 'the first'} {survey.looked_at:,} records"
        parts.append(Grid(("feature", "kind", "records", "values", "length", *more), rows, title, right=right))
    return parts


def _row(name: str, feature: _Feature, *, stats: bool) -> list[str]:
    kinds = ", ".join(feature.kinds) or "empty"
    row = [name, kinds, f"{feature.records:,}", feature.values.text(), feature.lengths.text()]
    return [*row, *statistics_cells(feature.statistics())] if stats else row


def _feature_facts(name: str, feature: _Feature, *, stats: bool) -> dict[str, Any]:
    facts = {
        "name": name,
        "kinds": list(feature.kinds),
        "records": feature.records,
        "values": _span_facts(feature.values),
        "length": _span_facts(feature.lengths),
    }
    return {**facts, "statistics": feature.statistics()} if stats else facts


def _span_facts(span: _Span) -> dict[str, Any]:
    return {"min": span.least, "max": span.greatest}
