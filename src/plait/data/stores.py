"""Where files are: on this machine, or behind the S3 protocol; two stores with the same methods."""
# ruff: noqa: PTH103, PTH107, PTH114, PTH116, PTH118, PTH123, PTH202 - a slash at the end means something here, and Path drops it

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import shutil
import stat as modes
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from plait.atomic import atomic_path
from plait.errors import ConfigError

__all__ = ["LOCAL", "LocalStore", "Place", "S3Store", "Stat", "Url", "os_error", "place_of", "set_auth"]

Url = str | os.PathLike[str]

PART_BYTES = 8 << 20
"""Of an upload or download in parts. Sixteen threads with four parts each hold half a gigabyte."""
PARTS_AT_ONCE = 4
_MAX_PARTS = 10_000
_DELETE_AT_ONCE = 1000
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)

_auth: dict[str, Any] = {}


@dataclass(frozen=True)
class Stat:
    """What is known of a file or directory without opening it."""

    length: int
    mtime_nsec: int
    is_directory: bool


def os_error(number: int, path: str) -> OSError:
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
        return sorted(found)

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
                    raise os_error(errno.ENOTDIR, f"s3://{path}")
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
            raise os_error(errno.ENOENT, f"s3://{path}")
        return pages

    def _listed(self, path: str, delimiter: str) -> Iterator[tuple[str, Stat]]:
        """Names below `path`; those of directories end with a slash."""
        if not self.stat(path).is_directory:
            raise os_error(errno.ENOTDIR, f"s3://{path}")
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
            raise os_error(errno.EISDIR, f"s3://{path}")
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
            raise os_error(errno.EEXIST, f"s3://{path}")
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


LOCAL, _S3 = LocalStore(), S3Store()


def place_of(url: Url) -> Place:
    text = os.fspath(url)
    matched = _SCHEME.fullmatch(text)
    if matched is None:
        return Place(LOCAL, "", text)
    scheme, path = matched[1].lower(), matched[2]
    if scheme == "file":
        return Place(LOCAL, "file://", path)
    if scheme not in {"s3", "obs"}:
        raise ConfigError(f"{text!r} has the scheme {scheme!r}: write a path, or file://, s3:// or obs:// before it")
    if not path.partition("/")[0] or "?versionId=" in path:
        raise ConfigError(f"{text!r} names no object: write {scheme}://bucket/name, without a version")
    return Place(_S3, f"{scheme}://", path)
