from __future__ import annotations

import pytest

from plait.federal.difference import MAX_LINES, side_by_side


def lines(own, theirs):
    return side_by_side("leader", own, "follower", theirs).splitlines()


@pytest.mark.parametrize("facts", [{}, {"job": "a", "data": {"batch": 3, "names": ["x", {"b": 1, "a": 2}]}}])
def test_nothing_is_said_of_what_is_equal(facts):
    assert side_by_side("leader", facts, "follower", dict(reversed(facts.items()))) is None


def test_only_what_differs_is_shown_own_column_first():
    head, row = lines({"job": "a", "batch": 3}, {"job": "a", "batch": 4})
    assert head.split() == ["leader", "follower"]
    assert row.split() == ["batch", "3", "4"]


def test_nested_keys_are_joined_with_dots():
    _, row = lines({"data": {"train": {"batch": 3}}}, {"data": {"train": {"batch": 4}}})
    assert row.split() == ["data.train.batch", "3", "4"]


def test_what_one_party_lacks_is_a_dash():
    _, first, second = lines({"a": None}, {"b": {"c": 1}})
    assert first.split() == ["a", "null", "-"]
    assert second.split() == ["b.c", "-", "1"]


@pytest.mark.parametrize(("one", "other"), [(1, "1"), (True, 1), (None, "null"), ({}, []), (1, 1.0)])
def test_types_count(one, other):
    assert len(lines({"a": one}, {"a": other})) == 2


def test_both_parties_show_the_same_lines():
    own, theirs = {"a": 1, "b": {"c": 2, "d": 3}}, {"a": 2, "b": {"c": 2, "d": 4}}
    rows = [line.split() for line in lines(own, theirs)[1:]]
    swapped = [line.split() for line in side_by_side("follower", theirs, "leader", own).splitlines()[1:]]
    assert [[key, two, one] for key, one, two in rows] == swapped


def test_a_long_table_says_how_much_it_leaves_out():
    shown = lines({f"k{i}": 0 for i in range(50)}, {f"k{i}": 1 for i in range(50)})
    assert len(shown) == MAX_LINES
    assert shown[-2].split()[0] == "k17"
    assert shown[-1].strip() == "and 32 more"


def test_a_table_of_just_so_many_lines_leaves_nothing_out():
    shown = lines({f"k{i}": 0 for i in range(19)}, {f"k{i}": 1 for i in range(19)})
    assert len(shown) == MAX_LINES
    assert "more" not in shown[-1]


def test_long_values_are_cut_to_where_they_part():
    _, row = lines({"a": "x" * 500 + "ONE" + "y" * 500}, {"a": "x" * 500 + "TWO" + "y" * 500})
    assert "ONE" in row
    assert "TWO" in row
    assert len(row) < 160


def test_long_keys_are_cut():
    _, row = lines({"k" * 5000: 1}, {})
    assert len(row) < 160


def test_nothing_moves_the_readers_cursor():
    assert "\x1b" not in side_by_side("leader", {"a\x1b[2J": "\x1b[2J"}, "follower", {})
