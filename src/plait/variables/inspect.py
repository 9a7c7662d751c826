"""Tables as plain text, for logs and errors; `plait.inspection` shows what is inside files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

__all__ = ["plain_table"]


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without colours or frames, as wide as it needs to be."""
    from rich.console import Console  # noqa: PLC0415  only where something is shown
    from rich.table import Table  # noqa: PLC0415  same

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(_printable(cell) for cell in row))
    text = io.StringIO()
    console = Console(file=text, width=100_000, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _printable(text: str) -> str:
    """Names come out of files: none may move the reader's cursor."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
