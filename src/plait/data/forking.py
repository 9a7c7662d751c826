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
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from plait import errors
from plait.data.parcels import pack, unpack
from plait.data.recycling import Block, unheld
from plait.errors import DataError, PlaitError
from plait.rng import derive_seed

__all__ = ["Forked", "SharedBlocks"]

END_SECONDS = 5.0
"""How long a process that nobody asks any more may take to notice, before it is killed."""
ANSWER_SECONDS = 300.0
"""How long one may take to answer: it may wait for a lock that a thread held when it was forked."""

_ends: set[Connection] = set()
"""This process's ends of the lines to its children."""
_line_lock = threading.Lock()
"""A process that is forked in between would keep an end of a line that is being made, or taken down."""


def _forget_lines() -> None:
    """In any process that is forked from this one: it must not keep another's line open."""
    for end in _ends:
        end.close()
    _ends.clear()


os.register_at_fork(after_in_child=_forget_lines)


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
    """Processes that answer `ask(request)` with `work(request)`, for as many threads at once as there are processes.

    What they draw from global generators comes from `seed` and their number.
    """

    def __init__(self, work: Callable[[Any], Any], count: int, seed: int = 0) -> None:
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._children: list[_Child] = []
        self._killing: threading.Timer | None = None
        # Python warns of threads, which may hold locks at this moment; hence `ANSWER_SECONDS`
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"plait\.data\.forking")
        try:
            for number in range(count):
                self._children.append(_forked(work, derive_seed(seed, "process", number)))
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

    def end_soon(self) -> None:
        """Nobody needs answers any more: those who still wait for one get an error after `END_SECONDS`."""
        if sys.is_finalizing():  # no thread can be started any more
            self._kill()
        elif self._killing is None:
            self._killing = threading.Timer(END_SECONDS, self._kill)
            self._killing.daemon = True
            self._killing.start()

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    def close(self) -> None:
        """End the processes. Whoever is asking one is answered, or told after `END_SECONDS`."""
        until = time.monotonic() + END_SECONDS
        for _ in self._children:
            try:
                child = self._idle.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self._kill()
                child = self._idle.get()
            child.hang_up()
        for child in self._children:
            child.wait(until)
        if self._killing is not None:
            self._killing.cancel()
            self._killing.join()


class _Child:
    def __init__(self, pid: int, line: Connection) -> None:
        self._pid, self._line = pid, line
        self._status: int | None = None
        self._lock = threading.Lock()
        """A process that was seen to end has no number any more, and another may get it."""

    def ask(self, request: Any) -> Any:
        try:
            self._line.send_bytes(pack(request))
            if not self._line.poll(ANSWER_SECONDS):
                self.kill()
                raise DataError(
                    f"a process that reads samples has not answered for {ANSWER_SECONDS:.0f} seconds and was ended:"
                    " look for a function of a column that waits, or leave reader_class=ForkedReader out"
                )
            well, answer = unpack(self._line.recv_bytes())
        except (EOFError, OSError) as error:
            raise DataError(self._end()) from error
        if not well:
            name, words, trace = answer
            raise getattr(errors, name, DataError)(words) from _InChildError(trace)
        return answer

    def _end(self) -> str:
        self.wait(time.monotonic() + END_SECONDS)
        code = os.waitstatus_to_exitcode(self._status or 0)
        how = f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        why = "; was there too little memory? Fewer num_readers take less" if code == -signal.SIGKILL else ""
        return f"a process that reads samples {how}{why}; without reader_class=ForkedReader, threads read"

    def hang_up(self) -> None:
        with _line_lock:
            self._line.close()
            _ends.discard(self._line)

    def kill(self) -> None:
        with self._lock:
            if self._status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)

    def wait(self, until: float) -> None:
        """See it end; it does by itself when its line is closed."""
        while not self._ended():
            if time.monotonic() > until:
                self.kill()
                until = float("inf")
            time.sleep(0.002)

    def _ended(self) -> bool:
        with self._lock:
            if self._status is None:
                try:
                    pid, status = os.waitpid(self._pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has seen it end
                    pid, status = self._pid, 0
                if pid:
                    self._status = status
            return self._status is not None


class _InChildError(Exception):
    """Where an error came from, in the child's own words."""

    def __str__(self) -> str:
        return f"in a process that reads samples:\n{self.args[0]}"


def _forked(work: Callable[[Any], Any], seed: int) -> _Child:
    _flush()  # or the child would write it again
    with _line_lock:
        ours, theirs = Pipe()
        _ends.add(ours)
        # an interrupt must not reach the child while it is still the program that it was forked from
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    _serve(work, theirs, seed, mask)
                finally:
                    os._exit(1)
        except OSError as error:
            ours.close()
            _ends.discard(ours)
            raise DataError(
                f"no process could be forked to read samples: {error.strerror}; lower num_readers, or leave"
                " reader_class=ForkedReader out"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
    return _Child(pid, ours)


_IGNORED = {signal.SIGINT, signal.SIGTERM}
"""What the parent answers: it needs its readers until it ends, and they end with it."""


def _serve(work: Callable[[Any], Any], line: Connection, seed: int, mask: Iterable[int]) -> NoReturn:
    """A child's life. It frees as little as it can of what it has from its parent: some of that may be on a GPU."""
    code = 1
    try:
        gc.freeze()
        for each in _IGNORED:
            signal.signal(each, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        torch.set_num_threads(1)  # OpenMP's threads are not forked
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - functions of users may draw from it
        torch.default_generator.manual_seed(seed)
        while True:
            answer = _answer(work, unpack(line.recv_bytes()))
            _flush()
            line.send_bytes(answer)
    except (EOFError, OSError):
        code = 0  # nobody asks any more
    finally:
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _answer(work: Callable[[Any], Any], request: Any) -> bytes:
    try:
        return pack((True, work(request)))
    except BaseException as error:  # noqa: BLE001 - whoever asked gets it
        ours = isinstance(error, PlaitError)
        words = str(error) if ours else f"{type(error).__name__}: {error}"
        return pack((False, (type(error).__name__ if ours else "DataError", words, traceback.format_exc())))
