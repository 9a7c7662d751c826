"""Files on local paths, `file://`, `s3://` and `obs://` (which is the same as `s3://`), with one set of functions.

A url is taken as it is written: nothing in it is decoded or expanded. An object store has no directories of its own:
there, a directory is what has something below it, or what `make_dirs` marked by an empty object `name/`.
"""
# ruff: noqa: PTH120 - a slash at the end means something here, and Path drops it

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from plait.data.stores import LOCAL, Place, Stat, Url, os_error, place_of, set_auth
from plait.errors import ConfigError

__all__ = [
    "Entry",
    "File",
    "append",
    "exists",
    "get_size",
    "glob",
    "is_directory",
    "list_directory",
    "make_dirs",
    "mk_dir",
    "read",
    "remove",
    "scan_dir",
    "set_auth",
    "stat",
    "walk",
    "write",
]

_MODES = {kind + rest for kind in "rwa" for rest in ("", "b", "+", "b+", "+b", "t", "t+", "+t")}

log = logging.getLogger("plait")


@dataclass(frozen=True)
class Entry:
    """One thing in a directory, in the manner of `os.DirEntry`."""

    name: str
    """Relative to the directory that was asked for; with slashes, when it was asked for with all below it."""
    path: str
    info: Stat

    def is_dir(self) -> bool:
        return self.info.is_directory

    def is_file(self) -> bool:
        return not self.info.is_directory

    def stat(self) -> Stat:
        return self.info


class File:
    """An open file, as Python's `open` gives it: modes `r`, `w`, `a`, with `+` and `b`; text is UTF-8, line ends stay.

    What is written with `w`, and anything on `s3://`, is in its place when the file is closed, whole; if the `with`
    block raises, nothing changes. The directory is made if it is missing.
    """

    def __init__(self, url: Url, mode: str = "r") -> None:
        if mode not in _MODES:
            raise ConfigError(f"the mode {mode!r} is unknown: write 'r', 'w' or 'a', with '+' or 'b' if you need them")
        self.name, self.mode = os.fspath(url), mode
        self._ending = contextlib.ExitStack()
        self._stream: IO[Any] = self._open(place_of(url), mode)

    def _open(self, place: Place, mode: str) -> IO[Any]:
        text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
        if "r" in mode and "+" not in mode:
            stream = place.store.open(place.path)
            return io.TextIOWrapper(stream, **text) if text else stream
        there = place.find()
        if there is None and "r" in mode:
            raise os_error(errno.ENOENT, place.url)
        if (there is not None and there.is_directory) or place.path.endswith("/"):
            raise os_error(errno.EISDIR, place.url)
        with contextlib.ExitStack() as ending:
            local = ending.enter_context(place.store.edit(place.path, keep="w" not in mode))
            opened: IO[Any] = local.open(mode, **text)
            self._ending = ending.pop_all()
        return opened

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def close(self) -> None:
        self.__exit__(None, None, None)

    def flush(self) -> None:
        self._stream.flush()

    def read(self, size: int = -1) -> Any:
        return self._stream.read(size)

    def readable(self) -> bool:
        return self._stream.readable()

    def readline(self, size: int = -1) -> Any:
        return self._stream.readline(size)

    def readlines(self, hint: int = -1) -> list[Any]:
        return self._stream.readlines(hint)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def seekable(self) -> bool:
        return self._stream.seekable()

    def size(self) -> int:
        """Bytes in the file, what was just written included."""
        if not self.writable():
            return stat(self.name).length
        self._stream.flush()
        return os.fstat(self._stream.fileno()).st_size

    def tell(self) -> int:
        return self._stream.tell()

    def writable(self) -> bool:
        return self._stream.writable()

    def write(self, data: Any) -> int:
        return self._stream.write(data)

    def writelines(self, lines: Iterable[Any]) -> None:
        self._stream.writelines(lines)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def __next__(self) -> Any:
        return next(self._stream)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: PYI036 - handed on as they come
        ending, self._ending = self._ending, contextlib.ExitStack()
        try:
            self._stream.close()
        except BaseException:
            ending.__exit__(*sys.exc_info())
            raise
        ending.__exit__(*error)

    def __del__(self) -> None:
        if "_stream" in vars(self) and not self.closed:
            self.close()
            warnings.warn(f"{self.name!r} was not closed", ResourceWarning, stacklevel=2, source=self)


def read(url: Url, binary: bool = False) -> Any:
    """All of a file, as str or (`binary`) bytes."""
    with File(url, "rb" if binary else "r") as file:
        return file.read()


