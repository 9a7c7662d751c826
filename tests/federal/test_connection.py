from __future__ import annotations

import threading
import time

import pytest
import torch

from plait.errors import FederalError, UnavailableError
from plait.federal import connection as module
from plait.federal.hello import Hello, name_session
from plait.federal.outbox import Message
from plait.federal.wire import FrameError, Kind, VersionError, decode, encode_json, encode_tensor

from .channels import error_of, make

pytestmark = pytest.mark.alone  # it measures how long things take

LIFE = "abcd:1"


class Puppet:
    """A follower moved by hand, on one connection to a leader's channel."""

    def __init__(self, channel):
        self.channel = channel
        self.again()

    def again(self):
        """A new connection."""
        self.connection = self.channel.attach()
        self.frames = self.connection.outgoing()

    def next(self, kind):
        """The next frame of a kind; heartbeats go on for ever, a test does not."""
        until = time.monotonic() + 5.0
        for data in self.frames:
            frame = decode(data)
            if frame.kind == kind:
                return frame
            assert time.monotonic() < until, f"no {kind.name} came"
        raise AssertionError("the connection ended")

    def hello(self, **changes):
        fields = {
            "party": "follower",
            "life": LIFE,
            "fresh": True,
            "peer": None,
            "facts": {},
            "received": 0,
            "window": 1 << 20,
        }
        self.connection.incoming(encode_json(Kind.HELLO, Hello(**{**fields, **changes}).value(), session=0))

    def open(self):
        """Lead the channel into a session; the HELLO with which it names the puppet."""
        opening = threading.Thread(target=self.channel.open, daemon=True)
        opening.start()
        life = self.next(Kind.HELLO).value["life"]
        if life.endswith(":0"):  # said before it was opened
            life = self.next(Kind.HELLO).value["life"]
        self.hello(peer=life)
        opening.join(5)
        assert not opening.is_alive()
        self.life = life
        self.tag = name_session({"leader": life, "follower": LIFE})
        return self.next(Kind.HELLO)

    def word(self, number, value, *, tag=None, received=0, consumed=0):
        self.connection.incoming(
            encode_json(
                Kind.WORD,
                value,
                session=tag or self.tag,
                number=number,
                received=received,
                consumed=consumed,
                topic="a",
            )
        )


@pytest.fixture
def puppet(monkeypatch):
    monkeypatch.setattr("plait.federal.channel.FAREWELL_SECONDS", 0.05)
    channel = make(timeout=1.0)
    yield Puppet(channel)
    channel.refuse("the test is over")
    channel.close()


@pytest.fixture
def opened(puppet):
    puppet.open()
    return puppet


def test_a_connection_begins_with_hello(puppet):
    frame = decode(next(puppet.frames))
    assert frame.kind == Kind.HELLO
    assert frame.value["party"] == "leader"
    assert frame.value["fresh"] is False
    assert frame.value["life"].endswith(":0")


def test_open_says_hello_again(puppet):
    puppet.next(Kind.HELLO)
    frame = puppet.open()
    assert frame.value["peer"] == LIFE
    assert frame.value["fresh"] is False


def test_another_first_frame_is_refused(puppet):
    with pytest.raises(FrameError, match="begins with a HELLO"):
        puppet.connection.incoming(encode_json(Kind.ACK, None, session=0))
    assert puppet.connection.dropped
    assert list(puppet.frames) == []


def test_words_arrive_in_their_session(opened):
    opened.word(1, "x")
    assert opened.channel.hear("a") == "x"


def test_words_of_other_sessions_are_dropped(opened):
    old = name_session({"leader": "abc:1", "follower": LIFE})
    opened.word(1, "old", tag=old)
    opened.word(9, "old", tag=old)
    opened.word(1, "x")
    assert opened.channel.hear("a") == "x"
    assert opened.channel.look("a") is None
    assert opened.channel.duplicates == 0


def test_a_number_that_came_already_is_dropped(opened):
    for number in (1, 1, 2, 1, 2, 3):
        opened.word(number, number)
    assert [opened.channel.hear("a") for _ in range(3)] == [1, 2, 3]
    assert opened.channel.look("a") is None
    assert opened.channel.duplicates == 3


