"""Checkpoints on disk: directories that are whole or not there, and that notice any change to a byte of theirs.

DIR/ckpt-<step>-<sequence>/
    tensors.safetensors     the tensors of the state
    state.json              everything else
    manifest.json           sizes and checksums of both, and of itself; written last
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from plait.atomic import file_digest, sync_file
from plait.errors import CheckpointError, ConfigError
from plait.variables.tree import join_tree, split_tree

__all__ = ["AsyncSaver", "CheckpointDir", "CheckpointInfo", "Manifest", "is_checkpoint", "load_parts", "verify"]

_FORMAT = 1
_MANIFEST, _STATE, _TENSORS = "manifest.json", "state.json", "tensors.safetensors"
_MAX_MANIFEST = 64 * 1024
_MAX_STATE = 1024**3
_NAME = re.compile(r"ckpt-([0-9]{12,})-([0-9]{6,})")
_TEMPORARY = ".tmp-"
_STALE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint's name says."""

    path: Path
    step: int
    sequence: int


@dataclass(frozen=True)
class Manifest:
    format: int
    step: int
    sequence: int
    created: str
    plait: str
    files: dict[str, dict[str, Any]]

    def encode(self) -> bytes:
        return _seal(asdict(self))


_Infos: TypeAlias = list[CheckpointInfo]  # inside the class, `list` is the method


class CheckpointDir:
    """A directory of checkpoints, ordered by their sequence number; the newest `keep` stay (None: all)."""

    def __init__(self, path: str | os.PathLike[str], *, keep: int | None = 5, version: str = "unknown") -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep is {keep}; write how many checkpoints to keep (at least 1), or None for all")
        self.path = Path(path)
        self.keep = keep
        self.version = version
        self.pinned: Callable[[CheckpointInfo], bool] = lambda info: False  # noqa: ARG005 - its shape
        """Which checkpoints must stay, however many are newer."""
        self._opened = False

    def check_writable(self) -> None:
        """Make the directory and prove that a file can be written there."""
        with self._writing():
            self._open()
            with _temporary(self.path) as temporary:
                (temporary / "probe").write_bytes(b"plait")

    def save(self, tree: Any, *, step: int) -> Path:
        """Write `tree`, which nobody may change meanwhile (see `snapshot`), then prune; on disk when it returns."""
        if step < 0:
            raise CheckpointError(f"cannot save a checkpoint at step {step}; steps count from 0")
        with self._writing():
            self._open()
            sequence = max((info.sequence for info in self.list()), default=0) + 1
            target = self.path / f"ckpt-{step:012d}-{sequence:06d}"
            with _temporary(self.path) as temporary:
                files = _write_parts(temporary, tree)
                created = datetime.now(timezone.utc).isoformat(timespec="seconds")
                manifest = Manifest(_FORMAT, step, sequence, created, self.version, files)
                _write(temporary / _MANIFEST, manifest.encode())
                sync_file(temporary)
                temporary.rename(target)
            sync_file(self.path)
        self.prune()
        return target

    def prune(self) -> None:
        """Remove all but the newest `keep`; what cannot be removed is only warned about."""
        for info in self.list()[: -self.keep] if self.keep else []:
            if self.pinned(info):
                continue
            try:
                # renamed first, so that half of a removed checkpoint never stands under its name
                shutil.rmtree(info.path.rename(_temporary_name(self.path)))
            except OSError as error:
                warnings.warn(f"the old checkpoint {info.path} cannot be removed: {error}", stacklevel=2)

    def list(self) -> _Infos:
        """All checkpoints, the newest last; judged by their names only."""
        try:
            names = [entry.name for entry in self.path.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot list the checkpoints in {self.path}: {error}") from error
        found = [(name, _NAME.fullmatch(name)) for name in names]
        infos = [CheckpointInfo(self.path / name, int(hit[1]), int(hit[2])) for name, hit in found if hit]
        return sorted(infos, key=lambda info: (info.sequence, info.step))

    def read(self, checkpoint: CheckpointInfo | str | os.PathLike[str]) -> Any:
        """The state in a checkpoint, verified. A path is taken as it stands, not as relative to this directory."""
        path = checkpoint.path if isinstance(checkpoint, CheckpointInfo) else Path(checkpoint)
        _, state, tensors = load_parts(path)
        with _reading(path):
            # cloned: what was loaded is the file itself, mapped, and would change with it
            return join_tree(state, {name: tensor.clone() for name, tensor in tensors.items()})

    def read_latest(self) -> tuple[CheckpointInfo, Any] | None:
        """The newest valid checkpoint; None if there is none at all."""
        reasons = []
        for info in reversed(self.list()):
            try:
                tree = self.read(info)
            except CheckpointError as error:
                reasons.append(str(error))
                warnings.warn(f"skipped a bad checkpoint, the one before it is tried: {error}", stacklevel=2)
            else:
                return info, tree
        if reasons:
            raise CheckpointError(
                f"none of the {len(reasons)} checkpoints in {self.path} can be read; bring one back from a copy,"
                f" or start in an empty directory. The newest: {reasons[0]}"
            )
        return None

    def _open(self) -> None:
        """Make the directory and remove what killed writers left; once."""
        if self._opened and self.path.is_dir():
            return
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # a parent may forbid reading
                sync_file(self.path.parent)
        for left in self.path.glob(f"{_TEMPORARY}*"):
            _remove_stale(left)
        self._opened = True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"cannot save a checkpoint in {self.path}: {error}") from error
        except Exception as error:
            raise CheckpointError(
                f"cannot write a checkpoint in {self.path}: {_reason(error)}."
                " Name a directory that can be written, with room; checkpoints saved before are still good"
            ) from error