def write(url: Url, data: str | bytes) -> None:
    """Make `data` the whole content of a file, or leave it as it was."""
    with File(url, "w" if isinstance(data, str) else "wb") as file:
        file.write(data)


def append(url: Url, data: str | bytes) -> None:
    with File(url, "a" if isinstance(data, str) else "ab") as file:
        file.write(data)


def stat(url: Url) -> Stat:
    return place_of(url).stat()


def exists(url: Url) -> bool:
    return place_of(url).find() is not None


def is_directory(url: Url) -> bool:
    info = place_of(url).find()
    return info is not None and info.is_directory


def get_size(url: Url, recursive: bool = False) -> int:
    """Bytes of a file; of a directory, those of the files in it, or (`recursive`) of all below it."""
    place = place_of(url)
    info = place.stat()
    if not info.is_directory:
        return info.length
    inside = place.store.tree(place.path) if recursive else place.store.scan(place.path)
    return sum(info.length for _, info in inside)


def scan_dir(url: Url) -> Iterator[Entry]:
    """The entries of a directory, by name."""
    place = place_of(url)
    return iter([Entry(name, (place / name).url, info) for name, info in place.store.scan(place.path)])


def list_directory(url: Url, recursive: bool = False) -> list[str]:
    """Names of what is in a directory, relative to it; `recursive`: of all below it."""
    place = place_of(url)
    return [name for name, _ in (place.store.tree if recursive else place.store.scan)(place.path)]


def walk(url: Url) -> Iterator[tuple[str, list[str], list[str]]]:
    """(directory, names of directories in it, names of files in it) for a directory and all below it, from the top."""
    place = place_of(url)
    inside: dict[str, tuple[list[str], list[str]]] = {"": ([], [])}
    for name, info in sorted(place.store.tree(place.path)):
        above, _, last = name.rpartition("/")
        if info.is_directory:
            inside[name] = ([], [])
        # on s3:// a file and a directory may have the same name; then what is above is in no list
        inside.setdefault(above, ([], []))[0 if info.is_directory else 1].append(last)
    for name, (folders, files) in inside.items():
        yield (place / name).url if name else place.url, folders, files


def glob(pattern: Url) -> list[str]:
    """Urls that match, by name: `*`, `?` and `[...]` inside a name, `**` for any number of directories.

    As in Python's own glob, a name that begins with a dot is matched only by a pattern that does.
    """
    place = place_of(pattern)
    bucket = "" if place.store is LOCAL else place.path.partition("/")[0] + "/"
    rest = place.path[len(bucket) :]
    root = "/" if rest.startswith("/") else ""
    parts = [part for part in rest.split("/") if part]
    return sorted(set(_matches(Place(place.store, place.prefix, bucket + root), parts)))


def _matches(base: Place, parts: list[str]) -> Iterator[str]:
    if not parts:
        yield base.url
        return
    part, rest = parts[0], parts[1:]
    if not set(part) & set("*?["):
        if (base / part).find() is not None:
            yield from _matches(base / part, rest)
        return
    if part == "**" and rest:
        yield from _matches(base, rest)  # no directory at all
    names: list[tuple[str, Stat]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        names = base.store.scan(base.path or ".")
    for name, info in names:
        if name.startswith(".") and not part.startswith("."):
            continue
        if part == "**" and info.is_directory:
            yield from _matches(base / name, parts)
        if part == "**" and not rest:
            yield (base / name).url
        elif part != "**" and fnmatch.fnmatchcase(name, part) and (info.is_directory or not rest):
            yield from _matches(base / name, rest)


def make_dirs(url: Url) -> None:
    """Make a directory and those above it; one that is there is fine."""
    place = place_of(url)
    place.store.make_dirs(place.path)


def mk_dir(url: Url) -> None:
    """Make a directory in one that is there."""
    place = place_of(url)
    above = os.path.dirname(place.path.rstrip("/"))
    if above and not Place(place.store, place.prefix, above).stat().is_directory:
        raise os_error(errno.ENOTDIR, place.url)
    if place.find() is not None:
        raise os_error(errno.EEXIST, place.url)
    place.store.make_dirs(place.path)


def remove(url: Url, recursive: bool = False) -> None:
    """Remove a file, or (`recursive`) a directory with all below it.

    A directory without `recursive`, and a file's name with a slash behind it, are left alone, with a line in the log.
    """
    place = place_of(url)
    try:
        is_directory = place.stat().is_directory
    except NotADirectoryError:
        log.warning("%r was not removed: it is a file, write it without the slash", place.url)
        return
    if not is_directory or recursive:
        place.store.remove(place.path, is_directory)
    else:
        log.warning("%r was not removed: it is a directory, write remove(url, recursive=True)", place.url)
