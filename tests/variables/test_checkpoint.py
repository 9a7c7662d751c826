from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from plait.errors import CheckpointError, ConfigError
from plait.variables import checkpoint
from plait.variables.checkpoint import AsyncSaver, CheckpointDir, is_checkpoint, verify
from plait.variables.tree import snapshot

FILES = ["manifest.json", "state.json", "tensors.safetensors"]


def make_tree(value: float) -> dict:
    return {"variables": {"fc/weight": torch.full((4, 3), value), "n": torch.tensor(7)}, "value": value, "l": [1, None]}


def check(tree: dict, value: float) -> None:
    assert tree["value"] == value
    assert tree["l"] == [1, None]
    assert torch.equal(tree["variables"]["fc/weight"], torch.full((4, 3), value))
    assert tree["variables"]["n"].item() == 7


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def two(tmp_path: Path) -> CheckpointDir:
    directory = CheckpointDir(tmp_path / "run", version="9.9")
    directory.save(make_tree(1.0), step=10)
    directory.save(make_tree(2.0), step=20)
    return directory


def test_save_and_read_back(two: CheckpointDir):
    first, last = two.list()
    assert [first.path.name, last.path.name] == ["ckpt-000000000010-000001", "ckpt-000000000020-000002"]
    assert (last.step, last.sequence) == (20, 2)
    assert names(last.path) == FILES
    check(two.read(first), 1.0)
    check(two.read(str(last.path)), 2.0)
    info, tree = two.read_latest()
    assert info == last
    check(tree, 2.0)
    manifest = verify(last.path)
    assert (manifest.step, manifest.sequence, manifest.plait, manifest.format) == (20, 2, "9.9", 1)
    assert manifest.created.endswith("+00:00")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.uint64]
)
def test_dtypes_and_odd_shapes_survive(tmp_path: Path, dtype: torch.dtype):
    tensors = {"a": torch.ones(2, 3).to(dtype), "empty": torch.empty(0, 3, dtype=dtype), "b": torch.tensor(1).to(dtype)}
    directory = CheckpointDir(tmp_path)
    read = directory.read(directory.save(tensors, step=0))
    assert all(torch.equal(read[name], tensor) and read[name].dtype == dtype for name, tensor in tensors.items())


def test_floats_survive_exactly(tmp_path: Path):
    directory = CheckpointDir(tmp_path)
    values = [float("inf"), -float("inf"), 0.1, 5e-324, -0.0, 2**127 + 1]
    assert repr(directory.read(directory.save({"v": [*values, float("nan")]}, step=0))["v"][:-1]) == repr(values)


def test_the_order_is_by_sequence_not_by_step(tmp_path: Path):
    directory = CheckpointDir(tmp_path, keep=None)
    for step in (30, 30, 5):
        directory.save({"step": step}, step=step)
    assert [(info.step, info.sequence) for info in directory.list()] == [(30, 1), (30, 2), (5, 3)]
    assert directory.read_latest()[1] == {"step": 5}


def test_only_the_newest_are_kept(tmp_path: Path):
    directory = CheckpointDir(tmp_path, keep=2)
    for step in range(5):
        directory.save({"step": step}, step=step)
    assert [info.step for info in directory.list()] == [3, 4]
    assert len(names(tmp_path)) == 2
    with pytest.raises(ConfigError, match="keep is 0"):
        CheckpointDir(tmp_path, keep=0)


def test_what_cannot_be_pruned_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = CheckpointDir(tmp_path, keep=1)
    directory.save({"step": 0}, step=0)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.startswith("ckpt-"):
            raise OSError(1, "not now")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.warns(UserWarning, match="cannot be removed: .*not now"):
        directory.save({"step": 1}, step=1)
    assert [info.step for info in directory.list()] == [0, 1]


def test_an_empty_or_missing_directory_has_no_latest(tmp_path: Path):
    assert CheckpointDir(tmp_path / "none").read_latest() is None
    assert CheckpointDir(tmp_path).list() == []
    assert names(tmp_path) == []


def test_a_foreign_name_is_no_checkpoint(two: CheckpointDir):
    for name in ("ckpt-1-2", "ckpt-000000000030-000003.bak", "xckpt-000000000030-000003", "notes"):
        (two.path / name).mkdir()
    assert [info.step for info in two.list()] == [10, 20]


def expect_fallback(two: CheckpointDir, words: str) -> None:
    """The newest is bad: reading it says so, and reading the latest gives the one before."""
    newest = two.list()[-1]
    with pytest.raises(CheckpointError, match=words) as caught:
        two.read(newest)
    assert newest.path.name in str(caught.value)
    with pytest.warns(UserWarning, match=words) as warned:
        info, tree = two.read_latest()
    assert len(warned) == 1
    assert newest.path.name in str(warned[0].message)
    assert info.step == 10
    check(tree, 1.0)


