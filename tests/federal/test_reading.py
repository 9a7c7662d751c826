"""Whoever waits reads; the stream's thread reads when nobody does, and looks after those who do."""

from __future__ import annotations

import queue
import threading

import pytest

from plait.federal import reading as module
from plait.federal.patience import Patience
from plait.federal.reading import Reading

SECONDS = 10.0


class Frames:
    """A stream: what is put comes out; an error is raised, None ends it."""

    def __init__(self):
        self.queue = queue.SimpleQueue()

    def __iter__(self):
        return self

    def __next__(self):
        found = self.queue.get(timeout=SECONDS)
        if found is None:
            raise StopIteration
        if isinstance(found, Exception):
            raise found
        return found


class Waiting:
    """Stands where a connection does."""

    def __init__(self):
        self.got = queue.SimpleQueue()
        self.readers, self.reasons, self.waiters, self.invitations, self.heard = [], [], 0, 0, 0.0

    def incoming(self, data):
        self.readers.append(threading.current_thread())
        if data == b"bad":
            raise ValueError("a bad frame")
        self.got.put(data)

    def invite(self):
        self.invitations += self.waiters > 0
        return self.waiters > 0

    def lost(self, reason):
        self.reasons.append(reason)


@pytest.fixture
def stream():
    """The frames, the connection, the reading and its thread; the stream is ended afterwards."""
    frames, connection, cancelled = Frames(), Waiting(), []

    def cancel():
        cancelled.append(True)
        frames.queue.put(RuntimeError("it was cut off"))

    reading = Reading(frames, connection, lambda error: f"it failed: {error}", cancel)
    thread = threading.Thread(target=reading.carry)
    thread.start()
    yield frames, connection, reading, thread
    frames.queue.put(None)
    thread.join(SECONDS)
    assert not thread.is_alive()


def patient(seconds=SECONDS):
    return Patience("leader", "follower", "a frame", seconds)


def take_turn(reading):
    for _ in range(2000):
        if reading.begin():
            return
        threading.Event().wait(0.001)
    raise AssertionError("the turn was never free")


def test_the_thread_of_the_stream_reads_when_nobody_waits(stream):
    frames, connection, _, thread = stream
    for data in (b"1", b"2", b"3"):
        frames.queue.put(data)
        assert connection.got.get(timeout=SECONDS) == data
    assert set(connection.readers) == {thread}
    assert connection.invitations == 0


def test_who_waits_reads_by_himself_after_an_invitation(stream):
    frames, connection, reading, _ = stream
    connection.waiters = 1
    frames.queue.put(b"1")  # the stream's thread waits for it already
    assert connection.got.get(timeout=SECONDS) == b"1"
    for data in (b"2", b"3"):
        take_turn(reading)
        frames.queue.put(data)
        reading.read(patient())
        assert connection.got.get_nowait() == data
        assert connection.readers[-1] is threading.current_thread()
    assert connection.invitations > 0


def test_an_error_ends_it_and_is_not_the_waiters(stream):
    frames, connection, reading, thread = stream
    connection.waiters = 1
    frames.queue.put(b"1")
    assert connection.got.get(timeout=SECONDS) == b"1"
    take_turn(reading)
    frames.queue.put(b"bad")
    reading.read(patient())
    thread.join(SECONDS)
    assert connection.reasons == ["it failed: a bad frame"]
    assert reading.reason == "it failed: a bad frame"
    assert not reading.begin()


def test_its_end_is_told_once(stream):
    frames, connection, reading, thread = stream
    frames.queue.put(None)
    thread.join(SECONDS)
    assert connection.reasons == ["the other party ended the stream"] == [reading.reason]


def test_a_wait_that_is_over_cuts_the_stream_off(stream):
    frames, connection, reading, thread = stream
    connection.waiters = 1
    frames.queue.put(b"1")
    assert connection.got.get(timeout=SECONDS) == b"1"
    take_turn(reading)
    reading.read(patient(seconds=0.1))  # nothing comes
    thread.join(SECONDS)
    assert connection.reasons == ["it failed: it was cut off"]


def test_a_long_wait_is_said_by_the_streams_thread(stream, caplog, monkeypatch):
    frames, connection, reading, _ = stream
    connection.waiters = 1
    frames.queue.put(b"1")
    assert connection.got.get(timeout=SECONDS) == b"1"
    take_turn(reading)
    waits = patient()
    monkeypatch.setattr(waits, "_note", 0.0)  # it is time
    with caplog.at_level("INFO", logger="plait"):
        reader = threading.Thread(target=reading.read, args=(waits,))
        reader.start()
        for _ in range(200):
            if caplog.records:
                break
            threading.Event().wait(module.REST_SECONDS)
        frames.queue.put(b"2")
        reader.join(SECONDS)
    assert "the leader waits for the follower (for a frame" in caplog.text
