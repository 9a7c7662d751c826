"""What was found, for people (pretty in a terminal, plain in a pipe) and for programs (JSON)."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.variables.inspect import plain_table

__all__ = ["Grid", "Report", "cut", "number", "printable", "progress", "show"]

_SHORT = 60
_TICK = 1 << 20
"""Bytes between two movements of the bar: records are short and many."""
_WORTH = 4 << 20
"""Bytes that are read before anybody could look at a bar."""
_COLOURS = {"valid": "green", "differs": "yellow", "only here": "red", "only there": "red"}


@dataclass(frozen=True)
class Grid:
    """One table; `right` names the columns of numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    total: Sequence[str] | None = None
    right: frozenset[str] = frozenset({"bytes"})


@dataclass
class Report:
    """The same twice: `facts` as JSON has it, `parts` as lines of text and tables."""

    facts: dict[str, Any]
    parts: list[str | Grid] = field(default_factory=list)


def show(report: Report, *, as_json: bool = False) -> None:
    """Print to stdout."""
    if as_json:
        print(json.dumps(_plain(report.facts), indent=1, ensure_ascii=True, allow_nan=False))  # noqa: T201 - its work
    elif sys.stdout.isatty():
        _pretty(report)
    else:
        print("\n\n".join(_text(part) for part in report.parts))  # noqa: T201 - same


def printable(text: str) -> str:
    """Names come out of files: none may move the reader's cursor."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def cut(value: Any) -> str:
    """A value as JSON, short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHORT else text[: _SHORT - 3] + "..."


def number(value: float | None) -> str:
    """Few digits, enough to see what is odd."""
    return "-" if value is None else f"{value:.4g}"


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if somebody watches; what is given is to be told how many bytes were read.

    Without a total it only moves.
    """
    if not sys.stderr.isatty() or (total is not None and total < _WORTH):
        yield lambda size: None  # noqa: ARG005 - its shape
        return
    from rich import progress as bars  # noqa: PLC0415 - heavy, and only for people who watch
    from rich.console import Console  # noqa: PLC0415 - same

    columns: list[bars.ProgressColumn] = [bars.TextColumn("{task.description}"), bars.BarColumn()]
    if total is not None:
        columns.append(bars.DownloadColumn())
    waiting = 0
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(printable(what).replace("[", r"\["), total=total)

        def advance(size: int) -> None:
            nonlocal waiting
            waiting += size
            if waiting >= _TICK:
                shown.advance(task, waiting)
                waiting = 0

        yield advance


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _text(part: str | Grid) -> str:
    if isinstance(part, str):
        return "\n".join(printable(line) for line in part.split("\n"))
    rows = [*part.rows, *([part.total] if part.total else [])]
    table = plain_table(part.columns, rows)
    return f"{printable(part.title)}\n{table}" if part.title else table


def _pretty(report: Report) -> None:
    from rich.console import Console  # noqa: PLC0415 - heavy, and only for people who watch

    console = Console(markup=False, emoji=False, highlight=False)
    for index, part in enumerate(report.parts):
        if isinstance(part, str):
            console.print(_text(part), style="bold" if index == 0 else None)
        else:
            console.print(_pretty_table(part))


def _pretty_table(grid: Grid) -> Any:
    from rich import box  # noqa: PLC0415 - same
    from rich.table import Table  # noqa: PLC0415 - same
    from rich.text import Text  # noqa: PLC0415 - same

    table = Table(
        title=Text(printable(grid.title)) if grid.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_footer=grid.total is not None,
        header_style="bold cyan",
        footer_style="bold",
    )
    for place, column in enumerate(grid.columns):
        footer = Text(grid.total[place]) if grid.total else ""
        table.add_column(column, footer, justify="right" if column in grid.right else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(printable(cell), style=_COLOURS.get(cell, "")) for cell in row))
    return table
