from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import FederalError, UnavailableError
from plait.federal.connection import Connection
from plait.federal.hello import read_hello
from plait.federal.session import Session, State
from plait.federal.wire import FrameError, Kind, decode


def make(own="leader", peer="follower"):
    """A session whose lock is held: these tests have one thread."""
    session = Session(own, peer, {}, 1000, checksum=False)
    session.lock.acquire()
    return session


class Table:
    """Two sessions and the HELLOs between them, moved by hand."""

    def __init__(self):
        self.parties = [self.make(0), self.make(1)]
        self.wires = [deque(), deque()]
        self.connect()

    def make(self, who):
        names = ("leader", "follower")
        return make(names[who], names[1 - who])

    def connect(self):
        """A new connection; what was under way is lost."""
        for party, wire in zip(self.parties, self.wires, strict=True):
            wire.clear()
            party.connection = Connection(party, 1.0)
            self.speak(party)

    def speak(self, party):
        if party.connection is not None and party.connection.greet:
            party.connection.greet = False
            self.wires[self.parties.index(party)].append(party.say_hello())

    def open(self, who):
        self.parties[who].begin()
        self.speak(self.parties[who])

    def restart(self, who):
        """A new process in the place of one; its connection is new as well."""
        self.parties[who] = self.make(who)
        self.connect()

    def deliver(self, who):
        """One HELLO of a party's arrives."""
        if self.wires[who]:
            party = self.parties[1 - who]
            party.hello = read_hello(decode(self.wires[who].popleft()).value)
            party.meet(party.hello, party.connection)
            self.speak(party)

    def settle(self):
        """Deliver everything, and open what is lost or new, as programs do, until nothing changes."""
        for rounds in range(20):
            while any(self.wires):
                self.deliver(0)
                self.deliver(1)
            shut = [who for who in (0, 1) if self.parties[who].state in (State.IDLE, State.LOST)]
            if not shut:
                return rounds
            for who in shut:
                self.open(who)
        raise AssertionError("they do not find each other")

    @property
    def states(self):
        return [party.state for party in self.parties]


def in_session(table):
    one, other = table.parties
    return (
        table.states == [State.OPEN, State.OPEN]
        and one.tag == other.tag != 0
        and one.connection.tag == other.connection.tag == one.tag
    )


@pytest.mark.parametrize("first", [0, 1])
def test_a_session_begins_in_either_order(first):
    table = Table()
    table.open(first)
    for _ in range(4):
        table.deliver(0)
        table.deliver(1)
    assert State.OPEN not in table.states
    table.open(1 - first)
    table.settle()
    assert in_session(table)


def test_a_session_has_not_begun_before_the_peer_has_named_this_life():
    table = Table()
    table.open(0)
    table.wires[1].clear()
    table.open(1)
    table.deliver(1)
    assert table.states == [State.FRESH, State.FRESH]
    assert table.parties[0].partner == table.parties[1].life


@pytest.mark.parametrize("how", ["open", "restart"])
@pytest.mark.parametrize("who", [0, 1])
def test_another_life_of_the_peer_means_that_the_session_is_lost(who, how):
    table = Table()
    table.settle()
    before = table.parties[0].tag
    getattr(table, how)(who)
    while any(table.wires):
        table.deliver(0)
        table.deliver(1)
    assert table.states[1 - who] is State.LOST
    with pytest.raises(UnavailableError, match=f"the {table.parties[who].own} has started anew"):
        table.parties[1 - who].check()
    table.settle()
    assert in_session(table)
    assert table.parties[0].tag != before


def test_both_start_anew():
    table = Table()
    table.settle()
    table.restart(0)
    table.restart(1)
    assert table.settle() <= 1
    assert in_session(table)


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("heard", range(6))
def test_a_restart_at_any_moment_of_the_handshake(heard, who):
    table = Table()
    table.open(0)
    table.open(1)
    for turn in range(heard):
        table.deliver(turn % 2)
    table.restart(who)
    table.settle()
    assert in_session(table)


def test_a_lost_connection_ends_no_session():
    table = Table()
    table.settle()
    before = table.parties[0].tag
    for _ in range(3):
        table.connect()
        table.settle()
        assert in_session(table)
    assert table.parties[0].tag == before


def test_what_the_peer_lacks_is_sent_again_once_for_each_connection():
    table = Table()
    table.settle()
    one, other = table.parties
    for value in range(5):
        one.outbox.word(Kind.WORD, "a", value, one.stamp(), checksum=False)
    other.mailbox.number = 3
    table.connect()
    table.settle()
    assert one.connection.next == 4
    one.connection.next = 6
    one.meet(one.hello, one.connection)
    assert one.connection.next == 6


def test_a_peer_cannot_lack_what_it_has_acknowledged():
    table = Table()
    table.settle()
    one, other = table.parties
    one.outbox.word(Kind.WORD, "a", 1, one.stamp(), checksum=False)
    one.outbox.acknowledge(1, 0)
    table.connect()
    with pytest.raises(FrameError, match="lacks what it has acknowledged"):
        table.settle()


def test_an_older_life_of_the_same_process_is_overheard():
    table = Table()
    table.open(1)
    old = table.wires[1].pop()
    table.open(0)
    table.settle()
    table.open(1)
    table.settle()
    assert in_session(table)
    table.wires[1].append(old)
    table.settle()
    assert in_session(table)


def test_the_smaller_window_counts():
    table = Table()
    table.parties[1]._window = 300
    table.connect()
    table.settle()
    assert [party.window for party in table.parties] == [300, 300]


STEPS = st.lists(st.sampled_from(["open", "deliver", "deliver ", "restart", "connect"]).flatmap(
    lambda name: st.tuples(st.just(name.strip()), st.sampled_from([0, 1]))), max_size=40)  # fmt: skip


@given(STEPS)
@settings(max_examples=100)
def test_whatever_happens_they_find_each_other_soon(steps):
    table = Table()
    for name, who in steps:
        if name == "connect":
            table.connect()
        else:
            getattr(table, name)(who)
        one, other = table.parties
        for mine, theirs in ((one, other), (other, one)):
            if mine.state is State.OPEN and mine.partner == theirs.life and theirs.state is not State.LOST:
                assert theirs.partner == mine.life
    assert table.settle() <= 5
    assert in_session(table)


def test_calls_before_open_say_so():
    with pytest.raises(FederalError, match=r"call open\(\) first"):
        make().check()


def test_the_first_reason_to_end_counts_and_is_told():
    one = make()
    one.end("no\x1b[2J good\nat all")
    one.end("something else")
    with pytest.raises(FederalError, match=r"^no\?\[2J good\nat all$"):
        one.check()
    assert decode(one.farewell).value == {"text": "no?[2J good\nat all"}


def test_the_text_of_an_end_is_bounded():
    one = make()
    one.end("x" * 1_000_000)
    assert len(one.failure) == 8000


def test_when_an_acknowledgement_is_due():
    one = make()
    one.tag = 1
    assert not one.owes_ack()
    one.mailbox.number = 31
    assert not one.owes_ack()
    one.mailbox.number = 32
    assert one.owes_ack()
    one.stamp()
    assert not one.owes_ack()
    one.mailbox.received = 249
    assert not one.owes_ack()
    one.mailbox.received = 250
    assert one.owes_ack()
    one.stamp()
    one.mailbox.credit = 250
    assert one.owes_ack()
    one.stamp()
    one.acknowledge_now = True
    assert one.owes_ack()
    one.stamp()
    assert not one.owes_ack()
