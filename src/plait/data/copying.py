"""Copies between local paths and `s3://`: verified, restartable, and the source is never touched."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from plait.atomic import atomic_path
from plait.data.stores import Place, S3Store, Stat, Url, place_of
from plait.errors import ConfigError, DataError

__all__ = ["copy", "copy_parallel", "rename"]

_READ_BYTES = 1 << 20
_STALE_SECONDS = 600
"""A temporary file that nobody has written to for so long belongs to a process that was killed."""
_TEMPORARY = re.compile(r"(?:.*/)?\.[0-9a-f]{32}\.tmp", re.DOTALL)

T = TypeVar("T")
log = logging.getLogger("plait")


def copy(src_url: Url, dst_url: Url) -> None:
    """Copy one file; one that is there already and is the same is left as it is."""
    source, target = place_of(src_url), place_of(dst_url)
    _need_file(source)
    if (there := target.find()) is not None and there.is_directory:
        raise _error(errno.EISDIR, target, "write the name of the file, or use copy_parallel")
    _copy_file(source, target)


def copy_parallel(src_url: Url, dst_url: Url, file_list: Iterable[str] | None = None, threads: int = 16) -> None:
    """Copy all below a directory, or the files of `file_list` (relative to it), into another directory.

    Cut off and started again, it goes on: files that are there and have the same checksum are not copied again.
    `threads=0` copies one file after the other, in this thread.
    """
    if threads < 0:
        raise ConfigError(f"threads={threads} is less than none: write 0, or how many files to copy at a time")
    _copy_tree(place_of(src_url), place_of(dst_url), None if file_list is None else list(file_list), threads)


def rename(src_url: Url, dst_url: Url) -> None:
    """Move a file over another, or a directory to a name that is free.

    Between local and remote, and on `s3://`, it is copied, verified, and only then removed.
    """
    source, target = place_of(src_url), place_of(dst_url)
    info, there = source.stat(), target.find()
    if there is not None and _identity(source) == _identity(target):
        return
    if there is not None and info.is_directory:
        raise _error(errno.EEXIST, target, "remove it first, or use copy_parallel")
    if there is not None and there.is_directory:
        raise _error(errno.EISDIR, target, "write the name of the file")
    if info.is_directory and f"{_identity(target)}/".startswith(f"{_identity(source)}/"):
        raise _error(errno.EINVAL, target, f"it lies inside {source.url!r}")
    if not _rename_local(source, target):
        _move(source, target, info.is_directory)


def _rename_local(source: Place, target: Place) -> bool:
    """Whether the system could do it by itself."""
    if isinstance(source.store, S3Store) or isinstance(target.store, S3Store):
        return False
    Path(target.path).parent.mkdir(parents=True, exist_ok=True)
    try:
        Path(source.path).replace(target.path)
    except OSError as error:
        if error.errno != errno.EXDEV:  # another disk
            raise
        return False
    return True


def _move(source: Place, target: Place, is_directory: bool) -> None:
    if not is_directory:
        _copy_file(source, target)
        source.store.remove(source.path, is_directory=False)
        return
    before = _copy_tree(source, target, None, threads=16)
    if source.store.tree(source.path) != before:
        raise DataError(
            f"{source.url!r} changed while it was moved to {target.url!r}; nothing was removed: when nobody writes to"
            " it any more, remove the target and rename again"
        )
    source.store.remove(source.path, is_directory=True)


def _identity(place: Place) -> str:
    """The same for two names of one place."""
    if isinstance(place.store, S3Store):
        return f"s3://{place.path.rstrip('/')}"
    return os.path.realpath(place.path)


def _need_file(place: Place) -> Stat:
    info = place.stat()
    if info.is_directory:
        raise _error(errno.EISDIR, place, "copy_parallel copies a directory")
    return info


def _error(number: int, place: Place, hint: str) -> OSError:
    return OSError(number, f"{os.strerror(number)} ({hint})", place.url)


def _copy_tree(source: Place, target: Place, names: list[str] | None, threads: int) -> list[tuple[str, Stat]]:
    """Copy, and tell what was in the source before."""
    if not source.stat().is_directory:
        raise _error(errno.ENOTDIR, source, "it is a file: use copy")
    inside = source.store.tree(source.path) if names is None else _listed(source, names, threads)
    _check_names([name for name, _ in inside], source)
    target.store.make_dirs(target.path)
    for name in _empty_directories(inside):
        target.store.make_dirs((target / name).path)
    _sweep(target)
    files = {name: info.length for name, info in inside if not info.is_directory and not _TEMPORARY.fullmatch(name)}
    copied = _copy_files(source, target, files, threads)
    log.info("%s: %d files copied, %d were there", target.url, copied, len(files) - copied)
    return inside


def _listed(source: Place, names: list[str], threads: int) -> list[tuple[str, Stat]]:
    _check_names(names, source)
    return list(_in_threads(lambda name: _need_file(source / name), names, threads))


def _check_names(names: list[str], source: Place) -> None:
    """A name may not lead out of the directory that it is copied to; on s3:// somebody else may have chosen it."""
    for name in names:
        if any(part in {"", ".", ".."} for part in name.split("/")):
            raise DataError(
                f"{name!r} in {source.url!r} cannot be copied: a part of it is empty, '.' or '..'; rename it"
            )


