"""Files on local paths, `file://`, `s3://` and `obs://` (which is the same as `s3://`), with one set of functions.

A url is taken as it is written: nothing in it is decoded or expanded. An object store has no directories of its own:
there, a directory is what has something below it, or what `make_dirs` marked by an empty object `name/`.
"""
# ruff: noqa: PTH103, PTH107, PTH114, PTH116, PTH118, PTH120, PTH123, PTH202 - a slash at the end means something here, and Path drops it

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import io
import json
import logging
import os
import re
import shutil
import stat as modes
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from plait.atomic import atomic_path
from plait.errors import ConfigError

__all__ = [
    "Entry", "File", "Place", "S3Store", "Stat", "Url", "append", "exists", "get_size", "glob", "is_directory",
    "list_directory", "make_dirs", "mk_dir", "place_of", "read", "remove", "scan_dir", "set_auth", "stat", "walk",
    "write",
]  # fmt: skip

Url = str | os.PathLike[str]

PART_BYTES = 8 << 20
"""Of an upload or download in parts. Sixteen threads with four parts each hold half a gigabyte."""
PARTS_AT_ONCE = 4
_MAX_PARTS = 10_000
_DELETE_AT_ONCE = 1000
_MODES = {kind + rest for kind in "rwa" for rest in ("", "b", "+", "b+", "+b", "t", "t+", "+t")}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)

_auth: dict[str, Any] = {}
log = logging.getLogger("plait")


@dataclass(frozen=True)
class Stat:
    """What is known of a file or directory without opening it."""

    length: int
    mtime_nsec: int
    is_directory: bool


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


def _error(number: int, path: str) -> OSError:
    """FileNotFoundError and the like, with the system's own words."""
    return OSError(number, os.strerror(number), path)


class LocalStore:
    """The files of this machine. Paths have no scheme; errors are those of Python's `open`."""

    def stat(self, path: str) -> Stat:
        return self._as_stat(os.stat(path))

    def scan(self, path: str) -> list[tuple[str, Stat]]:
        """Names and facts of what is in a directory, by name."""
        with os.scandir(path) as entries:
            return sorted((entry.name, self._entry_stat(entry)) for entry in entries)

    def tree(self, path: str, *, above: tuple[str, ...] = ()) -> list[tuple[str, Stat]]:
        """The same with all that lies below it."""
        above = (*above, os.path.realpath(path))
        found: list[tuple[str, Stat]] = []
        for name, info in self.scan(path):
            found.append((name, info))
            inner = os.path.join(path, name)
            # links are followed, data often hangs on them; but not in circles
            if info.is_directory and os.path.realpath(inner) not in above:
                found += [(f"{name}/{below}", below_info) for below, below_info in self.tree(inner, above=above)]
        return found

    def open(self, path: str) -> IO[bytes]:
        return open(path, "rb")

    @contextlib.contextmanager
    def edit(self, path: str, keep: bool) -> Iterator[Path]:
        """A local file to write into, with what is there if `keep`; the end of the block brings it to its place."""
        target = Path(os.path.realpath(path))
        # what is no plain file (a pipe, a terminal) is written into, never replaced
        if target.exists() and (keep or not (target.is_file() or target.is_dir())):
            yield target
            return
        with atomic_path(target) as temporary:
            yield temporary

    def make_dirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def remove(self, path: str, is_directory: bool) -> None:
        if is_directory and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)

    @staticmethod
    def _as_stat(result: os.stat_result) -> Stat:
        is_directory = modes.S_ISDIR(result.st_mode)
        return Stat(0 if is_directory else result.st_size, result.st_mtime_ns, is_directory)

    def _entry_stat(self, entry: os.DirEntry[str]) -> Stat:
        try:
            return self._as_stat(entry.stat())
        except OSError:  # a link that leads nowhere is still an entry
            return self._as_stat(entry.stat(follow_symlinks=False))


