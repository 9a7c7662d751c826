"""`AsyncRawGenerator`: what its processes read, and that they end, whatever ends first."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from plait.data import files, raw
from plait.data.datasets import column_source
from plait.data.folder_sets import ImageClassificationRawDataset
from plait.data.folders import ImageClassificationRawMetadata
from plait.data.pictures import encode_png
from plait.data.raw import AsyncRawGenerator
from plait.errors import ConfigError, DataError

DEADLINE = 30.0


@pytest.fixture
def reader():
    reader = AsyncRawGenerator(2)
    yield reader
    reader.close()


@pytest.fixture
def folder(tmp_path):
    """Ten pictures in two classes."""
    for number in range(10):
        path = tmp_path / "set" / f"class_{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_png(np.full((4, 4, 3), number, np.uint8)))
    return tmp_path / "set"


def pids(reader):
    return [process.pid for process in reader._processes]


def running(pid):
    """A process that has ended and that nobody asked about is none, too."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until_ended(numbers):
    until = time.monotonic() + DEADLINE
    while any(map(running, numbers)):
        assert time.monotonic() < until, f"{numbers} still run"
        time.sleep(0.01)


def test_many_threads_get_the_files_that_they_asked_for(reader, tmp_path):
    contents = {str(tmp_path / str(number)): os.urandom(number * 10_000) for number in range(30)}
    for name, content in contents.items():
        Path(name).write_bytes(content)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reader.read, contents)) == list(contents.values())


def test_an_error_names_the_file_and_the_process_goes_on(reader, tmp_path):
    (tmp_path / "there").write_bytes(b"1")
    before = pids(reader)
    for _ in range(3):
        with pytest.raises(DataError, match=r"missing\.jpg' cannot be read: No such file"):
            reader.read(str(tmp_path / "missing.jpg"))
        assert reader.read(str(tmp_path / "there")) == b"1"
    assert all(running(pid) for pid in before)


def test_a_name_that_is_no_text(reader, tmp_path):
    name = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"caf\xe9.jpg"))
    try:
        Path(name).write_bytes(b"1")
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    assert reader.read(name) == b"1"
    with pytest.raises(DataError, match="cannot be read"):
        reader.read(name + "x")


def test_a_process_that_was_killed_is_an_error_that_says_so(reader, tmp_path):
    (tmp_path / "there").write_bytes(b"1")
    for pid in pids(reader):
        os.kill(pid, signal.SIGKILL)
    for _ in range(3):
        with pytest.raises(DataError, match=r"a reader process ended \(exit code -9\) while it read '.*there'"):
            reader.read(str(tmp_path / "there"))


def test_an_answer_that_was_cut_off_here_ends_its_process(reader, tmp_path, monkeypatch):
    (tmp_path / "there").write_bytes(b"1")

    def no_memory(stream):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("plait.data.raw._receive", no_memory)
        for _ in range(2):
            with pytest.raises(MemoryError):
                reader.read(str(tmp_path / "there"))
    with pytest.raises(DataError, match="a reader process ended"):
        reader.read(str(tmp_path / "there"))  # and not what was left in the pipe


def test_a_process_that_does_not_start_is_an_error_without_secrets(monkeypatch):
    files.set_auth(ak="the key", sk="the secret")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DataError, match=r"a reader process ended \(exit code 1\) while it started") as caught:
        AsyncRawGenerator(2)
    files.set_auth()
    assert "key" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_closing_ends_the_processes_and_twice_is_no_matter():
    reader = AsyncRawGenerator(3)
    ours = pids(reader)
    assert len(ours) == 3
    assert all(map(running, ours))
    reader.close()
    reader.close()
    assert not any(map(running, ours))


def test_they_go_with_the_data_set(folder):
    dataset = ImageClassificationRawDataset(
        ImageClassificationRawMetadata(folder), num_readers=2, reader_class=AsyncRawGenerator, shuffle=False
    )
    ours = sorted(set(_children()))
    assert len(ours) == 2
    source = column_source(dataset.get(["image", "label"]))
    found = [(int(image.max()), int(label)) for image, label in source.batches(0, 0)]
    assert found == [(number, number % 2) for number in [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]]
    del dataset, source
    gc.collect()
    assert not any(map(running, ours))


def _children():
    for file in Path("/proc/self/task").glob("*/children"):
        yield from (int(pid) for pid in file.read_text().split() if "plait.data.raw" in _command(pid))


def _command(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_a_reader_that_dies_while_a_data_set_is_read_is_an_error(folder):
    dataset = ImageClassificationRawDataset(
        ImageClassificationRawMetadata(folder), num_readers=1, reader_class=AsyncRawGenerator, shuffle=False, capacity=1
    )
    batches = column_source(dataset.get(["image"])).batches(0, 0)
    next(batches)
    for pid in _children():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"a reader process ended \(exit code -9\) while it read '.*\.png'"):
        list(batches)


def test_a_mistake_in_another_argument_leaves_no_process(folder):
    metadata = ImageClassificationRawMetadata(folder)
    with pytest.raises(ConfigError, match="num_epochs=0"):
        ImageClassificationRawDataset(metadata, num_readers=2, num_epochs=0, reader_class=AsyncRawGenerator)
    gc.collect()
    assert not list(_children())


PARENT = """
import sys, types
for name in ("plait", "plait.data"):  # without torch, it starts in a tenth of the time
    sys.modules[name] = types.ModuleType(name)
sys.modules["plait"].__path__, sys.modules["plait.data"].__path__ = [sys.argv[1]], [sys.argv[1] + "/data"]
from plait.data.raw import AsyncRawGenerator
print("once", flush=True)
reader = AsyncRawGenerator(2)  # not behind `if __name__ == "__main__"`
print(*[process.pid for process in reader._processes], flush=True)
print(len(reader.read(sys.argv[0])), flush=True)
if sys.argv[2] == "wait":
    input()
"""


def started(script, what):
    command = [sys.executable, str(script), str(Path(raw.__file__).parents[1]), what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("end", ["killed", "ends by itself"])
def test_they_go_when_the_parent_goes(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    with started(script, "wait" if end == "killed" else "end") as parent:
        try:
            assert parent.stdout.readline() == "once\n"
            ours = [int(pid) for pid in parent.stdout.readline().split()]
            assert int(parent.stdout.readline()) == len(PARENT)
            if end == "killed":
                assert all(map(running, ours))
                parent.kill()
            wait_until_ended(ours)
            assert parent.stdout.read() == ""  # the script was run by nobody else
        finally:
            parent.kill()
    assert parent.returncode == (-signal.SIGKILL if end == "killed" else 0)
