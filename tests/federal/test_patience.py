from __future__ import annotations

import logging
import re
import time

import pytest

from plait.federal import patience
from plait.federal.patience import Patience


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(time, "monotonic", lambda: Clock.now)
    return Clock


def make(timeout=600.0):
    return Patience("leader", "follower", "'hidden' of step 12", timeout)


def test_a_silent_peer_is_waited_for_as_long_as_the_timeout(clock):
    wait = make()
    clock.now += 599
    assert not wait.is_over(None)
    clock.now += 1
    assert wait.is_over(None)
    assert wait.is_over(900.0)


def test_a_peer_that_is_heard_is_waited_for_longer_and_not_for_ever(clock):
    wait = make()
    for _ in range(9):
        clock.now += 599
        assert not wait.is_over(clock.now)
    clock.now += 609
    assert wait.is_over(clock.now)


def test_what_was_heard_before_the_wait_does_not_shorten_it(clock):
    wait = make()
    assert not wait.is_over(1.0)


def test_a_sleep_ends_with_the_next_note_or_the_wait(clock):
    assert make().seconds(None) == patience.FIRST_NOTE
    assert make(2.0).seconds(None) == 2.0


def test_the_log_says_who_waits_for_whom_for_what_since_when(clock, caplog):
    caplog.set_level(logging.INFO, "plait")
    wait = make()
    told = []
    for second in range(200):
        clock.now = 1000.0 + second
        wait.note()
        if len(caplog.records) > len(told):
            told.append(second)
    assert told == [5, 65, 125, 185]
    expected = r"the leader waits for the follower \(for 'hidden' of step 12, since \d\d:\d\d:\d\d\)"
    assert re.fullmatch(expected, caplog.messages[0])


@pytest.mark.parametrize(
    ("heard", "waiting", "end"),
    [
        (None, 0, r"never heard\): start the follower, and see that the two can reach each other"),
        (1000.0, 0, r"last heard at \d\d:\d\d:\d\d\): it fell silent, see its log; timeout=600 is how long .*"),
        (6999.0, 0, r"last heard at \d\d:\d\d:\d\d\): it is there, and does something else, see its log"),
        (6999.0, 9, r".* see its log; 9 bytes of other messages from it wait to be taken"),
    ],
)
def test_the_error_says_it_too(clock, heard, waiting, end):
    wait = make()
    clock.now += 600 if heard != 6999.0 else 6000
    begin = r"the leader waited (600|6000) s for the follower \(for 'hidden' of step 12, since \d\d:\d\d:\d\d; "
    assert re.fullmatch(begin + end, wait.text(heard, waiting))