class S3Store:
    """Objects behind the S3 protocol; paths are `bucket/key`. What it does is what LocalStore does."""

    @property
    def client(self) -> Any:
        environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
        return _connect(os.getpid(), environment, json.dumps(_auth, sort_keys=True))

    def head(self, path: str, **arguments: Any) -> dict[str, Any]:
        bucket, _, key = path.partition("/")
        answer: dict[str, Any] = self.client.call_s3("head_object", Bucket=bucket, Key=key, **arguments)
        return answer

    def stat(self, path: str) -> Stat:
        if "/" in path.rstrip("/"):
            with contextlib.suppress(FileNotFoundError):
                head = self.head(path.rstrip("/"))
                if path.endswith("/"):
                    raise _error(errno.ENOTDIR, f"s3://{path}")
                return Stat(head["ContentLength"], _nanoseconds(head["LastModified"]), is_directory=False)
        self._pages(path, limit=1)
        return Stat(0, 0, is_directory=True)

    def _pages(self, path: str, *, delimiter: str = "", limit: int = 0) -> list[dict[str, Any]]:
        """All answers about what begins with `path/`; a directory that has none does not exist."""
        bucket, _, key = path.rstrip("/").partition("/")
        arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": key and f"{key}/", "Delimiter": delimiter}
        if limit:
            arguments["MaxKeys"] = limit
        pages: list[dict[str, Any]] = []
        while not pages or (not limit and pages[-1].get("IsTruncated")):
            pages.append(self.client.call_s3("list_objects_v2", **arguments))
            arguments["ContinuationToken"] = pages[-1].get("NextContinuationToken")
        if key and not any(page.get("Contents") or page.get("CommonPrefixes") for page in pages):
            raise _error(errno.ENOENT, f"s3://{path}")
        return pages

    def _listed(self, path: str, delimiter: str) -> Iterator[tuple[str, Stat]]:
        """Names below `path`; those of directories end with a slash."""
        if not self.stat(path).is_directory:
            raise _error(errno.ENOTDIR, f"s3://{path}")
        _, _, key = path.rstrip("/").partition("/")
        start = len(key) + 1 if key else 0
        for page in self._pages(path, delimiter=delimiter):
            for thing in page.get("CommonPrefixes", []):
                yield thing["Prefix"][start:], Stat(0, 0, is_directory=True)
            for thing in page.get("Contents", []):
                name, modified = thing["Key"][start:], _nanoseconds(thing["LastModified"])
                yield name, Stat(thing["Size"], modified, is_directory=name.endswith("/") or not name)

    def scan(self, path: str) -> list[tuple[str, Stat]]:
        # the directory's own mark has no name, nor has what stands behind a double slash
        found = {name.rstrip("/"): info for name, info in self._listed(path, "/") if name.rstrip("/")}
        return sorted(found.items())

    def tree(self, path: str) -> list[tuple[str, Stat]]:
        found: dict[str, Stat] = {}
        for name, info in self._listed(path, ""):
            for end in (place for place, letter in enumerate(name) if letter == "/" and place):
                found.setdefault(name[:end], Stat(0, 0, is_directory=True))
            if not info.is_directory:
                found[name] = info
        return sorted(found.items())

    def open(self, path: str) -> IO[bytes]:
        if self.stat(path).is_directory:
            raise _error(errno.EISDIR, f"s3://{path}")
        stream: IO[bytes] = self.client.open(path, "rb", block_size=PART_BYTES)
        return stream

    @contextlib.contextmanager
    def edit(self, path: str, keep: bool) -> Iterator[Path]:
        """A temporary file of this machine: an object cannot be changed in place, and is never there in part."""
        handle, name = tempfile.mkstemp(prefix="plait-", suffix=".tmp")
        os.close(handle)
        try:
            if keep and Place(self, "s3://", path).find() is not None:
                self.download(path, name)
            yield Path(name)
            self.upload(name, path)
        finally:
            os.remove(name)

    def upload(self, local: str, path: str) -> None:
        part = max(PART_BYTES, -(-os.path.getsize(local) // _MAX_PARTS))
        self.client.put_file(local, path, chunksize=part, max_concurrency=PARTS_AT_ONCE)

    def download(self, path: str, local: str) -> None:
        self.client.get_file(path, local, chunksize=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def make_dirs(self, path: str) -> None:
        if "/" not in path.rstrip("/"):
            self.stat(path)  # a bucket is there or is not: making one is not ours
            return
        there = Place(self, "s3://", path.rstrip("/")).find()
        if there is not None and not there.is_directory:
            raise _error(errno.EEXIST, f"s3://{path}")
        self.client.pipe_file(f"{path.rstrip('/')}/", b"")

    def remove(self, path: str, is_directory: bool) -> None:
        if not is_directory:
            self.client.rm_file(path)
            return
        bucket = path.partition("/")[0]
        keys = [{"Key": thing["Key"]} for page in self._pages(path) for thing in page.get("Contents", [])]
        for start in range(0, len(keys), _DELETE_AT_ONCE):
            batch = {"Objects": keys[start : start + _DELETE_AT_ONCE], "Quiet": True}
            answer = self.client.call_s3("delete_objects", Bucket=bucket, Delete=batch)
            for failed in answer.get("Errors", []):
                raise OSError(errno.EIO, f"not removed, {failed.get('Message')}", f"s3://{bucket}/{failed.get('Key')}")


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * 10**9 + moment.microsecond * 1000


@functools.lru_cache(maxsize=4)
def _connect(process: int, environment: tuple[tuple[str, str], ...], auth: str) -> Any:  # noqa: ARG001 - what it is for
    """The client of this process for these settings: a forked process, or new settings, get another."""
    import fsspec  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415 - slow, and only for s3

    try:
        # listings are never cached: others write too
        return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True, **json.loads(auth))
    except ImportError as error:
        raise ConfigError("files on s3:// need s3fs, which is not installed: `pip install 'plait[s3]'`") from error


def set_auth(
    ak: str | None = None,
    sk: str | None = None,
    server: str | None = None,
    port: int | None = None,
    is_secure: bool = True,
    ssl_verify: bool = True,
    path_style: bool | None = None,
    retry: int | None = None,
    client_timeout: float | None = None,
) -> None:
    """Where `s3://` is, and who asks; what is None comes from the environment (`AWS_ACCESS_KEY_ID`, ...).

    Each call replaces the one before; `set_auth()` goes back to the environment alone.
    """
    config: dict[str, Any] = {}
    if path_style is not None:
        config["s3"] = {"addressing_style": "path" if path_style else "virtual"}
    if retry is not None:
        config["retries"] = {"max_attempts": retry}
    if client_timeout is not None:
        config |= {"connect_timeout": client_timeout, "read_timeout": client_timeout}
    settings: dict[str, Any] = {"key": ak, "secret": sk, "endpoint_url": _endpoint(server, port, is_secure)}
    settings |= {"config_kwargs": config or None, "client_kwargs": None if ssl_verify else {"verify": False}}
    _auth.clear()
    _auth.update({name: value for name, value in settings.items() if value is not None})


def _endpoint(server: str | None, port: int | None, is_secure: bool) -> str | None:
    if server is None and port is not None:
        raise ConfigError(f"set_auth got port={port} without a server: write set_auth(server='host', port={port})")
    if server is None:
        return None
    address = server if "://" in server else f"{'https' if is_secure else 'http'}://{server}"
    return address if port is None else f"{address}:{port}"


@dataclass(frozen=True)
class Place:
    """A url, taken apart."""

    store: LocalStore | S3Store
    prefix: str
    """What stands before the path in the url: nothing, or `s3://` and the like."""
    path: str

    @property
    def url(self) -> str:
        return self.prefix + self.path

    def __truediv__(self, name: str) -> Place:
        separator = "" if not self.path or self.path.endswith("/") else "/"
        return Place(self.store, self.prefix, f"{self.path}{separator}{name}")

    def stat(self) -> Stat:
        return self.store.stat(self.path)

    def find(self) -> Stat | None:
        """As `stat`, and None if there is nothing."""
        try:
            return self.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None


_LOCAL, _S3 = LocalStore(), S3Store()


def place_of(url: Url) -> Place:
    text = os.fspath(url)
    matched = _SCHEME.fullmatch(text)
    if matched is None:
        return Place(_LOCAL, "", text)
    scheme, path = matched[1].lower(), matched[2]
    if scheme == "file":
        return Place(_LOCAL, "file://", path)
    if scheme not in {"s3", "obs"}:
        raise ConfigError(f"{text!r} has the scheme {scheme!r}: write a path, or file://, s3:// or obs:// before it")
    if not path.partition("/")[0] or "?versionId=" in path:
        raise ConfigError(f"{text!r} names no object: write {scheme}://bucket/name, without a version")
    return Place(_S3, f"{scheme}://", path)


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
            raise _error(errno.ENOENT, place.url)
        if (there is not None and there.is_directory) or place.path.endswith("/"):
            raise _error(errno.EISDIR, place.url)
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
    bucket = "" if place.store is _LOCAL else place.path.partition("/")[0] + "/"
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
        raise _error(errno.ENOTDIR, place.url)
    if place.find() is not None:
        raise _error(errno.EEXIST, place.url)
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
