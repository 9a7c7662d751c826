"""Work in forked processes, each with a Python lock of its own.

Threads that decode pictures wait for Python's lock at every step of the way: they keep half of 16 cores busy. What is
forked needs no importing and no pickling of functions. It never returns into the program that it was forked from.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import numpy as np
import torch

from plait import errors
from plait.data.parcels import pack, unpack
from plait.errors import DataError, PlaitError
from plait.rng import derive_seed

__all__ = ["Forked"]

END_SECONDS = 5.0
"""How long a process that nobody asks any more may take to notice, before it is killed."""
ANSWER_SECONDS = 300.0
"""How long one may take to answer: it may wait for a lock that a thread held when it was forked."""

_ends: set[Connection] = set()
"""This process's ends of lines: a process that is forked from it must not keep them open."""
_line_lock = threading.RLock()
"""Held while a line is made or taken down, or a process that is forked meanwhile would keep an end."""


def _forget_lines() -> None:
    """In any process that is forked from this one."""
    global _line_lock  # noqa: PLW0603 - whoever holds it is in the other process
    _line_lock = threading.RLock()
    for end in _ends:
        end.close()
    _ends.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lines)


class Forked:
    """Processes that answer `ask(request)` with `work(request)`, for as many threads at once as there are processes.

    What they draw from global generators comes from `seed` and their number.
    """

    def __init__(self, work: Callable[[Any], Any], count: int, seed: int = 0) -> None:
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._children: list[_Child] = []
        self._killing: threading.Timer | None = None
        self._owner = os.getpid()
        _expect_warning()
        try:
            for number in range(count):
                self._fork(work, derive_seed(seed, "process", number))
        except BaseException:
            self.close()
            raise

    def _fork(self, work: Callable[[Any], Any], seed: int) -> None:
        _flush()  # or the child would write it again
        with _line_lock:
            # an interrupt must not reach the child while it is still the program that it was forked from
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                self._children.append(_forked(work, seed, mask))
                self._idle.put(self._children[-1])
            except OSError as error:
                raise DataError(
                    f"no process could be forked to read samples: {error.strerror}; lower num_readers, or leave"
                    " reader_class=ForkedReader out"
                ) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # an interrupt that came is raised here

    def ask(self, request: Any) -> Any:
        child = self._idle.get()
        try:
            return child.ask(request)
        finally:
            self._idle.put(child)

    def end_soon(self) -> None:
        """Nobody needs answers any more: those who still wait for one get an error after `END_SECONDS`."""
        if os.getpid() != self._owner:
            return  # a process that was forked by somebody else, and has no readers
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
        if os.getpid() != self._owner:
            return
        until = time.monotonic() + END_SECONDS
        for _ in self._children:
            child = self._given_back(until) or self._given_back(until + END_SECONDS)
            if child is None:
                break  # whoever asked is gone; the process is, too
            child.hang_up()
        for child in self._children:
            child.wait(until)
        if self._killing is not None:
            self._killing.cancel()
            self._killing.join()

    def _given_back(self, until: float) -> _Child | None:
        try:
            return self._idle.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            self._kill()
            return None


class _Child:
    def __init__(self, pid: int, line: Connection) -> None:
        self._pid, self._line = pid, line
        self._ended: str | None = None
        """How, when it was seen to end: it has no number any more then, and another may get it."""
        self._killed = False
        self._lock = threading.Lock()

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
            self.wait(time.monotonic() + END_SECONDS)
            how = self._ended or "has ended"
            raise DataError(
                f"a process that reads samples {how}; without reader_class=ForkedReader, threads read"
            ) from error
        if not well:
            name, words, trace = answer
            raise getattr(errors, name, DataError)(words) from _InChildError(trace)
        return answer

    def hang_up(self) -> None:
        with _line_lock:
            self._line.close()
            _ends.discard(self._line)

    def kill(self) -> None:
        with self._lock:
            if self._ended is None:
                self._killed = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)

    def wait(self, until: float) -> None:
        """See it end; it does by itself when its line is closed. One that does not is killed, and soon given up."""
        for end in (until, until + END_SECONDS):
            while not self._has_ended():
                if time.monotonic() > end:
                    self.kill()
                    break
                time.sleep(0.002)

    def _has_ended(self) -> bool:
        with self._lock:
            if self._ended is None:
                try:
                    pid, status = os.waitpid(self._pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has seen it end
                    self._ended = "has ended"
                else:
                    self._ended = _how(os.waitstatus_to_exitcode(status), self._killed) if pid else None
            return self._ended is not None


def _how(code: int, killed: bool) -> str:
    if code >= 0:
        return f"has ended with exit code {code}"
    if code == -signal.SIGKILL and killed:
        return "was ended, since it did not answer"
    hint = "; was there too little memory? Fewer num_readers take less" if code == -signal.SIGKILL else ""
    return f"was ended by signal {-code}{hint}"


class _InChildError(Exception):
    """Where an error came from, in the child's own words."""

    def __str__(self) -> str:
        return f"in a process that reads samples:\n{self.args[0]}"


@functools.cache
def _expect_warning() -> None:
    """Of threads, which may hold locks when a process is forked; hence `ANSWER_SECONDS`."""
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"plait\.data\.forking")


def _forked(work: Callable[[Any], Any], seed: int, mask: Iterable[int]) -> _Child:
    ours, theirs = Pipe()
    _ends.add(ours)
    parent = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            try:
                _serve(work, theirs, seed, mask, parent)
            finally:
                os._exit(1)
    except BaseException:
        ours.close()
        _ends.discard(ours)
        raise
    finally:
        theirs.close()
    return _Child(pid, ours)


def _serve(work: Callable[[Any], Any], line: Connection, seed: int, mask: Iterable[int], parent: int) -> NoReturn:
    """A child's life. It frees as little as it can of what it has from its parent: some of that may be on a GPU."""
    code = 1
    try:
        gc.freeze()
        _ends.add(line)  # nor must those that a function of the user's forks keep it
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers, who needs its readers until it ends
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if os.getppid() != parent else None)
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
