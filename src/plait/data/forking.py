"""Work in forked processes, each with a Python lock of its own, and memory that they share with this one.

Threads that decode pictures wait for Python's lock at every step of the way: on 16 cores they keep nine busy. What is
forked needs no importing and no pickling of functions. It never returns into the program that it was forked from.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import queue
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from plait import errors
from plait.data.parcels import pack, unpack
from plait.data.recycling import Block, unheld
from plait.errors import DataError, PlaitError

__all__ = ["Forked", "SharedBlocks"]

END_SECONDS = 5.0
"""How long a process that nobody asks any more may take to notice, before it is killed."""

_ends: set[Connection] = set()
"""This process's ends of the lines to its children: a child that kept them open would keep others alive."""


class SharedBlocks:
    """Blocks of memory that processes forked later share. One is given out again once nobody holds it."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._blocks: list[Block] = [np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8) for _ in range(count)]
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, torch.Tensor] | None:
        """The number of a block and a tensor in it, which holds it; None if all are held."""
        with self._lock:
            for number in unheld(self._blocks):
                tensor = torch.from_numpy(self._blocks[number])
                break
            else:
                return None
        bytes_needed = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return number, tensor[:bytes_needed].view(dtype).view(tuple(shape))

    def array(self, number: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The same memory, in a child."""
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._blocks[number].data, dtype, count).reshape(tuple(shape))


class Forked:
    """Processes that answer `ask(request)` with `work(request)`, for as many threads at once as there are processes."""

    def __init__(self, work: Callable[[Any], Any], count: int) -> None:
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._children: list[_Child] = []
        try:
            for _ in range(count):
                self._children.append(_forked(work))
                self._idle.put(self._children[-1])
        except BaseException:
            self.close()
            raise

    def ask(self, request: Any) -> Any:
        child = self._idle.get()
        try:
            return child.ask(request)
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """End the processes; nobody may be asking."""
        for child in self._children:
            child.hang_up()
        until = time.monotonic() + END_SECONDS
        for child in self._children:
            child.wait(until)
        self._children = []


class _Child:
    def __init__(self, pid: int, line: Connection) -> None:
        self._pid, self._line = pid, line
        self._status: int | None = None

    def ask(self, request: Any) -> Any:
        try:
            self._line.send_bytes(pack(request))
            well, answer = unpack(self._line.recv_bytes())
        except (EOFError, OSError) as error:
            raise DataError(
                f"a process that reads samples {self._end()}; was there too little memory? Fewer num_readers take less,"
                " and without reader_class=ForkedReader threads read"
            ) from error
        if not well:
            name, words, trace = answer
            raise getattr(errors, name, DataError)(words) from _InChildError(trace)
        return answer

    def _end(self) -> str:
        self.wait(time.monotonic() + END_SECONDS)
        code = os.waitstatus_to_exitcode(self._status or 0)
        return f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"

    def hang_up(self) -> None:
        _ends.discard(self._line)
        self._line.close()

    def wait(self, until: float) -> None:
        """See it end; it does by itself when its line is closed."""
        while self._status is None:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has seen it end
                pid, status = self._pid, 0
            if pid:
                self._status = status
            elif time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
                until = float("inf")
            else:
                time.sleep(0.002)


class _InChildError(Exception):
    """Where an error came from, in the child's own words."""

    def __str__(self) -> str:
        return f"in a process that reads samples:\n{self.args[0]}"


def _forked(work: Callable[[Any], Any]) -> _Child:
    ours, theirs = Pipe()
    _ends.add(ours)
    # Python warns of threads that hold locks: what a child does takes none that they may hold
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"plait\.data\.forking")
    pid = os.fork()
    if pid == 0:
        _serve(work, theirs)
    theirs.close()
    return _Child(pid, ours)


def _serve(work: Callable[[Any], Any], line: Connection) -> NoReturn:
    """A child's life. It frees nothing that it has from its parent: some of that may be on a GPU."""
    code = 1
    try:
        gc.freeze()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for end in _ends:
            end.close()
        torch.set_num_threads(1)
        while True:
            line.send_bytes(_answer(work, unpack(line.recv_bytes())))
    except (EOFError, OSError):
        code = 0  # nobody asks any more
    finally:
        os._exit(code)


def _answer(work: Callable[[Any], Any], request: Any) -> bytes:
    try:
        return pack((True, work(request)))
    except Exception as error:  # noqa: BLE001 - whoever asked gets it
        ours = isinstance(error, PlaitError)
        words = str(error) if ours else f"{type(error).__name__}: {error}"
        return pack((False, (type(error).__name__ if ours else "DataError", words, traceback.format_exc())))
