from __future__ import annotations

import io
import time

import pytest

from plait.launch.output import Echo, last_lines


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "worker-0.log"
    path.touch()
    return path


def shown(log, data, out=None, **names):
    """What the terminal gets of `data`."""
    out = io.StringIO() if out is None else out
    echo = Echo({"worker 0": log}, out)
    echo.start()
    with log.open("ab") as file:
        file.write(data)
    echo.stop()
    return out.getvalue()


def test_every_line_has_the_name_of_its_process(log):
    assert shown(log, b"one\n\nthree\n") == "[worker 0] one\n[worker 0] \n[worker 0] three\n"


def test_a_last_line_without_an_end_is_shown_with_one(log):
    assert shown(log, b"one\ntwo") == "[worker 0] one\n[worker 0] two\n"


def test_what_was_in_the_log_before_is_not_shown(log):
    log.write_bytes(b"of another time\n")
    assert shown(log, b"new\n") == "[worker 0] new\n"


def test_a_line_that_comes_in_pieces_is_one_line(log):
    out = io.StringIO()
    echo = Echo({"worker 0": log}, out)
    echo.start()
    with log.open("ab", buffering=0) as file:
        for piece in (b"on", b"e a", b"nd tw\xc3", b"\xbc\nthree\n"):
            file.write(piece)
            time.sleep(0.07)
    echo.stop()
    assert out.getvalue() == "[worker 0] one and twü\n[worker 0] three\n"


def test_bytes_that_are_no_text_survive(log):
    found = shown(log, b"\x00\xff\xfe binary \x80\ntext\n")
    assert found == "[worker 0] \x00\ufffd\ufffd binary \ufffd\n[worker 0] text\n"


def test_a_terminal_that_knows_few_letters_gets_what_it_can_show(log):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    out.getvalue = lambda: out.buffer.getvalue().decode("ascii")
    assert shown(log, "grün\n".encode(), out) == "[worker 0] gr?n\n"


def test_a_very_long_line_is_shown_in_pieces_and_nothing_of_it_is_lost(log):
    found = shown(log, b"x" * 5_000_000 + b"\nend\n")
    assert found.count("x") == 5_000_000
    assert found.endswith("x\n[worker 0] end\n")


def test_a_progress_bar_is_shown_as_it_stood_at_the_end(log):
    assert shown(log, b"\r 1%\r50%\r100%\nnext\r\n") == "[worker 0] 100%\n[worker 0] next\n"


def test_the_launchers_lines_come_after_what_was_written_before_them(tmp_path):
    logs = {f"worker {index}": tmp_path / f"{index}.log" for index in range(3)}
    for log in logs.values():
        log.touch()
    out = io.StringIO()
    echo = Echo(logs, out)
    for log in logs.values():
        log.write_bytes(b"written\n" * 100_000 + b"unfinished")
    echo.say("at first")
    echo.start()
    echo.say("at last")
    echo.stop()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3 * 100_001 + 2
    assert (lines[0], lines[-1]) == ("at first", "at last")


def test_prefixes_have_colours_on_a_terminal_only(log):
    out = io.StringIO()
    out.isatty = lambda: True
    assert shown(log, b"one\n", out) == "\033[36m[worker 0]\033[0m one\n"


class Slow(io.StringIO):
    """A terminal that somebody has stopped."""

    def write(self, text):
        time.sleep(0.05)
        return super().write(text)


@pytest.mark.alone
def test_the_rest_is_left_to_the_log_when_there_is_no_time(log):
    out = Slow()
    echo = Echo({"worker 0": log}, out)
    log.write_bytes(b"line\n" * 2_000_000)
    echo.start()
    echo.say("last words")
    begin = time.monotonic()
    echo.stop(0.1)
    assert time.monotonic() - begin < 1.5
    assert not echo.is_alive()
    assert out.getvalue().count("line") < 2_000_000
    assert out.getvalue().endswith("last words\n")


def test_a_reader_who_has_gone_away_stops_nothing(log):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    echo = Echo({"worker 0": log}, Gone())
    echo.start()
    log.write_bytes(b"line\n")
    echo.stop()
    assert not echo.is_alive()


@pytest.mark.parametrize(
    ("data", "began", "found"),
    [
        (b"", 0, []),
        (b"one\n", 0, ["one"]),
        (b"one\ntwo\nthree", 0, ["two", "three"]),
        (b"one\ntwo\nthree\n", 8, ["three"]),
        (b"one\n\n", 0, ["one", ""]),
        (b"x" * 1_000_000 + b"\nlast\n", 0, ["x" * (65536 - 6), "last"]),
    ],
)
def test_the_last_lines_of_a_log(log, data, began, found):
    log.write_bytes(data)
    assert last_lines(log, began, 2) == found
