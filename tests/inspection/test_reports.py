from __future__ import annotations

import io
import json
import math
import sys

import pytest

from plait.inspection.reports import Grid, Report, cut, number, printable, progress, show

REPORT = Report(
    {"kind": "test", "numbers": [1.5, math.nan, math.inf], "name": "n\x1b"},
    [
        "the headline \x1b[31m",
        Grid(("name", "bytes"), [["[b]a\x1b[2J", "1,000"], ["n" * 200, "7"]], "t", ["all", "1,007"]),
    ],
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_plain_text(capsys):
    show(REPORT)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "[b]a\\x1b[2J" in text
    assert "n" * 200 in text
    assert "all" in text.splitlines()[-1]


def test_programs_get_json(capsys):
    show(REPORT, as_json=True)
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"kind": "test", "numbers": [1.5, "nan", "inf"], "name": "n\x1b"}


def test_a_terminal_gets_colours_and_no_cursor_is_moved(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(REPORT)
    text = out.getvalue()
    assert "\x1b[1" in text
    assert "\x1b[2J" not in text
    assert "\x1b[31m" not in text
    assert "─" in text
    assert text.count("n") >= 200
    assert "1,007" in text


def test_progress_is_for_those_who_watch(monkeypatch, capsys):
    with progress("reading", 10) as advance:
        advance(5)
    assert capsys.readouterr().err == ""
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress("reading [b]x\x1b", 4 << 20) as advance:
        advance(3 << 20)
    assert "reading [b]x\\x1b" in err.getvalue()


def test_small_things():
    assert printable("a\nb") == "a\\nb"
    assert cut("x" * 100) == '"' + "x" * 56 + "..."
    assert (number(None), number(1 / 3), number(math.nan)) == ("-", "0.3333", "nan")