class AsyncSaver:
    """Writes one checkpoint at a time in the background; an error comes back from the next call."""

    def __init__(self, directory: CheckpointDir) -> None:
        self.directory = directory
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._path: Path | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        tree: Any,
        *,
        step: int,
        ready: Callable[[], bool] | None = None,
        done: Callable[[Path], None] | None = None,
    ) -> None:
        """Wait for the save before, then start this one; `tree` is the saver's from now on (see `snapshot`).

        `ready` is called before anything is written: it may wait for what others write, and refuse the save. `done`
        is called when it is on disk.
        """
        self.wait()
        arguments = (tree, step, ready, done)
        thread = threading.Thread(target=self._write, args=arguments, name="plait-checkpoint", daemon=True)
        thread.start()
        self._thread = thread

    def wait(self) -> Path | None:
        """Block until the last save is on disk; returns where that is, None before any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"saving in {self.directory.path} failed: {_reason(error)}") from error
        return self._path

    def close(self) -> None:
        self.wait()

    def _write(
        self, tree: Any, step: int, ready: Callable[[], bool] | None, done: Callable[[Path], None] | None
    ) -> None:
        try:
            if ready is not None and not ready():
                return
            self._path = self.directory.save(tree, step=step)
            if done is not None:
                done(self._path)
        except Exception as error:  # noqa: BLE001  the caller's thread raises it, in wait()
            self._error = error


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is one checkpoint, rather than a directory of them."""
    return path.is_dir() and (_NAME.fullmatch(path.name) is not None or (path / _MANIFEST).exists())


def verify(path: Path) -> Manifest:
    """Compare every file of a checkpoint with its manifest; CheckpointError says which differs, and how."""
    with _reading(path):
        _check_names(path)
        manifest = _read_manifest(path)
        for name, expected in manifest.files.items():
            _check_size(path / name, expected["size"])
        for name, expected in manifest.files.items():
            if file_digest(path / name) != expected["sha256"]:
                raise CheckpointError(f"{name} was altered, its checksum is not the manifest's")
        return manifest


def load_parts(path: Path) -> tuple[Manifest, Any, dict[str, Tensor]]:
    """The verified parts: manifest, JSON tree, tensors by name. The tensors are the file, mapped: look, or clone."""
    from safetensors.torch import load_file  # noqa: PLC0415  not needed to write or list

    manifest = verify(path)
    with _reading(path):
        return manifest, json.loads((path / _STATE).read_bytes()), load_file(path / _TENSORS)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever a strange file makes a parser raise is a CheckpointError that names the checkpoint."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _canonical(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1) + "\n").encode()


def _seal(body: Any) -> bytes:
    """The only bytes that mean this manifest: whatever else is found on disk was altered."""
    digest = hashlib.sha256(_canonical(body)).hexdigest()
    return _canonical({"body": body, "sha256": digest})


