from __future__ import annotations

from plait.variables.inspect import plain_table


def test_a_table_is_plain_and_whole():
    long = "n" * 300
    text = plain_table(["a", "b"], [[long, "\x1b[31m:smile:[b]"], ["x", "y"]])
    assert long in text
    assert "\\x1b[31m:smile:[b]" in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
