"""Both parties on one terminal: side by side as they run, or line by line when nobody watches."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from plait.federal.supervise import Member
from plait.launch.output import Echo, last_lines
from plait.launch.processes import LocalChild, describe

__all__ = ["Facts", "Lines", "Screen", "draw", "facts_of", "view"]

_REFRESH_SECONDS = 0.25  # a frame costs about 4 ms of a core that trains
_LAST_SECONDS = 1.0  # a terminal that somebody has stopped is waited for so long, and no longer
_NARROWEST = 60  # columns; in fewer than these, two panels cannot be read
_TALLEST = 24
_BORDER = 4  # columns of a panel that are not text
_READ_LINES = 400  # of each log; more do not fit on any terminal
_STEP = re.compile(r"global step:? (\d+)")
_WIRE = re.compile(r"on the wire: ([^;]+)")
_COLOURS = {"running": "cyan", "ended well": "green"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about a party at a moment."""

    name: str
    state: str
    """"running", "ended well", or how it ended: "SIGKILL", "exit code 3"."""
    pids: Sequence[int]
    restarts: int
    since: float
    step: int | None
    """The last global step in its log."""
    wire: str | None
    """Behind the last `on the wire: ` of its log."""
    lines: Sequence[str]
    """The last lines of its log; several workers' one after the other."""


class Lines(Echo):
    """The parties' logs as one stream of lines, each with the name of its party: `leader | ...`."""

    def __init__(self, logs: Mapping[str, Path], out: TextIO) -> None:
        super().__init__(logs, out)
        width = max(len(name) for name in logs)
        for name, follower in zip(logs, self._followers, strict=True):
            follower._prefix = f"{name:<{width}} | "  # noqa: SLF001 - the launcher's own class, with another prefix


class Screen(threading.Thread):
    """Redraws two panels until it is told to stop; what is said meanwhile stands above them."""

    def __init__(self, members: Sequence[Member], console: Console) -> None:
        super().__init__(name="plait-screen", daemon=True)
        self._members, self._console = members, console
        self._said: deque[str] = deque()
        self._stopping = threading.Event()

    def say(self, line: str) -> None:
        """A line of the launcher's own; it does not wait for the terminal."""
        self._said.append(line)

    def stop(self, seconds: float | None = None) -> None:
        """Draw for the last time and end."""
        self._stopping.set()
        self.join(_LAST_SECONDS if seconds is None else seconds)

    def run(self) -> None:
        live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        try:
            with live:
                while not self._stopping.wait(_REFRESH_SECONDS):
                    self._draw(live)
                said = list(self._said)
                self._said.clear()
                self._draw(live)
            self._print(said)
        except (OSError, ValueError):  # nobody looks any more: the parties go on, and so do their logs
            return

    def _draw(self, live: Live) -> None:
        while self._said:
            self._print([self._said.popleft()])
        height = min(_TALLEST, self._console.height - 2)
        facts = [facts_of(member, height) for member in self._members]
        live.update(draw(facts, self._console, height), refresh=True)

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def view(members: Sequence[Member], out: TextIO) -> Lines | Screen:
    """Panels for a terminal that is wide enough, lines for all else; `start`, `say` and `stop` are the same."""
    console = Console(file=out)
    if console.is_terminal and not console.is_dumb_terminal and console.width >= _NARROWEST:
        return Screen(members, console)
    several = any(len(member.children) > 1 for member in members)
    children = [child for member in members for child in member.children]
    return Lines({f"{child.kind} {child.index}" if several else child.kind: child.log for child in children}, out)


def facts_of(member: Member, height: int) -> Facts:
    """What a party's processes and logs tell now; about `height` lines of the logs."""
    logs = [last_lines(child.log, 0, _READ_LINES) for child in member.children]
    share = max(1, height // len(logs))
    lines = [
        f"{child.index} | {line}" if len(logs) > 1 else line
        for child, log in zip(member.children, logs, strict=True)
        for line in log[-share:]
    ]
    return Facts(
        name=member.name,
        state=_state(member),
        pids=[child.pid for child in member.children if isinstance(child, LocalChild) and child.code is None],
        restarts=member.restarts,
        since=member.since,
        step=None if (step := _last(_STEP, logs)) is None else int(step),
        wire=_last(_WIRE, logs),
        lines=lines,
    )


def draw(facts: Sequence[Facts], console: Console, height: int) -> RenderableType:
    """A panel for each party, side by side, `height` lines high."""
    width = console.width // len(facts)
    grid = Table.grid()
    grid.add_row(*(_panel(one, console, width, height) for one in facts))
    return grid


def _panel(facts: Facts, console: Console, width: int, height: int) -> Panel:
    colour = _COLOURS.get(facts.state, "red")
    head = _fold([_headline(facts)], console, width - _BORDER)
    left = height - 2 - len(head)
    lines = _fold([Text.from_ansi(_as_shown(line)) for line in facts.lines], console, width - _BORDER)[-left:]
    blank = [Text("")] * (left - len(lines))
    title = Text(f" {facts.name}: {facts.state} ", style=f"bold {colour}")
    return Panel(Group(*head, *lines, *blank), title=title, border_style=colour, width=width, height=height)


def _headline(facts: Facts) -> Text:
    parts = [f"since {time.strftime('%H:%M:%S', time.localtime(facts.since))}"]
    if facts.pids:
        parts.append(f"pid {', '.join(map(str, facts.pids))}")
    if facts.step is not None:
        parts.append(f"step {facts.step}")
    if facts.restarts:
        parts.append(f"restarts {facts.restarts}")
    if facts.wire is not None:
        parts.append(facts.wire)
    return Text(" · ".join(parts), style="bold")


def _fold(texts: Sequence[Text], console: Console, width: int) -> list[Text]:
    """Lines that fit; a long one becomes several."""
    return [line for text in texts for line in text.wrap(console, width, overflow="fold") or [Text("")]]


def _as_shown(line: str) -> str:
    """A progress bar overwrites itself: what a terminal would show at the end of the line."""
    return line.rstrip("\r").rpartition("\r")[2]


def _state(member: Member) -> str:
    if (failure := member.failed()) is not None:
        return describe(failure.code)
    return "ended well" if member.done() else "running"


def _last(pattern: re.Pattern[str], logs: Sequence[Sequence[str]]) -> str | None:
    """What the pattern finds last; in the first worker's log, which has most to tell, rather than in another's."""
    matches = (pattern.search(line) for log in logs for line in reversed(log))
    return next((found[1].strip() for found in matches if found is not None), None)