def _check_names(path: Path) -> None:
    expected = {_MANIFEST, _STATE, _TENSORS}
    names = {entry.name for entry in path.iterdir()}
    for name in sorted(expected - names):
        raise CheckpointError(f"{name} is missing")
    for name in sorted(names - expected):
        raise CheckpointError(f"{name} does not belong there")
    for name in sorted(expected):
        if not (path / name).is_file():
            raise CheckpointError(f"{name} is not a regular file")


def _read_manifest(path: Path) -> Manifest:
    file = path / _MANIFEST
    size = file.stat().st_size
    if size > _MAX_MANIFEST:
        raise CheckpointError(f"{_MANIFEST} has {size} bytes, more than any manifest of plait's")
    data = file.read_bytes()
    try:
        body = json.loads(data)["body"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{_MANIFEST} was altered: {_reason(error)}") from error
    if _seal(body) != data:
        raise CheckpointError(f"{_MANIFEST} was altered, its checksum or form is not what was written")
    if body["format"] != _FORMAT:
        raise CheckpointError(f"its format is {body['format']!r}, this plait reads format {_FORMAT}")
    manifest = Manifest(**body)
    if set(manifest.files) != {_STATE, _TENSORS}:
        raise CheckpointError(f"{_MANIFEST} lists other files than {_STATE} and {_TENSORS}")
    named = _NAME.fullmatch(path.name)
    if named and (int(named[1]), int(named[2])) != (manifest.step, manifest.sequence):
        raise CheckpointError(
            f"its name does not fit its {_MANIFEST}, which says step {manifest.step}, sequence {manifest.sequence}"
        )
    return manifest


def _check_size(file: Path, expected: int) -> None:
    size = file.stat().st_size
    if size != expected:
        raise CheckpointError(f"{file.name} has {size} bytes, the manifest says {expected}")
    if file.name == _STATE and size > _MAX_STATE:
        raise CheckpointError(f"{file.name} has {size} bytes, {_MAX_STATE} are allowed")


def _write(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    sync_file(file)


def _write_parts(directory: Path, tree: Any) -> dict[str, dict[str, Any]]:
    """Write tensors and state; returns the size and the checksum of each."""
    from safetensors.torch import save_file  # noqa: PLC0415  not needed to read or list

    state, tensors = split_tree(tree)
    data = json.dumps(state).encode()
    if len(data) > _MAX_STATE:
        raise CheckpointError(
            f"{_STATE} would have {len(data)} bytes, {_MAX_STATE} are allowed; keep arrays in tensors"
        )
    _write(directory / _STATE, data)
    try:
        save_file({name: _plain(tensor) for name, tensor in tensors.items()}, directory / _TENSORS)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"safetensors does not take these tensors: {_reason(error).strip()}. Save a snapshot() of the state,"
            " with dtypes that safetensors has"
        ) from error
    shutil.copymode(directory / _STATE, directory / _TENSORS)  # safetensors ignores the umask
    sync_file(directory / _TENSORS)
    files = [directory / _STATE, directory / _TENSORS]
    return {file.name: {"size": file.stat().st_size, "sha256": file_digest(file)} for file in files}


def _plain(tensor: Tensor) -> Tensor:
    """Itself, if it is from a snapshot; else what safetensors can take without writing other bytes than its values."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _temporary_name(parent: Path) -> Path:
    return parent / f"{_TEMPORARY}{uuid.uuid4().hex}"


@contextlib.contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    """A directory that is locked while its writer lives, and removed if it is still there at the end."""
    path, lock = _make_locked(parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _make_locked(parent: Path) -> tuple[Path, int | None]:
    for _ in range(100):
        path = _temporary_name(parent)
        path.mkdir()
        try:
            lock = _lock(path)
        except (BlockingIOError, FileNotFoundError):
            continue  # someone who cleans up took it for a dead writer's, between mkdir and the lock
        except OSError:
            return path, None  # a file system without locks
        if path.is_dir():
            return path, lock
        os.close(lock)
    raise CheckpointError(f"another process keeps removing temporary directories in {parent}")


def _lock(path: Path) -> int:
    """A handle that keeps `path` locked until it is closed, or its process dies."""
    import fcntl  # noqa: PLC0415  not on every system

    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _remove_stale(path: Path) -> None:
    """Remove what a dead writer left. A living one holds the lock; without locks, age must tell."""
    lock = None
    try:
        lock = _lock(path)
    except (BlockingIOError, FileNotFoundError):
        return
    except OSError:
        if time.time() - path.stat().st_mtime < _STALE_SECONDS:
            return
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
