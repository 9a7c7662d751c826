from __future__ import annotations

import threading
import time

import pytest

from plait.federal.loopback import join
from plait.federal.wire import Kind, decode

from .channels import make, pair, together


def test_words_go_both_ways():
    with pair() as (leader, follower, _):
        leader.tell("a", {"x": [1, None]})
        follower.tell("a", "y")
        assert follower.hear("a") == {"x": [1, None]}
        assert leader.hear("a") == "y"


def test_frames_are_real_ones():
    seen = []

    def watch(sender, data):
        seen.append((sender, decode(data).kind))
        return [data]

    with pair(watch) as (leader, follower, _):
        leader.tell("a", 1)
        follower.hear("a")
    assert seen.index(("leader", Kind.HELLO)) < seen.index(("leader", Kind.WORD))
    assert ("follower", Kind.BYE) in seen or ("leader", Kind.BYE) in seen


def test_nothing_arrives_while_the_link_is_cut():
    with pair() as (leader, follower, link):
        link.cut()
        leader.tell("a", 1)
        time.sleep(0.1)
        assert follower.look("a") is None
        link.restore()
        assert follower.hear("a") == 1


def test_a_connection_that_breaks_is_made_anew():
    broken = []

    def break_once(sender, data):
        if decode(data).kind == Kind.WORD and not broken:
            broken.append(1)
            return None
        return [data]

    with pair(break_once) as (leader, follower, _):
        leader.tell("a", 1)
        assert follower.hear("a") == 1
    assert broken


def test_the_threads_end_when_both_channels_are_closed():
    leader, follower = make(), make("follower", "leader")
    before = threading.active_count()
    join(leader, follower)
    together(leader.open, follower.open)
    assert threading.active_count() == before + 2
    together(leader.close, follower.close)
    until = time.monotonic() + 2.0
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize("opened", [False, True])
def test_close_ends_the_threads_whatever_the_channels_do(opened):
    leader, follower = make(), make("follower", "leader")
    before = threading.active_count()
    link = join(leader, follower)
    if opened:
        together(leader.open, follower.open)
    link.close()
    assert threading.active_count() == before
