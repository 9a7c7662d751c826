"""Files of this machine; what must be the same on s3:// too is in test_files_s3_integration.py."""

import logging
import os
import stat
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data import files
from plait.data.files import File
from plait.errors import ConfigError

ODD = st.sampled_from(
    [" ", "#", "?", "%", "%41", ".", "..a", "~", "*", "[", "]", "é", "中", "🎈", "\n", "\\", "$HOME", ":"]
)
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="/\0")
NAMES = st.lists(ODD | st.text(LETTERS, max_size=8), min_size=1, max_size=4).map("".join)
NAMES = NAMES.filter(lambda name: name not in {"", ".", ".."} and len(name.encode()) < 200)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@settings(max_examples=150, deadline=None)
@given(
    folder=NAMES,
    name=NAMES,
    text=st.text(st.characters(exclude_categories=["Cs"])),
    scheme=st.sampled_from(["", "file://"]),
)
def test_any_path_and_any_text_come_back(folder, name, text, scheme):
    with tempfile.TemporaryDirectory() as top:
        url = f"{scheme}{top}/{folder}/{name}"
        files.write(url, text)
        with open(os.path.join(top, folder, name), "rb") as file:
            assert file.read() == text.encode()
        assert files.read(url) == text
        assert files.list_directory(f"{scheme}{top}", recursive=True) == [folder, f"{folder}/{name}"]
        assert list(files.walk(f"{scheme}{top}/{folder}")) == [(f"{scheme}{top}/{folder}", [], [name])]
        assert [entry.path for entry in files.scan_dir(f"{scheme}{top}/{folder}")] == [url]
        files.append(url, "more")
        assert files.get_size(url) == len(text.encode()) + 4
        files.remove(url)
        assert not files.exists(url)


@settings(max_examples=50, deadline=None)
@given(name=NAMES)
def test_a_path_may_be_relative(name):
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as top:
        os.chdir(top)
        try:
            files.write(f"./{name}", b"x")
            assert os.listdir(top) == [name]
            hidden = name.startswith(".")
            assert files.glob(".*" if hidden else "*") == [name]
        finally:
            os.chdir(before)


@pytest.mark.parametrize("url", ["http://host/x", "hdfs://x", "S4://b/k"])
def test_an_unknown_scheme_is_an_error(url):
    with pytest.raises(ConfigError, match=r"has the scheme.*s3://"):
        files.read(url)


@pytest.mark.parametrize("url", ["s3://", "s3:///key", "obs:///", "s3://bucket/key?versionId=1"])
def test_an_address_without_an_object_is_an_error(url):
    with pytest.raises(ConfigError, match="bucket/name"):
        files.exists(url)


@pytest.mark.parametrize("mode", ["", "x", "rw", "b", "rbt", "w++", "rr", "U"])
def test_an_unknown_mode_is_an_error(tmp_path, mode):
    with pytest.raises(ConfigError, match="mode"):
        File(tmp_path / "f", mode)
    assert os.listdir(tmp_path) == []


def test_until_it_is_closed_the_old_file_is_there(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    file = File(path, "w")
    file.write("new")
    file.flush()
    assert path.read_text() == "old"
    file.close()
    file.close()
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["f"]
    with pytest.raises(ValueError, match="closed"):
        file.write("more")


def test_a_file_that_cannot_be_closed_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_text("old")
    file = File(path, "w")
    real = file._stream

    class Full:
        closed = True

        def close(self):
            real.close()
            raise OSError("no space left")

    monkeypatch.setattr(file, "_stream", Full())
    with pytest.raises(OSError, match="no space"):
        file.close()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_file_that_is_forgotten_is_closed(tmp_path):
    with pytest.warns(ResourceWarning, match="not closed"):
        File(tmp_path / "f", "w").write("kept")
    assert (tmp_path / "f").read_text() == "kept"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_what_is_no_plain_file_is_written_into():
    files.write(os.devnull, "gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_links_are_followed_but_not_in_circles(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("1")
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "data").symlink_to(tmp_path / "data")
    (tmp_path / "top" / "circle").symlink_to(tmp_path / "top")
    (tmp_path / "top" / "broken").symlink_to(tmp_path / "none")
    assert files.list_directory(tmp_path / "top", recursive=True) == ["broken", "circle", "data", "data/x"]
    files.remove(tmp_path / "top" / "data", recursive=True)
    assert (tmp_path / "data" / "x").exists(), "a link is removed, not what it leads to"


def test_a_moment_is_exact(tmp_path):
    files.write(tmp_path / "f", "x")
    os.utime(tmp_path / "f", ns=(1, 1_700_000_000_123_456_789))
    assert files.stat(tmp_path / "f").mtime_nsec == 1_700_000_000_123_456_789


def test_mk_dir_below_the_current_directory(here):
    files.mk_dir("new")
    files.mk_dir("new/inner")
    assert files.list_directory(".", recursive=True) == ["new", "new/inner"]
    files.write("new/f", "")
    with pytest.raises(NotADirectoryError):
        files.mk_dir("new/f/x")


@pytest.mark.parametrize(("url", "words"), [("d", "recursive=True"), ("f/", "without the slash")])
def test_what_is_left_alone_is_told(here, caplog, url, words):
    files.make_dirs("d")
    files.write("f", "")
    with caplog.at_level(logging.WARNING, "plait"):
        files.remove(url)
    assert words in caplog.text
    assert files.list_directory(".") == ["d", "f"]
