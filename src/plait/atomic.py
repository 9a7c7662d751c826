"""Files that are written whole or not at all, and how to know one again."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["atomic_path", "file_digest", "sync_file", "write_atomic"]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, read in blocks."""
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def sync_file(path: Path) -> None:
    """Ask the system to have `path` (a file or a directory) on disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # some network file systems cannot sync a directory; the files in it are synced by themselves
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str], *, sync: bool = True) -> Iterator[Path]:
    """Give a temporary name in the same directory; rename it to `path` if the block ends well, remove it if not.

    Without `sync`, a machine that loses its power may lose the file: for what can be had again, such as a cache.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # not mkstemp: its files are for their owner alone, ours follow the umask
    temporary = target.parent / f".{uuid.uuid4().hex}.tmp"
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        if sync:
            sync_file(temporary)
        temporary.replace(target)
        if sync:
            sync_file(target.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
