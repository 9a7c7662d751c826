"""Whole files as bytes: read by the readers' own threads, or by processes; kept in a cache directory or not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from plait.atomic import atomic_path
from plait.data import stores
from plait.data.stores import LOCAL, place_of
from plait.errors import ConfigError, DataError

__all__ = [
    "MAX_FILE_BYTES",
    "AsyncRawGenerator",
    "Cache",
    "ForkedReader",
    "ParallelReader",
    "Reader",
    "read_file",
    "read_local",
    "serve",
    "temporary_cache",
]

MAX_FILE_BYTES = 1 << 30
"""A larger file is refused before memory is taken for it."""
_LENGTH = struct.Struct("<q")
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for its writer
_ANSWER_SECONDS = 300
"""A reader process that takes longer for one file is ended."""
# packages without their contents: all of plait, and torch, would cost each process seconds and 200 MB
_CHILD = """
import sys, types
for name, path in (("plait", sys.argv[1]), ("plait.data", sys.argv[2])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from plait.data.raw import serve
serve()
"""


class Reader(Protocol):
    """What `reader_class` makes: `reader_class(num_readers, **reader_kwargs)`. Many threads ask it at once."""

    def read(self, url: str) -> bytes:
        """All that is in a file."""

    def close(self) -> None:
        """End what it started."""


def read_file(url: str) -> bytes:
    """All that is in a file, local or on s3://."""
    place = place_of(url)
    if place.store is LOCAL:
        return read_local(place.path)
    try:
        size = place.store.stat(place.path).length
        _check_size(url, size)
        with place.store.open(place.path) as file:
            return file.read()
    except OSError as error:
        raise _unreadable(url, error) from error


def read_local(path: str) -> bytes:
    """All that is in a file of this machine."""
    try:
        return _read_whole(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(url: str, error: OSError) -> DataError:
    return DataError(f"{url!r} cannot be read: {error.strerror or error}; was it moved or removed?")


def _read_whole(path: str) -> bytes:
    # four system calls; a Python file object costs twice as much, which shows with small pictures
    descriptor = os.open(path, _FLAGS)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"{path!r} cannot be read: it is a directory, a pipe or a device, not a file")
        size = facts.st_size
        _check_size(path, size)
        data = os.read(descriptor, size)
        while len(data) < size:
            more = os.read(descriptor, size - len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(descriptor)


def _check_size(url: str, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise DataError(f"{url!r} has {size} bytes, more than the {MAX_FILE_BYTES} that a sample may have")


class ParallelReader:
    """Reads where it is asked: in the threads of the data set's readers."""

    def __init__(self, num_readers: int) -> None:
        del num_readers

    def read(self, url: str) -> bytes:
        return read_file(url)

    def close(self) -> None:
        pass


class ForkedReader(ParallelReader):
    """Reads where it is asked: in processes, `num_readers` of them, which also decode and apply the columns.

    On 16 cores nearly twice as fast as threads, which wait for Python's lock. The processes are forked: functions of
    yours see what was there when a pass began, cannot use a GPU, and what they change is changed in their process only.
    """

    def __init__(self, num_readers: int) -> None:
        super().__init__(num_readers)
        if not hasattr(os, "fork"):
            raise ConfigError("reader_class=ForkedReader needs a system that can fork processes: leave it out")


class AsyncRawGenerator:
    """Reads in `num_readers` processes of their own: for object stores, whose client keeps Python busy.

    They are started anew, not forked, and never import the script that asked for them.
    """

    def __init__(self, num_readers: int) -> None:
        if num_readers < 1:
            raise ConfigError(f"num_readers={num_readers}: write a whole number from 1 on")
        self._idle: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = weakref.finalize(self, _end, self._processes)
        try:
            self._start(num_readers)
        except BaseException:
            self._ended()
            raise

    def _start(self, num_readers: int) -> None:
        for _ in range(num_readers):
            self._processes.append(_started())
        for process in self._processes:
            # the child asks the store as we do; no error may show what with
            _ask(process, json.dumps(stores._auth), "while it started")  # noqa: SLF001 - the same room
            self._idle.put(process)

    def read(self, url: str) -> bytes:
        process = self._idle.get()
        try:
            return _ask(process, url, f"while it read {url!r}")
        finally:
            self._idle.put(process)

    def close(self) -> None:
        self._ended()


def _started() -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    command = [sys.executable, "-c", _CHILD, str(here.parent), str(here)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - our own


def _ask(process: subprocess.Popen[bytes], text: str, when: str) -> bytes:
    assert process.stdin is not None  # noqa: S101 - made with pipes
    assert process.stdout is not None  # noqa: S101 - same
    watch = threading.Timer(_ANSWER_SECONDS, process.kill)
    watch.daemon = True
    watch.start()
    try:
        _send(process.stdin, text.encode(errors="surrogatepass"), 0)
        kind, data = _receive(process.stdout)
    except (OSError, EOFError) as error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)  # its pipes close a moment before it has ended
        raise DataError(
            f"a reader process ended (exit code {process.poll()}) {when}; was it killed for memory, or silent for"
            f" {_ANSWER_SECONDS} seconds?"
        ) from error
    except BaseException:
        process.kill()  # what is left of this answer must not be taken for the next
        raise
    finally:
        watch.cancel()
    if kind:
        raise DataError(data.decode())
    return data


def _send(stream: IO[bytes], data: bytes, kind: int) -> None:
    stream.write(_LENGTH.pack(len(data)) + bytes([kind]))
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[int, bytes]:
    head = stream.read(_LENGTH.size + 1)
    if len(head) < _LENGTH.size + 1:
        raise EOFError
    (length,) = _LENGTH.unpack(head[:-1])
    if not 0 <= length <= MAX_FILE_BYTES:
        raise EOFError
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return head[-1], data


def serve() -> None:
    """A reader process: names come in on standard input, files go out on standard output, until the input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints must not get among the files
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        stores._auth.update(json.loads(_receive(requests)[1]))  # noqa: SLF001 - the same room
        _send(answers, b"", 0)
        while True:
            url = _receive(requests)[1].decode(errors="surrogatepass")
            try:
                kind, data = 0, read_file(url)
            except Exception as error:  # noqa: BLE001 - the one who asked gets it
                kind, data = 1, str(error).encode(errors="replace")
            _send(answers, data, kind)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    for process in processes:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


class Cache:
    """Copies of files in a directory; a file is fetched once, and there whole or not at all.

    `directory` 'ENV' is the one that `DLS_LOCAL_CACHE_PATH` names. With `remove`, what this process fetched goes when
    the data set goes.
    """

    def __init__(self, directory: str, *, remove: bool) -> None:
        if directory == "ENV":
            directory = os.environ.get("DLS_LOCAL_CACHE_PATH", "")
            if not directory:
                raise ConfigError("cache_dir='ENV' is the directory in DLS_LOCAL_CACHE_PATH, which is not set: set it")
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cache_dir={directory!r} cannot be made ({error.strerror}): give a directory") from error
        self.fetched: list[Path] = []
        if remove:
            self._removed = weakref.finalize(self, _remove, self.fetched)

    def path_of(self, url: str) -> Path:
        """Where the copy of a file is, or would be; it belongs to the whole path, wherever the program was started."""
        place = place_of(url)
        whole = os.path.abspath(place.path) if place.store is LOCAL else url  # noqa: PTH100 - links stay links
        return self.directory / hashlib.sha256(whole.encode(errors="surrogatepass")).hexdigest()[:32]

    def get(self, url: str, read: Callable[[str], bytes]) -> bytes:
        """The file's bytes: from the copy, or read and copied."""
        path = self.path_of(url)
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes()
        data = read(url)
        with atomic_path(path, sync=False) as temporary:
            temporary.write_bytes(data)
        self.fetched.append(path)
        return data

    def local(self, url: str) -> str:
        """The path of a copy, made piece by piece if there is none."""
        place, path = place_of(url), self.path_of(url)
        if path.exists():
            return str(path)
        try:
            with (
                place.store.open(place.path) as source,
                atomic_path(path, sync=False) as temporary,
                temporary.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 8 << 20)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{url!r} cannot be copied to {str(self.directory)!r}: {reason}; look at both") from error
        self.fetched.append(path)
        return str(path)


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
        path.with_name(f".{path.name}.index").unlink(missing_ok=True)  # where the records of a copy begin


def temporary_cache() -> Cache:
    """A cache that goes when it is no longer used."""
    directory = tempfile.mkdtemp(prefix="plait-cache-")
    cache = Cache(directory, remove=True)
    weakref.finalize(cache, shutil.rmtree, directory, ignore_errors=True)
    return cache