@pytest.mark.parametrize("number", [0, 3])
def test_a_gap_is_refused(opened, number):
    opened.word(1, 1)
    with pytest.raises(FrameError, match=f"message {number} came after 1"):
        opened.word(number, 2)
    assert opened.connection.dropped


def test_more_than_was_sent_cannot_be_acknowledged(opened):
    with pytest.raises(FrameError, match="more than was sent"):
        opened.word(1, 1, received=1)


def test_frames_of_a_dropped_connection_are_overheard(opened):
    old = opened.connection
    opened.again()
    assert old.dropped
    old.incoming(encode_json(Kind.WORD, 1, session=opened.tag, number=1, topic="a"))
    assert opened.channel.look("a") is None


def test_an_altered_frame_drops_the_connection_and_nothing_else(opened):
    data = bytearray(encode_json(Kind.WORD, 1, session=opened.tag, number=1, topic="a"))
    data[-3] ^= 1
    with pytest.raises(FrameError):
        opened.connection.incoming(bytes(data))
    assert opened.connection.dropped
    opened.again()
    opened.hello(peer=opened.life, fresh=False)
    opened.word(1, 2)
    assert opened.channel.hear("a") == 2


def test_an_altered_version_in_a_session_is_an_altered_frame(opened):
    data = bytearray(encode_json(Kind.ACK, None, session=opened.tag))
    data[3] = 9
    with pytest.raises(VersionError):
        opened.connection.incoming(bytes(data))
    assert opened.connection.dropped
    assert opened.channel.look("a") is None


def test_an_altered_version_in_a_first_frame_is_an_altered_frame(puppet):
    data = bytearray(encode_json(Kind.HELLO, {}, session=0))
    data[3] = 9
    with pytest.raises(VersionError):
        puppet.connection.incoming(bytes(data))
    puppet.again()
    puppet.open()


def test_another_version_ends_both(puppet):
    puppet.next(Kind.HELLO)
    puppet.connection.incoming(b"PLT\x09 and what nobody knows yet")
    assert "version 9" in str(error_of(puppet.channel.open, FederalError))
    assert "version 9" in puppet.next(Kind.FAIL).value["text"]
    assert not puppet.connection.dropped


def test_other_facts_end_both_with_the_difference_shown(puppet):
    puppet.hello(facts={"batch": 4})
    error = error_of(puppet.channel.open, FederalError)
    assert [line.split() for line in str(error).splitlines()[1:]] == [["leader", "follower"], ["batch", "-", "4"]]
    assert puppet.next(Kind.HELLO).value["facts"] == {}
    assert "batch" in puppet.next(Kind.FAIL).value["text"]


def test_another_party_than_the_expected_one_ends_both(puppet):
    puppet.hello(party="leader")
    expected = "waits for the follower, and met one that calls itself 'leader'"
    assert expected in str(error_of(puppet.channel.open, FederalError))
    assert expected in puppet.next(Kind.FAIL).value["text"]


def test_another_life_ends_the_session_at_once(opened):
    opened.again()
    opened.hello(life="ffff:0", fresh=False)
    assert "has started anew" in str(error_of(lambda: opened.channel.look("a"), UnavailableError))


def test_messages_wait_for_the_peers_hello_and_go_on_where_it_says(opened):
    for value in range(3):
        opened.channel.tell("b", value)
    assert [opened.next(Kind.WORD).value for _ in range(3)] == [0, 1, 2]
    opened.again()
    assert decode(next(opened.frames)).kind == Kind.HELLO
    assert decode(next(opened.frames)).kind == Kind.ACK  # a heartbeat
    opened.hello(peer=opened.life, fresh=False, received=1)
    assert [opened.next(Kind.WORD).number for _ in range(2)] == [2, 3]
    assert opened.channel.kept_bytes > 0


