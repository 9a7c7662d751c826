"""How far a run is: a line that moves in a terminal, a line of the log now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

__all__ = ["Progress"]

EVERY_SECONDS = 5.0

log = logging.getLogger("plait")


class Progress:
    """Hears of progress, in a `with` block; may be told from several threads."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._said: dict[str, float] = {}

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console  # noqa: PLC0415 - heavy
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
            from rich.progress import Progress as Bars  # noqa: PLC0415

            columns = [TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
            self._bars = Bars(*columns, console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """So much is done of a part of the work; `total` None: nobody knows how much it is."""
        if self._bars is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bars.add_task(what, total=total)
            self._bars.update(self._tasks[what], completed=done, total=total)
            return
        now = time.monotonic()
        if done == total or now >= self._said.get(what, 0.0):
            self._said[what] = now + EVERY_SECONDS
            log.info("%s: %s%s", what, f"{done:,}", "" if total is None else f" of {total:,}")
