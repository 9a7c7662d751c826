"""`Communicator`: two in one process, or over a connection."""

from __future__ import annotations

import time

import pytest

from plait import efl
from plait.errors import FederalError
from plait.federal import communicator as module
from plait.federal.communicator import Communicator
from plait.launch.environment import free_ports

from .channels import error_of, together

FACTS = {"job": "one"}


def opened(one, facts=FACTS):
    channel = one.connect(0, facts)
    channel.open()
    return channel


def test_a_pair_has_a_leader_and_a_follower_with_the_same_settings():
    leader, follower = efl.Communicator.pair(timeout=7.0, job="mine")
    assert (leader.role, follower.role) == ("leader", "follower")
    assert {one.party.job for one in (leader, follower)} == {"mine"}
    assert {one.party.timeout for one in (leader, follower)} == {7.0}


def test_there_is_no_channel_before_it_connects():
    leader, _ = Communicator.pair()
    assert not leader.connected
    with pytest.raises(FederalError, match=r"there is no connection to the other party yet: compile\(\) makes it"):
        _ = leader.channel


def test_a_pair_talks_and_ends():
    leader, follower = Communicator.pair(timeout=5.0)
    one, other = together(lambda: opened(leader), lambda: opened(follower))
    assert leader.connected
    assert leader.channel is one
    one.tell("a", 1)
    assert other.hear("a") == 1
    together(leader.close, follower.close)
    assert one.closed
    assert other.closed


def test_it_connects_once():
    leader, follower = Communicator.pair(timeout=5.0)
    together(lambda: opened(leader), lambda: opened(follower))
    assert leader.connect(0, {"job": "other"}) is leader.channel
    together(leader.close, follower.close)


def test_one_that_fails_tells_the_other():
    leader, follower = Communicator.pair(timeout=5.0)
    _, other = together(lambda: opened(leader), lambda: opened(follower))
    error, _ = together(lambda: error_of(lambda: other.hear("a"), FederalError), lambda: leader.fail("no more data"))
    assert str(error) == "the leader has ended with an error: no more data"
    follower.close()


def test_facts_that_differ_are_shown_at_both():
    leader, follower = Communicator.pair(timeout=5.0)
    errors = together(
        lambda: error_of(lambda: opened(leader), FederalError),
        lambda: error_of(lambda: opened(follower, {"job": "two"}), FederalError),
    )
    for error in errors:
        assert "job" in str(error)
        assert '"one"' in str(error)
        assert '"two"' in str(error)
    together(leader.close, follower.close)


def test_closing_is_possible_at_any_time_and_again():
    leader, follower = Communicator.pair(timeout=5.0)
    leader.close()
    leader.fail("nobody hears it")
    follower.connect(0, FACTS)
    follower.close()
    follower.close()


def test_what_is_open_at_the_end_of_the_process_is_closed():
    leader, follower = Communicator.pair(timeout=5.0)
    one, other = together(lambda: opened(leader), lambda: opened(follower))
    module._close_all()
    assert one.closed
    assert other.closed


def test_over_a_connection():
    (port,) = free_ports(1)
    leader = Communicator(efl.Party(role="leader", listen=f"127.0.0.1:{port}", timeout=10.0))
    follower = Communicator(efl.Party(role="follower", peer=f"127.0.0.1:{port}", timeout=10.0))
    try:
        one, other = together(lambda: opened(leader), lambda: opened(follower))
        other.tell("a", [1, "two"])
        assert one.hear("a") == [1, "two"]
    finally:
        begun = time.monotonic()
        together(leader.close, follower.close)
    assert time.monotonic() - begun < 5