def test_a_new_session_while_a_tensor_is_encoded(opened, monkeypatch):
    session, encode = opened.channel._session, Message.encode

    def encode_slowly(message, *args, **kwargs):
        with session.lock:
            session.begin()
        return encode(message, *args, **kwargs)

    monkeypatch.setattr(Message, "encode", encode_slowly)
    opened.channel.send(0, 0, torch.ones(3))
    assert decode(next(opened.frames)).kind == Kind.HELLO
    assert session.outbox.said == session.outbox.kept == 0


def test_frames_say_what_came_and_what_was_taken(opened):
    opened.word(1, 1)
    opened.channel.tell("b", 1)
    frame = opened.next(Kind.WORD)
    assert (frame.received, frame.consumed) == (1, 0)
    opened.channel.hear("a")
    opened.channel.tell("b", 2)
    frame = opened.next(Kind.WORD)
    assert frame.received == 1
    assert frame.consumed == len(encode_json(Kind.WORD, 1, session=1, topic="a"))


def test_many_messages_are_acknowledged_though_there_is_nothing_to_say(opened):
    opened.connection._heartbeat = 100.0
    for number in range(1, 33):
        opened.word(number, 1)
    assert opened.next(Kind.ACK).received == 32


def test_heartbeats(opened):
    begin = time.monotonic()
    frames = [opened.next(Kind.ACK) for _ in range(3)]
    assert 0.2 < time.monotonic() - begin < 1.0
    assert {frame.session for frame in frames} == {opened.tag}


def test_a_silent_connection_is_given_up(opened, monkeypatch):
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(module, "SILENCE_HEARTBEATS", 1)
    begin = time.monotonic()
    assert list(opened.frames)
    assert 0.2 < time.monotonic() - begin < 2.0
    assert opened.connection.dropped


def test_a_connection_that_was_lost_ends(opened):
    threading.Timer(0.1, opened.connection.lost, ("the cable",)).start()
    begin = time.monotonic()
    assert all(decode(data).kind in (Kind.ACK, Kind.HELLO) for data in opened.frames)
    assert time.monotonic() - begin < 1.0


def test_a_tensor_that_is_not_expected_ends_both(opened):
    opened.channel.expect({1: (torch.float32, (4, 3))})
    data = encode_tensor(1, 0, torch.ones(4, 2), session=opened.tag, number=1, received=0, consumed=0)
    opened.connection.incoming(data)
    error = error_of(lambda: opened.channel.receive(1, 0), FederalError)
    assert "the leader refuses what the follower sends: the tensor of slot 1, turn 0 has shape [4, 2]" in str(error)
    assert opened.next(Kind.FAIL).value["text"] == str(error)


def test_an_error_of_the_peers_is_raised_with_its_text(opened):
    opened.connection.incoming(encode_json(Kind.FAIL, {"text": "no\x1bmemory"}, session=opened.tag))
    error = error_of(lambda: opened.channel.hear("a"), FederalError)
    assert str(error) == "the follower has ended with an error: no?memory"
    assert opened.next(Kind.BYE).number == 0


@pytest.mark.parametrize("value", [None, [], {"text": 3}, {}])
def test_an_error_without_a_text_is_one_as_well(opened, value):
    opened.connection.incoming(encode_json(Kind.FAIL, value, session=opened.tag))
    assert "has ended with an error" in str(error_of(lambda: opened.channel.hear("a"), FederalError))


def test_an_error_of_another_session_is_dropped(opened):
    opened.connection.incoming(encode_json(Kind.FAIL, {"text": "x"}, session=5))
    assert opened.channel.look("a") is None


def test_an_end_before_a_session_ends_the_wait_for_one(puppet):
    puppet.hello()
    threading.Timer(0.1, puppet.connection.incoming, (encode_json(Kind.BYE, {}, session=0),)).start()
    assert str(error_of(puppet.channel.open, FederalError)).startswith("the follower has ended: start it again")


def test_a_goodbye_is_acknowledged_at_once(opened):
    opened.connection._heartbeat = 100.0
    opened.word(1, 1)
    opened.connection.incoming(encode_json(Kind.BYE, {}, session=opened.tag, number=2))
    assert opened.next(Kind.ACK).received == 2
