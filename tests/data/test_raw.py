"""Whole files and their copies in a cache; the processes that read are in `test_raw_integration.py`."""

from __future__ import annotations

import gc
import io
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.data import raw, stores
from plait.data.raw import MAX_FILE_BYTES, AsyncRawGenerator, Cache, ParallelReader, read_file, temporary_cache
from plait.errors import ConfigError, DataError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "picture.jpg"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def left_in(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def answered(stream):
    found = []
    while stream.tell() < len(stream.getvalue()):
        found.append(raw._receive(stream))
    return found


class TestReadFile:
    def test_all_bytes(self, file):
        assert read_file(str(file)) == file.read_bytes()
        assert read_file(f"file://{file}") == file.read_bytes()
        assert ParallelReader(3).read(str(file)) == file.read_bytes()

    def test_an_empty_file(self, tmp_path):
        (tmp_path / "empty").touch()
        assert read_file(str(tmp_path / "empty")) == b""

    def test_a_system_that_gives_little_at_a_time(self, file, monkeypatch):
        whole, plain = file.read_bytes(), os.read
        monkeypatch.setattr(os, "read", lambda descriptor, size: plain(descriptor, min(size, 1000)))
        assert read_file(str(file)) == whole

    def test_a_file_that_becomes_shorter(self, file, monkeypatch):
        plain = os.read
        monkeypatch.setattr(os, "read", lambda descriptor, size: plain(descriptor, 10) if size > 9000 else b"")
        assert len(read_file(str(file))) < 10240

    @pytest.mark.parametrize("name", ["missing.jpg", ".", "pipe.jpg"])
    def test_what_cannot_be_read_is_named(self, tmp_path, name):
        os.mkfifo(tmp_path / "pipe.jpg")  # which would wait for a writer
        with pytest.raises(DataError, match=r"cannot be read: .*(; was it moved or removed\?|not a file)") as caught:
            read_file(str(tmp_path / name))
        assert str(tmp_path / name) in str(caught.value)

    def test_a_file_that_is_too_large_is_not_read(self, tmp_path, monkeypatch):
        path = tmp_path / "large"
        with path.open("wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)  # takes no place on the disk
        monkeypatch.setattr(os, "read", lambda *_: pytest.fail("it was read"))
        with pytest.raises(DataError, match=f"large' has {MAX_FILE_BYTES + 1} bytes, more than"):
            read_file(str(path))

    def test_no_descriptor_stays_open(self, file):
        before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
        for _ in range(3):
            read_file(str(file))
        assert len(os.listdir("/proc/self/fd") if before else []) == len(before)


class TestCache:
    def test_a_file_is_read_once(self, tmp_path, file):
        cache, asked = Cache(str(tmp_path / "new" / "cache"), remove=False), []

        def read(url):
            asked.append(url)
            return read_file(url)

        assert [cache.get(str(file), read) for _ in range(3)] == [file.read_bytes()] * 3
        assert asked == [str(file)]
        assert left_in(cache.directory) == [cache.path_of(str(file)).name]

    def test_a_copy_is_used_by_the_next_one(self, tmp_path, file):
        whole = file.read_bytes()
        Cache(str(tmp_path / "cache"), remove=False).get(str(file), read_file)
        file.unlink()
        again = Cache(str(tmp_path / "cache"), remove=False)
        assert again.get(str(file), read_file) == whole
        assert Path(again.local(str(file))).read_bytes() == whole

    def test_a_copy_in_pieces(self, tmp_path, file):
        cache = Cache(str(tmp_path / "cache"), remove=False)
        assert Path(cache.local(str(file))).read_bytes() == file.read_bytes()
        whole = file.read_bytes()
        file.unlink()
        assert Path(cache.local(str(file))).read_bytes() == whole

    def test_a_file_that_cannot_be_read_leaves_nothing(self, tmp_path):
        cache = Cache(str(tmp_path / "cache"), remove=False)
        with pytest.raises(DataError, match=r"missing\.jpg"):
            cache.get(str(tmp_path / "missing.jpg"), read_file)
        with pytest.raises(DataError, match=r"missing\.jpg' cannot be copied to .*No such file"):
            cache.local(str(tmp_path / "missing.jpg"))
        assert left_in(cache.directory) == []

    def test_a_full_disk_leaves_nothing(self, tmp_path, file, monkeypatch):
        cache, plain = Cache(str(tmp_path / "cache"), remove=False), Path.write_bytes

        def half(path, data):
            plain(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", half)
            with pytest.raises(OSError, match="No space left"):
                cache.get(str(file), read_file)
            patch.setattr(raw.shutil, "copyfileobj", lambda source, target, size: half(Path(target.name), b"12"))
            with pytest.raises(DataError, match="cannot be copied.*No space left"):
                cache.local(str(file))
        assert left_in(cache.directory) == []
        assert cache.get(str(file), read_file) == file.read_bytes()

    def test_many_threads_want_the_same_file(self, tmp_path, file):
        cache, found = Cache(str(tmp_path / "cache"), remove=True), []
        threads = [threading.Thread(target=lambda: found.append(cache.get(str(file), read_file))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [file.read_bytes()] * 16
        assert len(left_in(cache.directory)) == 1

    def test_a_relative_path_is_another_file_in_another_directory(self, tmp_path, monkeypatch):
        cache = Cache(str(tmp_path / "cache"), remove=False)
        for name in "ab":
            (tmp_path / name).mkdir()
            (tmp_path / name / "x.jpg").write_bytes(name.encode())
            monkeypatch.chdir(tmp_path / name)
            assert cache.get("x.jpg", read_file) == name.encode()
            assert cache.path_of("x.jpg") == cache.path_of(str(tmp_path / name / "x.jpg"))

    def test_names_that_are_no_text(self, tmp_path):
        path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.jpg")
        try:
            Path(os.fsdecode(path)).write_bytes(b"1")
        except OSError:
            pytest.skip("this file system has names in UTF-8 only")
        assert Cache(str(tmp_path / "cache"), remove=False).get(os.fsdecode(path), read_file) == b"1"

    @pytest.mark.parametrize("remove", [True, False])
    def test_what_was_fetched_goes_or_stays(self, tmp_path, file, remove):
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "of somebody else").touch()
        before = Cache(str(tmp_path / "cache"), remove=False)
        (tmp_path / "old.jpg").write_bytes(b"old")
        kept = before.get(str(tmp_path / "old.jpg"), read_file), before.path_of(str(tmp_path / "old.jpg")).name
        cache = Cache(str(tmp_path / "cache"), remove=remove)
        cache.get(str(tmp_path / "old.jpg"), read_file)
        cache.get(str(file), read_file)
        copy = Path(cache.local(str(file)))
        copy.with_name(f".{copy.name}.index").touch()
        del cache
        gc.collect()
        rest = [] if remove else [copy.name, f".{copy.name}.index"]
        assert left_in(tmp_path / "cache") == sorted(["of somebody else", kept[1], *rest])

    def test_the_directory_of_the_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DLS_LOCAL_CACHE_PATH", str(tmp_path / "from" / "environment"))
        assert Cache("ENV", remove=True).directory == tmp_path / "from" / "environment"

    @pytest.mark.parametrize("value", [None, ""])
    def test_no_directory_in_the_environment(self, monkeypatch, value):
        monkeypatch.delenv("DLS_LOCAL_CACHE_PATH", raising=False)
        if value is not None:
            monkeypatch.setenv("DLS_LOCAL_CACHE_PATH", value)
        with pytest.raises(ConfigError, match="DLS_LOCAL_CACHE_PATH, which is not set: set it"):
            Cache("ENV", remove=True)

    def test_a_directory_that_cannot_be_made(self, file):
        with pytest.raises(ConfigError, match=r"cache_dir='.*picture\.jpg' cannot be made"):
            Cache(str(file), remove=True)

    def test_a_temporary_one_goes_with_its_directory(self, file):
        cache = temporary_cache()
        directory, copy = cache.directory, Path(cache.local(str(file)))
        (directory / "an index").touch()
        assert copy.parent == directory
        del cache
        gc.collect()
        assert not directory.exists()


class TestServe:
    """The other end of the pipes, in this process."""

    @pytest.fixture
    def asked(self, monkeypatch):
        monkeypatch.setattr(stores, "_auth", {})

        def asked(*requests):
            stream, answers, said = io.BytesIO(), io.BytesIO(), io.StringIO()
            for request in requests:
                raw._send(stream, request, 0)
            stream.seek(0)
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
                patch.setattr(sys, "stdout", SimpleNamespace(buffer=answers))
                patch.setattr(sys, "stderr", said)
                raw.serve()
                assert sys.stdout is said  # what is printed does not get among the files
            answers.seek(0)
            return answered(answers)

        return asked

    def test_files_until_the_input_ends(self, asked, file):
        auth = json.dumps({"key": "k"}).encode()
        assert asked(auth, str(file).encode(), str(file).encode()) == [(0, b""), *[(0, file.read_bytes())] * 2]
        assert stores._auth == {"key": "k"}

    def test_an_error_is_an_answer(self, asked, file, tmp_path):
        start, wrong, right = asked(b"{}", str(tmp_path / "missing").encode(), str(file).encode())
        assert wrong[0] == 1
        assert "missing' cannot be read" in wrong[1].decode()
        assert right == (0, file.read_bytes())

    def test_an_input_that_ends_at_once(self, asked):
        assert asked() == []


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\x01",
        raw._LENGTH.pack(-1) + b"\0",
        raw._LENGTH.pack(MAX_FILE_BYTES + 1) + b"\0",
        raw._LENGTH.pack(5) + b"\0" + b"four",
    ],
)
def test_an_answer_that_is_cut_off_or_nonsense(head):
    with pytest.raises(EOFError):
        raw._receive(io.BytesIO(head))


def test_a_number_of_processes():
    with pytest.raises(ConfigError, match="num_readers=0: write a whole number"):
        AsyncRawGenerator(0)
