"""A version directory is there whole or not at all, and never replaced."""

from __future__ import annotations

import os
import threading
import time

import pytest

from plait.errors import CheckpointError, ConfigError
from plait.export.publish import check_version, is_number, publish, replace_files


def write(text="x"):
    def fill(folder):
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text(text)

    return fill


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_numbers_go_up_from_one(tmp_path):
    above = tmp_path / "not" / "there"
    assert [publish(above, -1, write()).name for _ in range(3)] == ["1", "2", "3"]
    publish(above, 10, write())
    publish(above, "best", write())
    assert publish(above, -1, write("y")) == above / "11"
    assert (above / "11" / "inner" / "a").read_text() == "y"
    assert names(above) == ["1", "10", "11", "2", "3", "best"]


@pytest.mark.parametrize("version", [-2, True, "", "../up", ".hidden", "a/b", "a b", None, 1.5, "x" * 101])
def test_versions_that_cannot_be(tmp_path, version):
    with pytest.raises(ConfigError, match="write -1 for the next number"):
        check_version(tmp_path, version)


@pytest.mark.parametrize("version", ["007", 10**18, "20261116013826123456"])
def test_what_looks_like_a_number_is_one(tmp_path, version):
    with pytest.raises(ConfigError, match="at most 18 digits"):
        check_version(tmp_path, version)


def test_after_the_last_number(tmp_path):
    publish(tmp_path, 10**18 - 1, write())
    with pytest.raises(ConfigError, match="at most 18 digits"):
        publish(tmp_path, -1, write())
    assert names(tmp_path) == ["9" * 18]


def test_a_link_that_leads_nowhere_is_there_already(tmp_path):
    (tmp_path / "1").symlink_to("gone")
    with pytest.raises(ConfigError, match="already"):
        publish(tmp_path, 1, write())
    assert publish(tmp_path, -1, write()).name == "2"


@pytest.mark.parametrize("version", [1, "1", "best"])
def test_one_that_is_there_is_an_error_before_any_work(tmp_path, version):
    publish(tmp_path, version, write())
    with pytest.raises(ConfigError, match="already"):
        publish(tmp_path, version, lambda folder: pytest.fail("work was done"))


def test_a_failure_leaves_nothing(tmp_path):
    def fill(folder):
        write()(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path, -1, fill)
    assert names(tmp_path) == []
    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path / "not" / "there", -1, fill)
    assert names(tmp_path) == []


def test_a_version_that_somebody_else_publishes_meanwhile(tmp_path):
    def fill(folder):
        write("late")(folder)
        publish(tmp_path, "a", write("early"))

    with pytest.raises(ConfigError, match="meanwhile"):
        publish(tmp_path, "a", fill)
    assert (tmp_path / "a" / "inner" / "a").read_text() == "early"
    assert names(tmp_path) == ["a"]


def test_many_at_once_get_a_number_each(tmp_path):
    threads = [threading.Thread(target=publish, args=(tmp_path, -1, write())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, names(tmp_path))) == list(range(1, 9))


def test_what_killed_ones_left_is_removed_after_an_hour(tmp_path):
    old, fresh, working, other = (
        tmp_path / f".{name}.{'0' * 31}{digit}.partial" for digit, name in enumerate(["1", "2", "next", "x"])
    )
    other = tmp_path / ".mine.partial"
    for folder in (old, fresh, working, other):
        folder.mkdir()
        (folder / "model.pt2").touch()
    past = time.time() - 4000
    for path in (old, old / "model.pt2", working, other, other / "model.pt2"):
        os.utime(path, (past, past))
    publish(tmp_path, -1, write())
    assert names(tmp_path) == sorted([fresh.name, working.name, other.name, "1"])


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        publish(tmp_path / "file", -1, write())


def test_files_are_replaced_and_the_last_one_last(tmp_path):
    (tmp_path / "kept").write_text("k")
    (tmp_path / "a").write_text("old")

    def fill(folder):
        assert (tmp_path / "a").read_text() == "old"
        for name in ("z", "a", "about"):
            (folder / name).write_text("new")

    replace_files(tmp_path, fill, last="about")
    assert names(tmp_path) == ["a", "about", "kept", "z"]
    assert (tmp_path / "a").read_text() == "new"


def test_what_is_a_number():
    assert [is_number(text) for text in ("0", "1", "12", "01", "-1", "1a", "", "\u0661")] == [True] * 3 + [False] * 5
