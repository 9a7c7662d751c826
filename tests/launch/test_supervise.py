from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from plait.launch import supervise
from plait.launch.supervise import Failure, Group, Supervisor, caught_signals


class Fake:
    """A process that ends as a list says: an exit code a start, None for one that runs until it is told to end."""

    def __init__(self, kind, index, codes, *, stubborn=False):
        self.kind, self.index, self.log, self.began, self.ended = kind, index, Path("log"), 0, -index
        self.codes, self.stubborn = list(codes), stubborn
        self.notes, self.told, self.environs, self.code = [], [], [], 0

    def start(self, environ, note=""):
        self.environs.append(environ)
        self.notes.append(note)
        self.code = self.codes.pop(0)

    def tell(self, number):
        if self.code is None:
            self.told.append(number.name)
            if number == signal.SIGKILL or not self.stubborn:
                self.code = -number


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervise, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(supervise, "SERVER_SECONDS", 0.2)


def together(*children):
    return Group(children, lambda restart: [{"restart": restart}] * len(children))


def supervised(*groups, max_restarts=3, stopped=lambda: 0):
    said = []
    wait = lambda seconds: time.sleep(0.001)
    return Supervisor(groups, max_restarts, wait=wait, say=said.append, stopped=stopped).run(), said


def test_all_well():
    workers = [Fake("worker", index, [0]) for index in range(3)]
    assert supervised(together(*workers)) == (None, [])
    assert [worker.notes for worker in workers] == [[""]] * 3


def test_a_group_is_started_again_as_a_whole():
    first, second = Fake("worker", 0, [None, 0]), Fake("worker", 1, [5, 0])
    assert supervised(together(first, second)) == (None, [])
    assert first.told == ["SIGTERM"]
    note = "plait launch: restart 1 of 3: worker 1 ended with exit code 5"
    assert (first.notes, second.notes) == (["", note], ["", note])
    assert [environ["restart"] for environ in first.environs] == [0, 1]


def test_one_that_had_ended_well_is_started_again_with_its_group():
    first, second = Fake("worker", 0, [0, 0]), Fake("worker", 1, [-9, 0])
    assert supervised(together(first, second)) == (None, [])
    assert first.notes[1] == "plait launch: restart 1 of 3: worker 1 ended with SIGKILL"


def test_the_budget_is_the_groups():
    first, second = Fake("worker", 0, [1, None, 1]), Fake("worker", 1, [None, 1, None])
    failure, _ = supervised(together(first, second), max_restarts=2)
    assert failure == Failure(first, 1)
    assert second.told == ["SIGTERM", "SIGTERM"]


def test_each_process_with_a_group_of_its_own_has_its_own_budget():
    workers = [Fake("worker", index, [1, 1, 0]) for index in range(2)]
    server = Fake("server", 0, [-11, 2, 0])
    assert supervised(*map(together, [*workers, server]), max_restarts=2) == (None, [])


def test_a_process_without_restarts_left_ends_all():
    worker, other, server = Fake("worker", 0, [3, 4]), Fake("worker", 1, [None]), Fake("server", 0, [None])
    failure, _ = supervised(*map(together, [worker, other, server]), max_restarts=1)
    assert failure == Failure(worker, 4)
    assert failure.name == "worker 0"
    assert (other.told, server.told) == (["SIGTERM"], ["SIGTERM"])


def test_of_two_that_have_failed_the_first_is_named():
    later, first = Fake("worker", 0, [1]), Fake("worker", 1, [2])
    assert first.ended < later.ended
    failure, _ = supervised(together(later, first), max_restarts=0)
    assert failure == Failure(first, 2)


def test_who_does_not_heed_sigterm_is_killed():
    first, second = Fake("worker", 0, [None], stubborn=True), Fake("worker", 1, [1])
    supervised(together(first, second), max_restarts=0)
    assert first.told == ["SIGTERM", "SIGKILL"]


def test_servers_are_told_to_end_some_time_after_the_last_worker():
    worker, idle, done = Fake("worker", 0, [0]), Fake("server", 0, [None]), Fake("server", 1, [0])
    failure, said = supervised(*map(together, [worker, idle, done]))
    assert failure is None
    assert (idle.told, done.told) == (["SIGTERM"], [])
    assert said == ["plait launch: server 0: told to end 0.2 s after the last worker"]


def test_a_server_that_fails_after_the_last_worker_is_not_started_again():
    worker, server = Fake("worker", 0, [0]), Fake("server", 0, [1])
    assert supervised(together(worker), together(server), max_restarts=5) == (None, [])
    assert len(server.notes) == 1


def test_when_asked_to_stop_nothing_is_started_again():
    worker = Fake("worker", 0, [None])
    asked = iter([0] * 20)
    failure, _ = supervised(together(worker), stopped=lambda: next(asked, 1))
    assert failure is None
    assert worker.told == ["SIGTERM"]


def test_whoever_asks_twice_does_not_wait_for_the_time_of_grace(monkeypatch):
    monkeypatch.setattr(supervise, "GRACE_SECONDS", 60)
    worker = Fake("worker", 0, [None], stubborn=True)
    asked = iter([0, 1, 1, 1])
    supervised(together(worker), stopped=lambda: next(asked, 2))
    assert worker.told == ["SIGTERM", "SIGKILL"]


def test_an_error_while_starting_ends_those_that_run():
    class Broken(Fake):
        def start(self, environ, note=""):
            raise OSError("no more processes")

    first, second = Fake("worker", 0, [None]), Broken("worker", 1, [])
    with pytest.raises(OSError, match="no more processes"):
        supervised(together(first, second))
    assert (first.told, second.told) == (["SIGTERM"], [])


def test_signals_are_kept_and_handlers_put_back():
    before = signal.getsignal(signal.SIGTERM)
    noted = []
    with caught_signals(noted.append) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert noted == caught == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_was_ignored_stays_ignored_and_sigchld_does_not():
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGCHLD)]
    try:
        with caught_signals(lambda number: None) as caught:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert caught == []
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        for number, handler in zip((signal.SIGHUP, signal.SIGCHLD), before):
            signal.signal(number, handler)
