from __future__ import annotations

import pytest

from plait.cluster.ps.membership import Membership
from plait.errors import AbortedError, ClusterError

from .in_process import servers


@pytest.fixture
def member():
    with servers(2) as role:
        found = Membership(role, "sync", 5.0)
        yield found
        found.leave()


def test_every_join_in_step_begins_a_generation(member):
    member.join()
    first = member.generation
    member.join()
    assert member.generation == first + 1


def test_a_worker_belongs_when_the_servers_are_ready(member):
    member.join()
    assert not member.belongs()


def test_what_is_asked_of_an_old_generation_can_be_recovered_from(member):
    member.join()
    with pytest.raises(AbortedError, match="generation"):
        member.ask_all("dense")


def test_a_gather_of_one_worker_is_its_own_value(member):
    member.join()
    assert member.gather("one", {"a": 1}) == [{"a": 1}]


def test_a_gather_before_joining_says_what_to_do(member):
    with pytest.raises(ClusterError, match="has not joined yet; compile"):
        member.gather("early", 1)
