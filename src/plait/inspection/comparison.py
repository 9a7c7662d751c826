"""Two sets of tensors side by side: what only one has, and how far the others are apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

from plait.inspection.reports import Grid, Report, number, progress
from plait.inspection.sources import Entry, Tensors, as_variables
from plait.inspection.statistics import gap

__all__ = ["comparison_report"]

_SAME = "same"
_WORDS = (
    "only here",
    "only there",
    "other shape",
    "other dtype",
    "other dtype, not read",
    "differs",
    "not read",
    _SAME,
)
"""What can be said of a tensor, in the order in which it is told."""


def comparison_report(here: Tensors, there: Tensors) -> Report:
    """Compare by name; two of different kinds as `ModelBank` would load them."""
    alike = here.kind == there.kind
    if not alike:
        here, there = as_variables(here), as_variables(there)
    found = _compare(here, there)
    counts = Counter(one["is"] for one in found)
    same = len(found) == counts[_SAME]
    facts = {
        "kind": "comparison",
        "here": {"path": str(here.path), "kind": here.kind},
        "there": {"path": str(there.path), "kind": there.kind},
        "as_variables": not alike,
        "same": same,
        "counts": {word: counts[word] for word in _WORDS if counts[word]},
        "tensors": found,
    }
    return Report(facts, _parts(here, there, facts))


def _compare(here: Tensors, there: Tensors) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(here.entries.keys() | there.entries.keys()):
        one, other = here.entries.get(name), there.entries.get(name)
        found[name] = {"name": name, "is": _first_look(one, other), "here": _told(one), "there": _told(other)}
    # of one shape: their numbers decide, whatever their types
    wanted = [name for name, told in found.items() if told["is"] in ("differs", "other dtype")]
    with progress("comparing", sum(here.entries[name].nbytes for name in wanted)) as advance:
        for (name, one_tensor), (_, other_tensor) in zip(here.each(wanted), there.each(wanted), strict=True):
            apart = gap(one_tensor, other_tensor)
            found[name] |= {"absolute": apart.absolute, "relative": apart.relative}
            if apart.same:
                found[name]["is"] = _SAME
            advance(one_tensor.nbytes)
    return list(found.values())


def _first_look(one: Entry | None, other: Entry | None) -> str:
    if one is None or other is None:
        return "only there" if one is None else "only here"
    if one.shape != other.shape:
        return "other shape"
    if not (one.readable and other.readable):
        return "not read" if one.dtype == other.dtype else "other dtype, not read"
    return "differs" if one.dtype == other.dtype else "other dtype"


def _told(entry: Entry | None) -> dict[str, Any] | None:
    return None if entry is None else {"dtype": entry.dtype, "shape": list(entry.shape)}


def _parts(here: Tensors, there: Tensors, facts: dict[str, Any]) -> list[str | Grid]:
    lines = [f"here: {here.path} ({here.kind})", f"there: {there.path} ({there.kind})"]
    if facts["as_variables"]:
        lines.append("of different kinds: variables only, '/' for '.', dimensions in torch's order")
    rows = [_row(one) for one in facts["tensors"] if one["is"] != _SAME]
    grid = Grid(
        ("tensor", "is", "here", "there", "greatest difference", "relative"),
        rows,
        right=frozenset({"greatest difference", "relative"}),
    )
    count, same = len(facts["tensors"]), facts["counts"].get(_SAME, 0)
    if facts["same"]:
        verdict = f"All {count} tensors are the same, bit for bit." if count else "Neither has a tensor."
    else:
        verdict = f"{same} of {count} tensors are the same, bit for bit; {_counted(facts['counts'])}."
    return ["\n".join(lines), *([grid] if rows else []), verdict]


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items() if word != _SAME)


def _row(one: dict[str, Any]) -> list[str]:
    sides = [f"{side['dtype']} {side['shape']}" if side else "-" for side in (one["here"], one["there"])]
    return [one["name"], one["is"], *sides, number(one.get("absolute")), number(one.get("relative"))]
