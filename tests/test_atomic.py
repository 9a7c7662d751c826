from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from plait.atomic import atomic_path, file_digest, sync_file, write_atomic


def test_a_file_is_written_whole(tmp_path: Path):
    target = tmp_path / "deep" / "file"
    write_atomic(target, "é")
    assert target.read_bytes() == "é".encode()
    write_atomic(str(target), b"new")
    assert target.read_bytes() == b"new"
    assert os.listdir(target.parent) == ["file"]


def write_half(target: Path, error: type[BaseException]) -> None:
    with atomic_path(target) as temporary:
        temporary.write_text("half")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException]):
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(error):
        write_half(target, error)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_target_that_is_a_directory_fails_cleanly(tmp_path: Path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomic(tmp_path / "file", "x")
    assert os.listdir(tmp_path) == ["file"]


def test_a_long_name_leaves_room_for_the_temporary(tmp_path: Path):
    write_atomic(tmp_path / ("n" * 255), "x")
    assert (tmp_path / ("n" * 255)).read_text() == "x"


def test_files_follow_the_umask(tmp_path: Path):
    (tmp_path / "plain").touch()
    write_atomic(tmp_path / "file", "x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_only_a_directory_may_refuse_to_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(handle: int) -> None:
        raise OSError(errno.EINVAL, "cannot sync")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    sync_file(tmp_path)
    with pytest.raises(OSError, match="cannot sync"):
        sync_file(tmp_path / "file")


def test_a_file_is_known_by_its_digest(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"abc")
    assert file_digest(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
