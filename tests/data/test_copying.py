"""Copies on this machine; those to, from and on s3:// are in test_files_s3_integration.py."""

import errno
import hashlib
import io
import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data import copying, files, stores
from plait.data.copying import copy, copy_parallel, rename
from plait.errors import ConfigError, DataError


@pytest.fixture
def tree(tmp_path):
    top = tmp_path / "tree"
    for name in ["a", "b/c", "b/d/e", ".hidden"]:
        files.write(top / name, name * 10)
    files.make_dirs(top / "empty")
    return top


def names(top):
    return files.list_directory(top, recursive=True)


def inodes(top):
    return {path: path.stat().st_ino for path in Path(top).rglob("*") if path.is_file()}


def test_what_is_there_is_not_copied_again(tree, tmp_path, caplog):
    target = tmp_path / "target"
    copy_parallel(tree, target)
    before = inodes(target)
    (target / "b/c").write_text("b/c" * 9 + "b/?")  # as long as it was
    (target / "a").unlink()
    with caplog.at_level(logging.INFO, "plait"):
        copy_parallel(tree, target)
    assert "2 files copied, 2 were there" in caplog.text
    after = inodes(target)
    kept = {target / ".hidden", target / "b/d/e"}
    assert {path: before[path] for path in kept} == {path: after[path] for path in kept}
    assert all((target / name).read_text() == name * 10 for name in ["a", "b/c", "b/d/e", ".hidden"])
    assert names(tree) == names(target)


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_the_threads_are_as_many_as_asked_for(tree, tmp_path, monkeypatch, threads):
    used = set()
    real = shutil.copyfile

    def noting(*arguments):
        used.add(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(shutil, "copyfile", noting)
    copy_parallel(tree, tmp_path / "target", threads=threads)
    assert names(tmp_path / "target") == names(tree)
    assert len(used) <= max(threads, 1)
    assert (threading.current_thread().name in used) == (threads == 0)


def test_fewer_threads_than_none_is_an_error(tree, tmp_path):
    with pytest.raises(ConfigError, match="threads=-1"):
        copy_parallel(tree, tmp_path / "target", threads=-1)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_copy_that_is_not_the_same_is_an_error(tree, tmp_path, monkeypatch, threads):
    monkeypatch.setattr(shutil, "copyfile", lambda source, target: Path(target).write_text("wrong"))
    with pytest.raises(DataError, match=r"tree/.*target/.*copy it again"):
        copy_parallel(tree, tmp_path / "target", threads=threads)
    assert inodes(tmp_path / "target") == {}, "neither the file nor what was to become it"
    assert len(inodes(tree)) == 4


def test_the_same_length_does_not_make_it_right(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "copyfile", lambda source, target: Path(target).write_text("?" * 10))
    with pytest.raises(DataError, match="not the same"):
        copy(tree / "a", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_first_failure_ends_it(tmp_path, monkeypatch):
    for number in range(50):
        files.write(tmp_path / "many" / f"{number}", "")
    tried = []

    def fail(source, target):
        tried.append(source)
        time.sleep(0.02 * (len(tried) - 1))  # the others take long enough to be called off
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(OSError, match="full"):
        copy_parallel(tmp_path / "many", tmp_path / "target", threads=1)
    assert len(tried) < 50


def test_a_copy_onto_itself_changes_nothing(tree):
    before = inodes(tree)
    copy(tree / "a", tree / "a")
    copy_parallel(tree, tree)
    rename(tree / "a", tree / "." / "a")
    rename(tree / "b", f"{tree}/b/")
    assert inodes(tree) == before


def test_a_copy_into_itself_ends(tree):
    copy_parallel(tree, tree / "b" / "copy")
    assert names(tree / "b" / "copy") == [".hidden", "a", "b", "b/c", "b/d", "b/d/e", "empty"]


@pytest.mark.parametrize("name", ["../x", "/etc", "a/../../x", "", "b//c", "./a"])
def test_a_name_that_leads_elsewhere_is_an_error(tree, tmp_path, name):
    with pytest.raises(DataError, match="cannot be copied"):
        copy_parallel(tree, tmp_path / "target", file_list=[name])


def test_an_empty_list_copies_nothing(tree, tmp_path):
    copy_parallel(tree, tmp_path / "target", file_list=[])
    assert names(tmp_path / "target") == []


OLD, NEW = f".{'0' * 32}.tmp", f".{'1' * 32}.tmp"


def test_what_killed_copies_left_is_removed(tree, tmp_path):
    target = tmp_path / "target"
    for name in [OLD, NEW, f"b/{OLD}", ".mine.tmp"]:
        files.write(target / name, "half")
        if OLD in name or "mine" in name:
            os.utime(target / name, (0, 0))
    copy_parallel(tree, target)
    assert names(target) == [NEW, ".hidden", ".mine.tmp", "a", "b", "b/c", "b/d", "b/d/e", "empty"]


def test_what_is_only_being_written_is_not_copied(tree, tmp_path):
    files.write(tree / "b" / NEW, "half")
    copy_parallel(tree, tmp_path / "target")
    assert names(tmp_path / "target") == [".hidden", "a", "b", "b/c", "b/d", "b/d/e", "empty"]


def test_rename_over_a_file(tree):
    rename(tree / "a", tree / "b/c")
    assert (tree / "b/c").read_text() == "a" * 10
    rename(tree / "b/c", tree / "new" / "deep" / "x")
    assert (tree / "new/deep/x").read_text() == "a" * 10


@pytest.fixture
def two_disks(monkeypatch):
    def refuse(self, target):
        if not self.name.endswith(".tmp"):
            raise OSError(errno.EXDEV, "another disk")
        return os.replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)


def test_rename_to_another_disk(tree, tmp_path, two_disks):
    before = names(tree)
    rename(tree, tmp_path / "moved")
    rename(tmp_path / "moved" / "a", tmp_path / "a")
    assert names(tmp_path / "moved") == [name for name in before if name != "a"]
    assert (tmp_path / "a").read_text() == "a" * 10
    assert not tree.exists()


def test_rename_of_what_changes_removes_nothing(tree, tmp_path, two_disks, monkeypatch):
    real = copying._copy_files

    def meanwhile(*arguments):
        copied = real(*arguments)
        files.write(tree / "late", "new")
        return copied

    monkeypatch.setattr(copying, "_copy_files", meanwhile)
    with pytest.raises(DataError, match="nothing was removed"):
        rename(tree, tmp_path / "moved")
    assert (tree / "late").read_text() == "new"
    assert (tree / "a").exists()


def test_a_copy_that_fails_leaves_what_was_to_be_moved(tree, tmp_path, two_disks, monkeypatch):
    monkeypatch.setattr(shutil, "copyfile", lambda source, target: Path(target).write_text("wrong"))
    with pytest.raises(DataError):
        rename(tree / "a", tmp_path / "a")
    assert (tree / "a").read_text() == "a" * 10


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_in_a_terminal(tree, tmp_path, monkeypatch, stream, shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream())
    copy_parallel(tree, tmp_path / "target")
    assert ("copying" in sys.stderr.getvalue()) == shown
    assert names(tmp_path / "target") == names(tree)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 300), part=st.integers(1, 100))
def test_the_checksum_of_parts_is_that_of_the_protocol(size, part, tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "f"
    data = bytes(number % 251 for number in range(size))
    path.write_bytes(data)
    sums = [hashlib.md5(data[start : start + part]).digest() for start in range(0, size, part)]
    whole = hashlib.md5(b"".join(sums)).hexdigest()
    assert copying._tag(stores.place_of(path), part) == f"{whole}-{len(sums)}"
    assert copying._tag(stores.place_of(path), None) == hashlib.md5(data).hexdigest()
