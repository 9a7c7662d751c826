"""`mox.file` gives the file functions of the data room one name; here each is called once, on a local path."""

from __future__ import annotations

from plait import mox
from plait.data import copying, files, stores


def test_the_names_are_these():
    assert mox.file.__all__ == [
        "File", "append", "copy", "copy_parallel", "exists", "get_size", "glob", "is_directory", "list_directory",
        "make_dirs", "mk_dir", "read", "remove", "rename", "scan_dir", "set_auth", "stat", "walk", "write",
    ]  # fmt: skip


def test_each_is_the_function_of_the_data_room():
    for name in mox.file.__all__:
        assert getattr(mox.file, name) is getattr(copying if name in copying.__all__ else files, name)


def test_writing_and_reading(tmp_path):
    url = f"{tmp_path}/a.txt"
    with mox.file.File(url, "w") as file:
        file.write("one\n")
    mox.file.append(url, "two\n")
    assert mox.file.read(url) == "one\ntwo\n"
    mox.file.write(url, b"\x00\x01")
    assert mox.file.read(url, binary=True) == b"\x00\x01"
    assert (mox.file.stat(url).length, mox.file.get_size(url)) == (2, 2)


def test_directories(tmp_path):
    mox.file.make_dirs(f"{tmp_path}/a/b")
    mox.file.mk_dir(f"{tmp_path}/a/c")
    mox.file.write(f"{tmp_path}/a/b/x.txt", "x")
    assert mox.file.is_directory(f"{tmp_path}/a/c")
    assert mox.file.list_directory(f"{tmp_path}/a", recursive=True) == ["b", "b/x.txt", "c"]
    assert [entry.name for entry in mox.file.scan_dir(f"{tmp_path}/a")] == ["b", "c"]
    assert mox.file.glob(f"{tmp_path}/a/*/*.txt") == [f"{tmp_path}/a/b/x.txt"]
    assert [found for _, _, found in mox.file.walk(f"{tmp_path}/a")] == [[], ["x.txt"], []]


def test_copying_moving_and_removing(tmp_path):
    mox.file.write(f"{tmp_path}/a/x.txt", "x")
    mox.file.copy(f"{tmp_path}/a/x.txt", f"{tmp_path}/a/y.txt")
    mox.file.copy_parallel(f"{tmp_path}/a", f"{tmp_path}/b")
    mox.file.rename(f"{tmp_path}/b/y.txt", f"{tmp_path}/b/z.txt")
    mox.file.remove(f"{tmp_path}/a", recursive=True)
    assert not mox.file.exists(f"{tmp_path}/a")
    assert mox.file.list_directory(f"{tmp_path}/b") == ["x.txt", "z.txt"]


def test_who_asks_s3_can_be_set_and_forgotten():
    mox.file.set_auth(ak="key", sk="secret", server="localhost", port=9000, is_secure=False)
    try:
        assert stores._auth["endpoint_url"] == "http://localhost:9000"
    finally:
        mox.file.set_auth()
    assert stores._auth == {}
