"""Progress: lines of the log, not too many; a moving line in a terminal."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from plait.psi.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_are_few(caplog):
    caplog.set_level(logging.INFO, "plait")
    with Progress() as progress:
        for done in range(1001):
            progress("multiplying", done, 1000)
        progress("own keys", 12345, None)
    assert [record.message for record in caplog.records] == [
        "multiplying: 0 of 1,000",
        "multiplying: 1,000 of 1,000",
        "own keys: 12,345",
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_terminal_gets_lines_that_move(monkeypatch, caplog):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    caplog.set_level(logging.INFO, "plait")
    with Progress() as progress:
        progress("multiplying", 5, 10)
        progress("multiplying", 10, 10)
    assert "multiplying" in terminal.getvalue()
    assert "10/10" in terminal.getvalue()
    assert not caplog.records
