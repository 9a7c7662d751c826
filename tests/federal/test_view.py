from __future__ import annotations

import dataclasses
import errno
import io
import re
import signal
import time

import pytest
from rich.console import Console

from plait.federal.supervise import Member
from plait.federal.view import Facts, Lines, Screen, draw, facts_of, view
from plait.launch.processes import LocalChild


@pytest.fixture
def member_of(tmp_path):
    """A party whose workers have written these texts, and ended with these codes."""

    def make(name, *texts, codes=None, restarts=0):
        children = []
        for index, text in enumerate(texts):
            log = tmp_path / f"{name}-{index}.log"
            log.write_text(text)
            child = LocalChild(name, index, [], log, lambda child: None)
            child.pid, child.code = 4000 + index, codes[index] if codes else None
            children.append(child)
        return Member(children, lambda restart: [], restarts, name=name, since=time.time())

    return make


class Terminal(io.StringIO):
    def isatty(self):
        return True


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def shown(*facts, width=100, height=8):
    """The lines of the screen."""
    console = Console(file=io.StringIO(), width=width, height=30, force_terminal=True)
    console.print(draw(facts, console, height))
    return plain(console.file.getvalue()).splitlines()


FACTS = Facts(name="leader", state="running", pids=[12], restarts=0, since=0.0, step=None, wire=None, lines=["one"])


def test_what_a_party_is_doing(member_of):
    text = "INFO step: 4(global step: 41)  loss: 0.5\nINFO step: 5(global step: 42)  loss: 0.4\nsaved\n"
    facts = facts_of(member_of("leader", text, restarts=2), 10)
    assert (facts.name, facts.state, facts.pids, facts.step, facts.restarts) == ("leader", "running", [4000], 42, 2)
    assert facts.wire is None
    assert facts.lines == text.splitlines()


def test_bytes_on_the_wire(member_of):
    text = "on the wire: 1 MB sent\nINFO on the wire: 12.0 MB sent, 3.5 MB received; 2 reconnects\nend\n"
    assert facts_of(member_of("leader", text), 10).wire == "12.0 MB sent, 3.5 MB received"


@pytest.mark.parametrize(
    ("codes", "state"),
    [((None,), "running"), ((0,), "ended well"), ((3,), "exit code 3"), ((-signal.SIGKILL,), "SIGKILL")],
)
def test_the_state_of_a_party(member_of, codes, state):
    facts = facts_of(member_of("leader", "", codes=codes), 10)
    assert facts.state == state
    assert facts.pids == ([4000] if state == "running" else [])
    assert facts.lines == []


def test_workers_share_a_panel(member_of):
    lines = "".join(f"line {number}\n" for number in range(9))
    facts = facts_of(member_of("leader", lines, f"{lines}global step: 7\n"), 4)
    assert facts.lines == ["0 | line 7", "0 | line 8", "1 | line 8", "1 | global step: 7"]
    assert facts.step == 7
    assert facts.pids == [4000, 4001]


def test_two_panels_stand_side_by_side():
    second = Facts(name="follower", state="SIGKILL", pids=[], restarts=1, since=0.0, step=7, wire="1 MB", lines=["two"])
    lines = shown(FACTS, second)
    assert len(lines) == 8
    assert {len(line) for line in lines} == {100}
    assert "leader: running" in lines[0][:50]
    assert "follower: SIGKILL" in lines[0][50:]
    assert "pid 12" in lines[1][:50]
    assert re.search(r"since \d\d:\d\d:\d\d · step 7 · restarts 1 · 1 MB ", lines[1][50:])
    assert lines[2][:50].strip("│ ") == "one"
    assert lines[2][50:].strip("│ ") == "two"


def test_the_last_lines_are_those_that_are_seen():
    lines = shown(dataclasses.replace(FACTS, lines=[f"line {number}" for number in range(50)]))
    assert [line.strip("│ ") for line in lines[2:-1]] == [f"line {number}" for number in range(45, 50)]


def test_a_long_line_is_folded_and_what_is_no_text_does_no_harm():
    odd = ["x" * 60, "\x1b[31mred\x1b[0m [bold]kept[/bold]", " 1%\r99%\r", "", "\x07\x00end"]
    lines = shown(dataclasses.replace(FACTS, lines=odd), FACTS, width=100, height=12)
    assert len(lines) == 12
    left = [line[:50].strip("│ ") for line in lines[2:-1]]
    assert left[:5] == ["x" * 46, "x" * 14, "red [bold]kept[/bold]", "99%", ""]
    assert left[5].endswith("end")


def test_lines_when_there_is_no_terminal(member_of):
    members = [member_of("leader", ""), member_of("follower", "")]
    out = io.StringIO()
    lines = view(members, out)
    assert isinstance(lines, Lines)
    lines.say("first")
    lines.start()
    members[0].children[0].log.write_text("one\n")
    members[1].children[0].log.write_text("two")
    lines.stop()
    assert out.getvalue() == "first\nleader   | one\nfollower | two\n"


def test_workers_have_numbers_on_their_lines(member_of):
    members = [member_of("leader", "", ""), member_of("follower", "", "")]
    out = io.StringIO()
    lines = view(members, out)
    lines.start()
    members[0].children[1].log.write_text("one\n")
    lines.stop()
    assert out.getvalue() == "leader 1   | one\n"


@pytest.mark.parametrize(
    ("term", "columns", "kind"), [("xterm", 80, Screen), ("dumb", 80, Lines), ("xterm", 50, Lines)]
)
def test_panels_are_for_terminals_that_can_show_them(member_of, monkeypatch, term, columns, kind):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", str(columns))
    found = view([member_of("leader", ""), member_of("follower", "")], Terminal())
    assert isinstance(found, kind)
    found.start()
    found.stop()


def test_the_screen_is_drawn_as_the_parties_go_on(member_of, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    members = [member_of("leader", "at first\n"), member_of("follower", "")]
    out = Terminal()
    screen = view(members, out)
    screen.say("logs in a directory")
    screen.start()
    until = time.monotonic() + 5
    while "at first" not in out.getvalue() and time.monotonic() < until:
        time.sleep(0.01)
    with members[1].children[0].log.open("a") as log:
        log.write("at last\n")
    screen.say("[leader] failed")
    screen.stop()
    assert not screen.is_alive()
    text = plain(out.getvalue())
    assert text.index("logs in a directory") < text.index("at first") < text.index("at last")
    assert text.endswith("[leader] failed\n")
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1  # the cursor is back


def test_a_terminal_that_has_gone_away_stops_nothing(member_of, monkeypatch):
    class Gone(Terminal):
        def write(self, text):
            raise OSError(errno.EIO, "gone")

    monkeypatch.setenv("TERM", "xterm")
    screen = view([member_of("leader", ""), member_of("follower", "")], Gone())
    screen.start()
    screen.stop()
    assert not screen.is_alive()
