"""`Pool`: multiplies points on all cores."""

from __future__ import annotations

import contextlib
import queue
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from plait.launch.environment import cores
from plait.psi import curve, native
from plait.psi.splitting import split

__all__ = ["Pool"]

FEW = 256
"""So many points are multiplied here and now: to hand them to a process takes longer."""

_ORDER = struct.Struct("<cQ")
_START = "import sys, runpy; sys.path.pop(0); runpy.run_path(sys.argv[1], run_name='__main__')"


class Pool:
    """Multiplies keys and points by one secret; close it.

    Intel's library computes outside of Python's lock, so threads do. `cryptography` holds that lock: then each thread
    has a process, which ends with this one, however it ends.
    """

    def __init__(self, secret: bytes, workers: int | None = None) -> None:
        self._secret = secret
        self.workers = workers or cores()
        self._native = native.load()
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="plait-psi")
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._processes: list[_Process] = []

    def blind(self, keys: Sequence[bytes]) -> Future[bytes]:
        """The multiples of the keys' points."""
        return self._threads.submit(self._blind, keys)

    def multiply(self, points: bytes) -> Future[bytes]:
        """The multiples of the other party's points; its result is a ValueError if one of them has a low order."""
        return self._threads.submit(self._multiply, points)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _blind(self, keys: Sequence[bytes]) -> bytes:
        if self._native is None and len(keys) > FEW:
            return self._ask(curve.BLIND, curve.pack(keys))
        points = b"".join([curve.hash_to_curve(key) for key in keys])
        return curve.multiply(self._secret, points) if self._native is None else self._native(self._secret, points)

    def _multiply(self, points: bytes) -> bytes:
        if self._native is not None:  # it errs near the prime; `plait.psi.splitting` says what that might tell
            first, second = split(self._secret)
            return self._native(second, self._native(first, points))
        if len(points) <= FEW * curve.POINT_BYTES:
            return curve.multiply(self._secret, points)
        return self._ask(curve.MULTIPLY, points)

    def _ask(self, kind: bytes, data: bytes) -> bytes:
        process = self._process()
        try:
            return process.ask(kind, data)
        finally:
            self._idle.put(process)

    def _process(self) -> _Process:
        """One that has nothing to do: there are never more than threads."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            made = _Process(self._secret)
            self._processes.append(made)
            return made


class _Process:
    """A process that multiplies. It ends when its input does, so also when this process is killed."""

    def __init__(self, secret: bytes) -> None:
        command = [sys.executable, "-c", _START, curve.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - ours
        assert self._process.stdin is not None  # noqa: S101 - both are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._orders, self._answers = self._process.stdin, self._process.stdout
        self._orders.write(secret)  # not on the command line, where everybody could read it

    def ask(self, kind: bytes, data: bytes) -> bytes:
        with contextlib.suppress(BrokenPipeError):  # then there is no answer
            self._orders.write(_ORDER.pack(kind, len(data)) + data)
            self._orders.flush()
        answered, size = _ORDER.unpack(self._read(_ORDER.size))
        if answered != kind:
            raise ValueError("a point has a low order")
        return self._read(int(size))

    def _read(self, size: int) -> bytes:
        """All of it: fewer points than were asked for would be taken for those of other rows."""
        data = self._answers.read(size)
        if len(data) < size:
            raise RuntimeError("a process that multiplies points has died: start again, and all that was done is kept")
        return data

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._answers.close()
        self._process.wait()