def _empty_directories(inside: list[tuple[str, Stat]]) -> list[str]:
    filled = {name.rpartition("/")[0] for name, _ in inside}
    return [name for name, info in inside if info.is_directory and name not in filled]


def _sweep(target: Place) -> None:
    """Remove what killed copies have left in the directory."""
    if isinstance(target.store, S3Store):
        return
    old = (time.time() - _STALE_SECONDS) * 1e9
    for name, info in target.store.tree(target.path):
        if _TEMPORARY.fullmatch(name) and not info.is_directory and info.mtime_nsec < old:
            target.store.remove((target / name).path, is_directory=False)


def _copy_files(source: Place, target: Place, files: dict[str, int], threads: int) -> int:
    """Copy all; the first failure ends it. How many had to be copied."""
    copied = 0
    with _progress(sum(files.values())) as advance:
        for name, was_needed in _in_threads(lambda name: _copy_file(source / name, target / name), files, threads):
            copied += was_needed
            advance(files[name])
    return copied


def _in_threads(work: Callable[[str], T], names: Iterable[str], threads: int) -> Iterator[tuple[str, T]]:
    """(name, what `work` made of it), as they get done."""
    if threads == 0:
        yield from ((name, work(name)) for name in names)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="plait-copy") as pool:
        futures = {pool.submit(work, name): name for name in names}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar in a terminal; what it gives is told how many bytes are done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress  # noqa: PLC0415 - heavy, and only for people who watch
    from rich.console import Console  # noqa: PLC0415 - same

    columns = ("copying", progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)


def _copy_file(source: Place, target: Place) -> bool:
    """Whether it had to be copied."""
    if _proved_same(source, target):
        return False
    if isinstance(target.store, S3Store):
        _to_s3(source, target.store, target.path)
        _verify(source, target, target)
        return True
    with atomic_path(os.path.realpath(target.path)) as temporary:
        _to_local(source, temporary)
        _verify(source, Place(target.store, "", str(temporary)), target)
    return True


def _to_s3(source: Place, store: S3Store, path: str) -> None:
    if isinstance(source.store, S3Store):
        store.client.cp_file(source.path, path, preserve_etag=True)
    else:
        store.upload(source.path, path)


def _to_local(source: Place, path: Path) -> None:
    if isinstance(source.store, S3Store):
        source.store.download(source.path, str(path))
    else:
        shutil.copyfile(source.path, path)


def _verify(source: Place, copied: Place, target: Place) -> None:
    if _proved_same(source, copied):
        return
    # an ETag need not be a checksum (encrypted objects): then the content itself has the last word
    if source.stat().length != copied.stat().length or _content_sum(source) != _content_sum(copied):
        raise DataError(
            f"the copy of {source.url!r} to {target.url!r} is not the same as its source: if nobody changed the source"
            " meanwhile, the disk or the network is faulty; copy it again"
        )


def _proved_same(source: Place, target: Place) -> bool:
    """Whether size and checksum agree; False also where that cannot be known without reading what is remote."""
    there = target.find()
    if there is None or there.is_directory or there.length != source.stat().length:
        return False
    part = _part_bytes(source) or _part_bytes(target)
    return _tag(source, part) == _tag(target, part)


def _part_bytes(place: Place) -> int | None:
    """The size of the parts that a remote file was uploaded in."""
    if not isinstance(place.store, S3Store) or "-" not in _tag(place, None):
        return None
    try:
        return int(place.store.head(place.path, PartNumber=1)["ContentLength"])
    except OSError:  # not every server knows
        return None


def _tag(place: Place, part: int | None) -> str:
    """The ETag of a remote file; what it would be, of a local one: MD5, or the MD5 of the parts' MD5s."""
    if isinstance(place.store, S3Store):
        return str(place.store.head(place.path).get("ETag")).strip('"')
    if not part:
        return _content_sum(place)
    size = place.stat().length
    with place.store.open(place.path) as file:
        sums = [_sum(file.read, min(part, size - start)).digest() for start in range(0, size, part)]
    return f"{_md5(b''.join(sums)).hexdigest()}-{len(sums)}"


def _content_sum(place: Place) -> str:
    with place.store.open(place.path) as file:
        return _sum(file.read, sys.maxsize).hexdigest()


def _sum(read: Callable[[int], bytes], size: int) -> hashlib._Hash:
    found = _md5()
    while size > 0 and (data := read(min(size, _READ_BYTES))):
        found.update(data)
        size -= len(data)
    return found


def _md5(data: bytes = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)
