"""The logs of all processes on one terminal: whole lines, each with the name of its process."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

__all__ = ["Echo", "last_lines"]

_LOOK_SECONDS = 0.05
_CHUNK = 1 << 18
_LONGEST = 1 << 20  # a longer line is shown in pieces; the log has it whole
_LAST_BYTES = 1 << 16
_LAST_SECONDS = 1.0  # for the launcher's own last words
_COLOURS = (36, 33, 35, 32, 34, 31)


class Echo(threading.Thread):
    """Follows the logs. The processes write files and never wait for the terminal, however slow it is."""

    def __init__(self, logs: Mapping[str, Path], out: TextIO) -> None:
        super().__init__(name="plait-echo", daemon=True)
        colours = out.isatty()
        self._followers = [
            _Follower(log, f"\033[{_COLOURS[number % len(_COLOURS)]}m[{name}]\033[0m " if colours else f"[{name}] ")
            for number, (name, log) in enumerate(logs.items())
        ]
        self._out = out
        self._said: deque[str] = deque()
        self._stopping = threading.Event()
        self._enough = threading.Event()

    def say(self, line: str) -> None:
        """A line of the launcher's own, after all that was written before it; before the start: first of all."""
        self._said.append(line)

    def stop(self, seconds: float | None = None) -> None:
        """Show the rest and end; what is not shown after so many seconds is left to the logs."""
        self._stopping.set()
        self.join(seconds)
        self._enough.set()
        self.join(_LAST_SECONDS)

    def run(self) -> None:
        try:
            self._say_all(len(self._said))
            while not self._stopping.wait(_LOOK_SECONDS):
                self._pass_on()
            self._pass_on(last=True)
        except (OSError, ValueError):  # nobody reads any more (`| head`): the processes go on, and so do the logs
            return
        finally:
            for follower in self._followers:
                follower.close()

    def _pass_on(self, *, last: bool = False) -> None:
        said = len(self._said)
        busy = True
        while busy and not self._enough.is_set():
            texts = [follower.read() for follower in self._followers]
            self._write("".join(text for text in texts if text))
            busy = any(text is not None for text in texts)
        if last:
            self._write("".join(follower.rest() for follower in self._followers))
        self._say_all(said)

    def _say_all(self, count: int) -> None:
        self._write("".join(f"{self._said.popleft()}\n" for _ in range(count)))

    def _write(self, text: str) -> None:
        if text:
            encoding = self._out.encoding or "utf-8"
            self._out.write(text.encode(encoding, "replace").decode(encoding))
            self._out.flush()


class _Follower:
    def __init__(self, log: Path, prefix: str) -> None:
        self._file = log.open("rb", buffering=0)
        self._file.seek(0, os.SEEK_END)
        self._prefix = prefix
        self._held = b""

    def read(self) -> str | None:
        """The next whole lines; None when nothing is new."""
        data = self._file.read(_CHUNK)
        if not data:
            return None
        whole, newline, self._held = (self._held + data).rpartition(b"\n")
        if newline:
            return self._lines(whole)
        return self.rest() if len(self._held) >= _LONGEST else ""

    def rest(self) -> str:
        """A line that has no end yet."""
        held, self._held = self._held, b""
        return self._lines(held) if held else ""

    def close(self) -> None:
        self._file.close()

    def _lines(self, data: bytes) -> str:
        text = data.decode("utf-8", "replace")
        if "\r" in text:  # a progress bar overwrites itself: what a terminal would show at the end of the line
            text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
        return self._prefix + text.replace("\n", f"\n{self._prefix}") + "\n"


def last_lines(log: Path, began: int, count: int) -> list[str]:
    """The last lines of a log, of those behind its byte `began`."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(began, size - _LAST_BYTES))
        text = file.read(_LAST_BYTES).decode("utf-8", "replace")
    return text.removesuffix("\n").split("\n")[-count:] if text else []
