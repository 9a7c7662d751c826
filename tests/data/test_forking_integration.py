"""Processes that read end with what asked for them, and say so where they end before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from plait.data import forking
from plait.data.datasets import Dataset, column_source
from plait.data.forking import Forked
from plait.errors import DataError, FunctionError

SECONDS = 20.0


def children():
    found = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended in between
            found |= {int(pid) for pid in file.read_text().split()}
    return found


def running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # ended, and nobody has looked yet


def wait_until_ended(pids):
    until = time.monotonic() + SECONDS
    while any(map(running, pids)):
        assert time.monotonic() < until, f"of {pids}, some are still there"
        time.sleep(0.01)


@pytest.fixture
def echo():
    processes = Forked(lambda request: (os.getpid(), request), 2)
    yield processes
    processes.close()


def test_they_answer_many_at_once(echo):
    found = []
    threads = [threading.Thread(target=lambda n=n: found.append(echo.ask(n))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(number for _, number in found) == list(range(20))
    assert os.getpid() not in {pid for pid, _ in found}


def test_closing_ends_them():
    before = children()
    processes = Forked(lambda request: request, 3)
    assert len(children() - before) == 3
    processes.close()
    assert children() - before == set()


def test_one_that_does_not_listen_is_killed(monkeypatch):
    monkeypatch.setattr(forking, "END_SECONDS", 0.2)
    processes = Forked(time.sleep, 1)
    thread = threading.Thread(target=lambda: pytest.raises(DataError, processes.ask, 1000))
    thread.start()
    while not processes._idle.empty():
        time.sleep(0.01)
    begun = time.monotonic()
    processes.close()
    thread.join(SECONDS)
    assert time.monotonic() - begun < SECONDS
    assert not thread.is_alive()


def test_one_that_is_killed_is_named(echo):
    pid, _ = echo.ask(1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"was ended by signal 9; was there too little memory\?.*without reader_class"):
        [echo.ask(number) for number in range(2)]


def test_one_that_leaves_is_named():
    processes = Forked(os._exit, 1)
    with pytest.raises(DataError, match="has ended with exit code 3"):
        processes.ask(3)
    processes.close()


def test_an_interrupt_is_the_parents(echo):
    pid, _ = echo.ask(1)
    os.kill(pid, signal.SIGINT)
    assert {echo.ask(number)[1] for number in range(4)} == set(range(4))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_moment_of_forking_does_not_reach_the_program_in_the_child(number, monkeypatch):
    fork = os.fork

    def forked():
        pid = fork()
        if pid == 0:
            os.kill(os.getpid(), number)
        return pid

    monkeypatch.setattr(os, "fork", forked)
    processes = Forked(lambda request: request, 2)
    assert [processes.ask(each) for each in range(4)] == [0, 1, 2, 3]
    processes.close()


def test_a_fork_that_fails_is_named(monkeypatch):
    def failing():
        raise OSError(12, "Cannot allocate memory")

    lines = len(forking._ends)
    monkeypatch.setattr(os, "fork", failing)
    with pytest.raises(DataError, match="no process could be forked to read samples: Cannot allocate memory; lower"):
        Forked(lambda request: request, 2)
    assert len(forking._ends) == lines


def test_one_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setattr(forking, "ANSWER_SECONDS", 0.2)
    processes = Forked(time.sleep, 1)
    with pytest.raises(DataError, match="has not answered for 0 seconds and was ended: look for a function"):
        processes.ask(1000)
    processes.close()


def test_another_process_that_is_forked_keeps_none_alive():
    processes = Forked(lambda request: request, 2)
    pid = os.fork()
    if pid == 0:
        time.sleep(SECONDS)
        os._exit(0)
    begun = time.monotonic()
    processes.close()
    assert time.monotonic() - begun < forking.END_SECONDS
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_process_that_somebody_else_forked_ends_nobodys_readers(echo):
    pid = os.fork()
    if pid == 0:
        echo.end_soon()
        echo.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert {echo.ask(number)[1] for number in range(4)} == set(range(4))


def test_an_interrupt_while_one_is_forked_leaves_none(monkeypatch):
    fork, before = os.fork, children()

    def forked():
        pid = fork()
        if pid:
            signal.raise_signal(signal.SIGINT)
        return pid

    monkeypatch.setattr(os, "fork", forked)
    lines = len(forking._ends)
    with pytest.raises(KeyboardInterrupt):
        Forked(lambda request: request, 2)
    assert children() - before == set()
    assert len(forking._ends) == lines


def test_a_process_may_read_with_processes_of_its_own():
    def inner(count):
        processes = Forked(lambda request: request + 1, 1)
        try:
            return [processes.ask(number) for number in range(count)]
        finally:
            processes.close()

    processes = Forked(inner, 2)
    assert processes.ask(3) == [1, 2, 3]
    processes.close()


def test_sigterm_ends_one_whose_parent_is_gone_and_no_other(echo):
    pid, _ = echo.ask(1)
    os.kill(pid, signal.SIGTERM)
    assert {echo.ask(number)[1] for number in range(4)} == set(range(4))


def test_a_program_that_leaves_in_a_process_is_an_error():
    processes = Forked(lambda request: sys.exit("no data"), 1)
    with pytest.raises(DataError, match="SystemExit: no data"):
        processes.ask(1)
    processes.close()


def test_a_pass_with_processes_that_are_stuck_can_be_closed(monkeypatch):
    monkeypatch.setattr(forking, "END_SECONDS", 0.3)

    def stuck(number):
        if number >= 8:
            time.sleep(1000)
        return np.full(9000, number)

    dataset = Dataset("rows", 400, {"x": stuck}, readers=2, forks=True)
    batches = column_source(dict(dataset.columns)).batched(4).batches(0, 0)
    next(batches)
    begun = time.monotonic()
    batches.close()
    assert time.monotonic() - begun < SECONDS


def test_an_error_does_not_wait_for_those_that_are_stuck(monkeypatch):
    monkeypatch.setattr(forking, "END_SECONDS", 0.3)

    def stuck(number):
        if number == 5:
            time.sleep(1000)
        if number == 9:
            raise ValueError("wrong")
        return np.full(9000, number)

    dataset = Dataset("rows", 400, {"x": stuck}, readers=3, forks=True)
    begun = time.monotonic()
    with pytest.raises((DataError, FunctionError), match="wrong|did not answer"):
        list(column_source(dict(dataset.columns)).batched(4).batches(0, 2))
    assert time.monotonic() - begun < SECONDS


@pytest.mark.parametrize("end", ["close", "drop", "error"])
def test_a_pass_that_is_broken_off_leaves_none(end):
    dataset = Dataset("rows", 400, {"x": lambda number: np.full(9000, number)}, readers=2, forks=True)
    before = children()
    batches = column_source(dict(dataset.columns)).batched(4).batches(0, 0)
    assert children() - before == set()
    next(batches)
    assert len(children() - before) == 2
    if end == "close":
        batches.close()
    elif end == "error":
        with pytest.raises(ValueError, match="stop"):
            batches.throw(ValueError("stop"))
    else:
        del batches
    wait_until_ended(children() - before)


def killed_at_50(number):
    if number == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.zeros(9000)


def test_a_process_that_is_killed_ends_the_pass():
    dataset = Dataset("rows", 400, {"x": killed_at_50}, readers=2, forks=True)
    with pytest.raises(DataError, match="ended by signal 9"):
        list(column_source(dict(dataset.columns)).batched(4).batches(0, 0))


PARENT = """
import sys, time
import numpy as np
from plait.data.datasets import Dataset, column_source

def batches():
    dataset = Dataset("rows", 10**6, {"x": lambda number: np.full(9000, number)}, readers=3, forks=True)
    return column_source(dict(dataset.columns)).batched(4).batches(0, 0)

def started():
    found = batches()
    next(found)
    return found

first, second = started(), started()  # children of one know the lines of the other's
print("ready", flush=True)
if sys.argv[1] == "wait":
    time.sleep(1000)
"""


@pytest.mark.parametrize("end", ["wait", "end"])
def test_they_go_when_the_parent_goes(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script), end], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout.readline() == "ready\n"
            if end == "wait":
                found = Path("/proc").glob(f"{parent.pid}/task/*/children")
                ours = [int(pid) for file in found for pid in file.read_text().split()]
                assert len(ours) == 6
                parent.kill()
                wait_until_ended(ours)
            assert parent.wait(SECONDS) == (-9 if end == "wait" else 0)
            assert parent.stdout.read() == ""
        finally:
            parent.kill()