def test_any_flipped_byte_is_noticed(two: CheckpointDir):
    generator = random.Random(0)
    newest = two.list()[-1].path
    for name in FILES:
        file = newest / name
        data = file.read_bytes()
        positions = generator.sample(range(len(data)), min(120, len(data)))
        for position in positions:
            altered = bytearray(data)
            altered[position] ^= 1 << generator.randrange(8)
            file.write_bytes(altered)
            expect_fallback(two, name)
        file.write_bytes(data)
    check(two.read_latest()[1], 2.0)


def test_any_cut_or_added_byte_is_noticed(two: CheckpointDir):
    newest = two.list()[-1].path
    for name in FILES:
        file = newest / name
        data = file.read_bytes()
        changed = [data[:length] for length in (0, 1, len(data) // 2, len(data) - 1)]
        for altered in [*changed, data + b"\0", data + b"\n", b" " + data]:
            file.write_bytes(altered)
            expect_fallback(two, name)
        file.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(two: CheckpointDir, name: str):
    (two.list()[-1].path / name).unlink()
    expect_fallback(two, f"{name} is missing")


def test_an_added_file_is_noticed(two: CheckpointDir):
    (two.list()[-1].path / "notes.txt").touch()
    expect_fallback(two, "notes.txt does not belong")


def test_a_pipe_does_not_hang_the_reader(two: CheckpointDir):
    file = two.list()[-1].path / "state.json"
    file.unlink()
    os.mkfifo(file)
    expect_fallback(two, "state.json is not a regular file")


def test_a_file_in_place_of_a_checkpoint_is_noticed(two: CheckpointDir):
    newest = two.list()[-1].path
    shutil.rmtree(newest)
    newest.write_text("x")
    expect_fallback(two, "cannot be read")


def test_a_renamed_checkpoint_is_noticed(two: CheckpointDir):
    first, last = two.list()
    last.path.rename(two.path / "ckpt-000000000099-000009")
    expect_fallback(two, "says step 20, sequence 2")
    copied = two.path / "best"  # a name that says nothing cannot be wrong
    shutil.copytree(first.path, copied)
    check(two.read(copied), 1.0)
    assert is_checkpoint(copied)
    assert not is_checkpoint(two.path)


MANIFESTS = {
    "[]": b"[]",
    "null": b"null",
    "deep": b"[" * 60_000,
    "digits": b"1" * 5000,
    "keys": b'{"body": {"format": 1, "x": 1}}',
    "latin": b'{"body": "\xff"}',
    "files": b'{"body": {"format": 1, "step": 0, "sequence": 0, "created": 0, "plait": 0, "files": 5}}',
}


@pytest.mark.parametrize("data", MANIFESTS.values(), ids=MANIFESTS)
def test_a_strange_manifest_is_only_a_checkpoint_error(two: CheckpointDir, data: bytes):
    (two.list()[-1].path / "manifest.json").write_bytes(data)
    expect_fallback(two, "manifest.json")


def forge(path: Path, **changes: object) -> None:
    """A manifest that is right by its own checksum."""
    body = json.loads((path / "manifest.json").read_bytes())["body"]
    if "files" not in changes:
        body["files"] = {
            name: {"size": (path / name).stat().st_size, "sha256": checkpoint.file_digest(path / name)}
            for name in FILES[1:]
        }
    (path / "manifest.json").write_bytes(checkpoint._seal({**body, **changes}))


@pytest.mark.parametrize("state", [b'{"a": {"$tensor": "gone"}}', b"[" * 200_000, b"{", b"\xff", b""])
def test_a_forged_state_is_only_a_checkpoint_error(two: CheckpointDir, state: bytes):
    newest = two.list()[-1].path
    (newest / "state.json").write_bytes(state)
    forge(newest)
    expect_fallback(two, "cannot be read|not saved with it")


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_forged_header_is_only_a_checkpoint_error(two: CheckpointDir, data: bytes):
    newest = two.list()[-1].path
    (newest / "tensors.safetensors").write_bytes(data)
    forge(newest)
    expect_fallback(two, "cannot be read")


def test_a_later_format_is_named(two: CheckpointDir):
    forge(two.list()[-1].path, format=2)
    expect_fallback(two, "its format is 2, this plait reads format 1")


def test_a_body_of_another_form_is_only_a_checkpoint_error(two: CheckpointDir):
    for body in ({"format": 1}, {"format": 1, "x": 1}, {}, [], None, 3):
        (two.list()[-1].path / "manifest.json").write_bytes(checkpoint._seal(body))
        expect_fallback(two, "cannot be read")


def test_a_huge_state_is_refused_before_it_is_read(two: CheckpointDir):
    newest = two.list()[-1].path
    size = 1024**3 + 1
    os.truncate(newest / "state.json", size)  # sparse: takes no room
    files = {"state.json": {"size": size, "sha256": ""}, "tensors.safetensors": {"size": 1, "sha256": ""}}
    forge(newest, files=files)
    expect_fallback(two, f"state.json has {size} bytes, 1073741824 are allowed")


def test_no_valid_checkpoint_at_all_is_an_error(two: CheckpointDir):
    for info in two.list():
        (info.path / "state.json").write_text("{}")
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        two.read_latest()


def test_what_is_read_is_not_the_file(two: CheckpointDir):
    path = two.list()[-1].path
    tree = two.read(path)
    with (path / "tensors.safetensors").open("r+b") as file:
        file.seek(-60, os.SEEK_END)
        file.write(b"\0" * 60)
    check(tree, 2.0)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"x": {1, 2}}, "a set"),
        ({"t": torch.ones(2, dtype=torch.complex128)}, "complex128"),
        ({"t\udc80": torch.ones(2)}, "surrogates"),
        ({"n": 10**5000}, "digits"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(two: CheckpointDir, tree: dict, words: str):
    before = names(two.path)
    with pytest.raises(CheckpointError, match=words) as caught:
        two.save(tree, step=30)
    assert str(two.path) in str(caught.value)
    assert names(two.path) == before


def test_shared_tensors_are_refused_and_a_snapshot_helps(tmp_path: Path):
    tied = torch.ones(3)
    directory = CheckpointDir(tmp_path)
    with pytest.raises(CheckpointError, match=r"snapshot\(\)"):
        directory.save({"a": tied, "b": tied}, step=0)
    assert torch.equal(directory.read(directory.save(snapshot({"a": tied, "b": tied}), step=0))["b"], tied)


def test_lazy_views_are_written_as_they_read(tmp_path: Path):
    directory = CheckpointDir(tmp_path)
    tree = directory.read(
        directory.save({"c": torch.tensor([1 + 2j]).conj(), "t": torch.arange(6).view(2, 3).t()}, step=0)
    )
    assert tree["c"].tolist() == [1 - 2j]
    assert tree["t"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_negative_step_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="step -1"):
        CheckpointDir(tmp_path).save({}, step=-1)


def test_check_writable(tmp_path: Path):
    directory = CheckpointDir(tmp_path / "deep" / "run")
    directory.check_writable()
    assert names(tmp_path / "deep" / "run") == []
    (tmp_path / "file").write_text("x")
    below = CheckpointDir(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match=r"file/run.*Not a directory"):
        below.check_writable()
    with pytest.raises(CheckpointError, match="Not a directory"):
        below.save({}, step=0)
    with pytest.raises(CheckpointError, match="cannot list"):
        below.list()


def test_what_dead_writers_left_is_removed_and_living_ones_are_spared(tmp_path: Path):
    (tmp_path / ".tmp-dead").mkdir()
    (tmp_path / ".tmp-dead" / "state.json").write_text("x")
    assert CheckpointDir(tmp_path).read_latest() is None
    assert names(tmp_path) == [".tmp-dead"]  # a reader removes nothing
    with checkpoint._temporary(tmp_path) as living:
        CheckpointDir(tmp_path).check_writable()
        assert names(tmp_path) == [living.name]
    assert names(tmp_path) == []


def test_without_locks_only_old_temporaries_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> int:
        raise OSError(95, "no locks here")

    monkeypatch.setattr(checkpoint, "_lock", refuse)
    for name, age in (("young", 60), ("old", 100_000)):
        (tmp_path / f".tmp-{name}").mkdir()
        os.utime(tmp_path / f".tmp-{name}", (time.time() - age,) * 2)
    directory = CheckpointDir(tmp_path)
    directory.save({"a": 1}, step=0)
    assert names(tmp_path) == [".tmp-young", "ckpt-000000000000-000001"]


def test_files_follow_the_umask(tmp_path: Path):
    path = CheckpointDir(tmp_path).save(make_tree(0.0), step=0)
    plain = tmp_path / "plain"
    plain.touch()
    assert {(path / name).stat().st_mode for name in FILES} == {plain.stat().st_mode}


def test_the_saver_writes_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory, gate = CheckpointDir(tmp_path), threading.Event()
    real = directory.save

    def slow(tree: object, *, step: int) -> Path:
        gate.wait(10)
        return real(tree, step=step)

    monkeypatch.setattr(directory, "save", slow)
    saver = AsyncSaver(directory)
    assert saver.wait() is None
    saver.save(make_tree(1.0), step=1)
    assert saver.busy
    assert directory.list() == []
    gate.set()
    saver.save(make_tree(2.0), step=2)  # waits for the first
    assert [info.step for info in directory.list()][0] == 1
    assert saver.wait() == directory.list()[-1].path
    assert not saver.busy
    check(directory.read_latest()[1], 2.0)
    saver.close()


def test_the_savers_error_comes_back_once(tmp_path: Path):
    saver = AsyncSaver(CheckpointDir(tmp_path))
    saver.save({"bad": object()}, step=1)
    with pytest.raises(CheckpointError, match="is a object"):
        saver.wait()
    saver.save({"bad": object()}, step=2)
    with pytest.raises(CheckpointError, match="is a object"):
        saver.save({"good": 1}, step=3)
    saver.save({"good": 1}, step=4)
    saver.close()
    assert [info.step for info in saver.directory.list()] == [4]


def test_what_others_write_is_waited_for_before_anything_is_written(tmp_path: Path):
    directory = CheckpointDir(tmp_path)
    saver = AsyncSaver(directory)
    seen: list[int] = []
    saver.save(make_tree(1.0), step=1, ready=lambda: seen.append(len(directory.list())) is None)
    saver.close()
    assert (seen, len(directory.list())) == ([0], 1)


def test_what_others_have_lost_is_not_kept(tmp_path: Path):
    saver = AsyncSaver(CheckpointDir(tmp_path))
    saver.save(make_tree(1.0), step=1, ready=lambda: False)
    saver.close()
    assert saver.directory.list() == []


def test_if_others_cannot_write_nothing_is_written(tmp_path: Path):
    def fail() -> bool:
        raise CheckpointError("server 0 could not save its share")

    saver = AsyncSaver(CheckpointDir(tmp_path))
    saver.save(make_tree(1.0), step=1, ready=fail)
    with pytest.raises(CheckpointError, match="server 0 could not save"):
        saver.close()
    assert saver.directory.list() == []


def test_any_error_of_the_writer_is_a_checkpoint_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saver = AsyncSaver(CheckpointDir(tmp_path))
    monkeypatch.setattr(saver.directory, "save", lambda tree, *, step: 1 / 0)
    saver.save({}, step=1)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        saver.close()
    saver.close()


def run_script(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# one process that imports torch, and children of it that are killed: an import for each would take too long
KILL = """
import os, random, signal, sys, time, warnings
import torch
from plait.variables.checkpoint import CheckpointDir

path = sys.argv[1]
generator = random.Random(5)
warnings.simplefilter("error")

def child():
    directory = CheckpointDir(path, keep=2)
    latest = directory.read_latest()
    step = latest[0].step if latest else 0
    while True:
        step += 1
        directory.save({"t": torch.full((1000,), float(step)), "step": step}, step=step)

before, torn = 0, 0
for _ in range(15):
    pid = os.fork()
    if pid == 0:
        child()
    while not CheckpointDir(path).list():
        time.sleep(0.01)
    time.sleep(0.05 + generator.random() * 0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    torn += any(name.startswith(".tmp-") for name in os.listdir(path))
    info, tree = CheckpointDir(path).read_latest()
    assert info.step == tree["step"] >= before
    assert tree["t"].tolist() == [float(info.step)] * 1000
    before = info.step
CheckpointDir(path).check_writable()
assert not [name for name in os.listdir(path) if name.startswith(".tmp-")]
print(before, torn)
"""


def test_a_killed_writer_leaves_a_readable_latest_integration(tmp_path: Path):
    saved, _ = map(int, run_script(KILL, str(tmp_path)).split())
    assert saved > 1


FULL = """
import os, resource, signal, sys
import torch
from plait.errors import CheckpointError
from plait.variables.checkpoint import CheckpointDir

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = CheckpointDir(sys.argv[1])
directory.save({"t": torch.ones(10)}, step=1)
before = sorted(os.listdir(directory.path))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for tree in ({"t": torch.ones(1_000_000)}, {"text": "x" * 1_000_000}):
    try:
        directory.save(tree, step=2)
    except CheckpointError as error:
        print(error)
    assert sorted(os.listdir(directory.path)) == before
    info, tree = directory.read_latest()
    assert info.step == 1 and tree["t"].sum() == 10
"""


def test_a_full_disk_leaves_the_previous_one_integration(tmp_path: Path):
    lines = run_script(FULL, str(tmp_path)).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert str(tmp_path) in line
        assert "File too large" in line
        assert "still good" in line
