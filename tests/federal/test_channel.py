from __future__ import annotations

import logging
import random
import threading
import time

import pytest
import torch

from plait.errors import ConfigError, FederalError, UnavailableError
from plait.federal import channel as module
from plait.federal.loopback import join
from plait.federal.wire import FrameError, Kind, decode

from .channels import error_of, joined, make, pair, together

pytestmark = pytest.mark.alone  # it measures how long things take


@pytest.fixture(autouse=True)
def short_close(monkeypatch):
    """Where the last acknowledgement is lost, nobody waits for it for long."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", 1.0)
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.05)


def numbers(channel, count):
    """Say and hear numbered messages at full speed: words, and tensors in two slots; what was heard."""

    def say():
        for turn in range(count):
            channel.tell("n", turn)
            channel.send(turn % 2, turn, torch.full((3,), float(turn)))

    def hear():
        return [(channel.hear("n"), float(channel.receive(turn % 2, turn)[0])) for turn in range(count)]

    return together(say, hear)[1]


def everything(count):
    return [(turn, float(turn)) for turn in range(count)]


# ---- messages


def test_words_of_a_topic_come_in_order():
    with pair() as (leader, follower, _):
        for value in (1, "x", None, {"a": [1.5]}):
            leader.tell("a", value)
        leader.tell("b", 2)
        assert follower.hear("b") == 2
        assert follower.peek("a") == 1
        assert [follower.hear("a") for _ in range(4)] == [1, "x", None, {"a": [1.5]}]


def test_look_does_not_wait():
    with pair() as (leader, follower, _):
        assert follower.look("a") is None
        leader.tell("a", 1)
        assert follower.peek("a") == 1
        assert follower.look("a") == 1
        assert follower.look("a") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_arrive_bit_for_bit(dtype):
    value = (torch.randn(5, 7, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    with pair() as (leader, follower, _):
        leader.send(0, 0, value)
        leader.send(0, 1, value.t())
        leader.send(0, 2, value[:0])
        assert torch.equal(follower.receive(0, 0), value)
        assert torch.equal(follower.receive(0, 1), value.t())
        assert follower.receive(0, 2).shape == (0, 7)


def test_tensors_and_gradients_of_one_slot_are_two_things():
    with pair() as (leader, follower, _):
        leader.send(0, 0, torch.ones(1), gradient=True)
        leader.send(0, 0, torch.zeros(1))
        assert follower.receive(0, 0) == 0
        assert follower.receive(0, 0, gradient=True) == 1


def test_a_gradient_that_is_zero_is_none():
    with pair() as (leader, follower, _):
        leader.send(0, 0, None, gradient=True)
        assert follower.receive(0, 0, gradient=True) is None


def test_a_tensor_with_a_graph_is_sent_without_it():
    with pair() as (leader, follower, _):
        leader.send(0, 0, torch.ones(2, requires_grad=True) * 2)
        found = follower.receive(0, 0)
        assert found.tolist() == [2, 2]
        assert not found.requires_grad


def test_a_value_that_is_no_json_fails_who_says_it_and_nobody_else():
    with pair() as (leader, follower, _):
        with pytest.raises(FrameError):
            leader.tell("a", torch.ones(1))
        leader.tell("a", 1)
        assert follower.hear("a") == 1


def test_a_word_may_be_changed_after_it_was_said():
    with pair() as (leader, follower, link):
        link.cut()
        value = [1]
        leader.tell("a", value)
        value.append(2)
        link.restore()
        assert follower.hear("a") == [1]


def test_a_change_in_place_before_a_tensor_is_under_way_ends_both_with_a_word_about_it():
    with pair() as (leader, follower, link):
        link.cut()
        value = torch.ones(3)
        leader.send(2, 7, value)
        value.add_(1)
        link.restore()
        for channel in (leader, follower):
            error = error_of(lambda channel=channel: channel.hear("a"), FederalError)
            assert "slot 2, turn 7 was changed in place" in str(error)


def test_a_tensor_that_cannot_be_sent_ends_both_with_a_word_about_it():
    with pair() as (leader, follower, _):
        leader.send(0, 0, torch.ones(2, dtype=torch.complex64))
        for channel in (leader, follower):
            assert "complex64" in str(error_of(lambda channel=channel: channel.hear("a"), FederalError))


def test_bytes_are_counted():
    with pair() as (leader, follower, _):
        before = leader.sent_bytes, follower.received_bytes
        leader.send(0, 0, torch.ones(1000))
        follower.receive(0, 0)
        assert 4000 < leader.sent_bytes - before[0] < 4400
        assert 4000 < follower.received_bytes - before[1] < 4400


def test_several_threads_wait_for_different_things():
    with pair() as (leader, follower, _):

        def later():
            time.sleep(0.1)
            for topic in "cab":
                leader.tell(topic, topic)
            leader.send(0, 0, torch.ones(1))

        waits = [lambda topic=topic: follower.hear(topic) for topic in "abc"]
        found = together(*waits, lambda: float(follower.receive(0, 0)), later)
        assert found[:4] == ["a", "b", "c", 1.0]


def test_what_is_expected_may_come_and_nothing_else():
    with pair() as (leader, follower, _):
        follower.expect({1: (torch.float32, (8, 3))})
        leader.send(1, 0, torch.ones(5, 3))
        leader.send(1, 0, torch.ones(2, 3), gradient=True)
        assert follower.receive(1, 0).shape == (5, 3)
        leader.send(2, 1, torch.ones(5, 3))
        assert "slot 2, turn 1 came" in str(error_of(lambda: follower.receive(2, 1), FederalError))
        assert "the follower refuses" in str(error_of(lambda: leader.hear("a"), FederalError))


def test_what_came_before_it_was_expected_is_judged_then():
    with pair() as (leader, follower, _):
        leader.send(1, 0, torch.ones(5, 4))
        leader.tell("a", 1)
        follower.hear("a")
        follower.expect({1: (torch.float32, (8, 3))})
        assert "has shape [5, 4]" in str(error_of(lambda: follower.receive(1, 0), FederalError))


def test_turns_that_are_forgotten_are_gone():
    with pair() as (leader, follower, _):
        for turn in range(3):
            leader.send(0, turn, torch.ones(1))
        leader.tell("a", 1)
        follower.hear("a")
        follower.forget(2)
        with pytest.raises(FederalError, match="turns before 2 are forgotten"):
            follower.receive(0, 1)
        assert follower.receive(0, 2) == 1


# ---- sessions


@pytest.mark.parametrize("first", [0, 1])
def test_parties_start_in_either_order(first):
    with pair(opened=False) as (*channels, _):
        together(channels[first].open, lambda: (time.sleep(0.1), channels[1 - first].open()))
        channels[0].tell("a", 1)
        assert channels[1].hear("a") == 1


def test_calls_before_open_say_so():
    channel = make()
    for call in (lambda: channel.tell("a", 1), lambda: channel.hear("a"), lambda: channel.look("a")):
        assert "open() first" in str(error_of(call, FederalError))
    channel.close()


@pytest.mark.parametrize("who", [0, 1])
def test_one_party_begins_anew_and_the_other_follows(who):
    with pair() as (*channels, _):
        again, other = channels[who], channels[1 - who]
        again.tell("old", 1)
        other.tell("old", 2)
        opening = threading.Thread(target=again.open, daemon=True)
        opening.start()
        expected = f"the {again.own} has started anew"
        assert expected in str(error_of(lambda: other.hear("never"), UnavailableError))
        for call in (lambda: other.tell("a", 1), lambda: other.look("old"), lambda: other.send(0, 0, None)):
            assert expected in str(error_of(call, UnavailableError))
        other.open()
        opening.join(5)
        together(lambda: again.tell("a", 1), lambda: other.tell("a", 2))
        assert (again.hear("a"), other.hear("a")) == (2, 1)
        assert again.look("old") is None
        assert other.look("old") is None


def test_a_wait_of_the_session_before_ends_with_it():
    with pair() as (leader, follower, _):
        waits = threading.Thread(target=lambda: errors.append(error_of(lambda: leader.hear("a"))), daemon=True)
        errors = []
        waits.start()
        time.sleep(0.05)
        opening = threading.Thread(target=leader.open, daemon=True)
        opening.start()
        waits.join(5)
        assert isinstance(errors[0], UnavailableError)
        error_of(lambda: follower.hear("a"), UnavailableError)
        follower.open()
        opening.join(5)


@pytest.mark.parametrize("both", [False, True])
def test_a_restarted_party_rejoins(both):
    leader, dead = make(), make("follower", "leader")
    link = join(leader, dead)
    together(leader.open, dead.open)
    leader.tell("old", 1)
    link.close()  # and the follower says nothing more
    if both:
        leader.refuse("killed")
        leader.close()
        leader = make()
    reborn = make("follower", "leader")
    with joined(leader, reborn):
        opening = threading.Thread(target=reborn.open, daemon=True)
        opening.start()
        if not both:
            assert "the follower has started anew" in str(error_of(lambda: leader.hear("a"), UnavailableError))
        leader.open()
        opening.join(5)
        leader.tell("a", 1)
        assert reborn.hear("a") == 1
        assert reborn.look("old") is None


def test_one_party_begins_anew_again_and_again():
    with pair() as (leader, follower, _):

        def lead():
            for turn in range(20):
                leader.open()
                leader.tell("turn", turn)
                assert leader.hear("turn") == turn

        def follow():
            while True:
                try:
                    follower.open()
                    turn = follower.hear("turn")
                    follower.tell("turn", turn)
                    if turn == 19:
                        return
                    follower.hear("never")
                except UnavailableError:
                    continue

        together(lead, follow)


# ---- connections


def dialogue(leader, follower):
    """A short one: open, three turns of tensors and gradients with a word each, close."""

    def lead():
        leader.open()
        for turn in range(3):
            found = leader.receive(0, turn)
            leader.send(0, turn, found * 2, gradient=True)
            leader.tell("step", turn)
        leader.close()

    def follow():
        follower.open()
        for turn in range(3):
            follower.send(0, turn, torch.full((4,), float(turn)))
            assert torch.equal(follower.receive(0, turn, gradient=True), torch.full((4,), 2.0 * turn))
            assert follower.hear("step") == turn
        follower.close()

    together(lead, follow)


def meddled(at, how):
    """Do something to the frame number `at` of all, whoever sends it; and whether there was such a frame."""
    lock, count = threading.Lock(), [0]

    def meddle(sender, data):
        with lock:
            count[0] += 1
            if count[0] != at:
                return [data]
        if how == "lost":
            return None
        if how == "twice":
            return [data, data]
        altered = bytearray(data)
        altered[-1 if how == "altered end" else 40] ^= 0x10
        return [bytes(altered)] if how != "cut" else [data[: len(data) // 2]]

    return meddle, count


@pytest.mark.parametrize("how", ["lost", "twice", "altered", "altered end", "cut"])
def test_a_dialogue_survives_what_happens_to_any_single_frame(how):
    at = 1
    while True:
        meddle, count = meddled(at, how)
        leader, follower = make(checksum=True), make("follower", "leader", checksum=True)
        with joined(leader, follower, meddle):
            dialogue(leader, follower)
        if count[0] < at:
            break
        at += 1
    assert at > 12


def test_a_connection_lost_before_anything_was_said():
    with pair(opened=False) as (leader, follower, link):
        link.cut()
        threading.Timer(0.1, link.restore).start()
        together(leader.open, follower.open)
        _, found = together(lambda: leader.send(0, 0, torch.ones(3)), lambda: follower.receive(0, 0))
        assert found.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", [1, 2])
def test_all_arrive_once_and_in_order_though_the_connection_is_cut_a_hundred_times(seed):
    count, heard = 300, []
    with pair(window=4096) as (leader, follower, link):
        luck, until = random.Random(seed), time.monotonic() + 20.0
        done = threading.Event()

        def cut():
            for _ in range(100):
                while leader._session.connection is None and time.monotonic() < until:
                    time.sleep(0.0005)
                time.sleep(luck.random() * 0.004)
                link.cut()
                link.restore()
            done.set()

        def talk():
            while not done.is_set() and time.monotonic() < until:
                heard.extend(together(lambda: numbers(leader, count), lambda: numbers(follower, count)))

        together(cut, talk)
        assert done.is_set()
        assert len(heard) >= 2
        assert all(one == everything(count) for one in heard)


def test_what_came_twice_is_counted():
    def twice(sender, data):
        return [data, data]

    with pair(twice) as (leader, follower, _):
        leader.tell("a", 1)
        leader.tell("a", 2)
        assert [follower.hear("a"), follower.hear("a")] == [1, 2]
        assert follower.look("a") is None
        time.sleep(0.05)
        assert follower.duplicates == 2


# ---- the window


def test_a_fast_sender_is_held():
    window = 100_000
    with pair(window=window) as (leader, follower, _):
        sent, most = [0], [0]

        def send():
            for turn in range(60):
                leader.send(0, turn, torch.ones(2500))
                sent[0] = turn + 1
                most[0] = max(most[0], leader._session.outbox.unconsumed, leader.kept_bytes)

        def receive():
            time.sleep(0.3)
            held = sent[0]
            for turn in range(60):
                follower.receive(0, turn)
            return held

        _, held = together(send, receive)
        assert 9 <= held <= 11
        assert most[0] <= window + 11_000
        assert follower._session.mailbox.waiting == 0


def test_one_message_may_always_go():
    with pair(window=1000) as (leader, follower, _):

        def send():
            for turn in range(5):
                leader.send(0, turn, torch.full((100_000,), float(turn)))

        _, found = together(send, lambda: [follower.receive(0, turn) for turn in range(5)])
        assert [float(one.unique()) for one in found] == [0, 1, 2, 3, 4]


def test_taking_in_the_reverse_order_blocks_nobody():
    with pair(window=100_000) as (leader, follower, _):

        def send():
            for turn in range(40):
                leader.send(0, turn, torch.full((2500,), float(turn)))

        _, found = together(send, lambda: [follower.receive(0, turn) for turn in reversed(range(40))])
        assert [float(one.unique()) for one in found] == [float(turn) for turn in reversed(range(40))]


def test_two_senders_with_full_windows_block_nobody():
    with pair(window=100_000) as (leader, follower, _):

        def go(channel):
            for turn in range(30):
                channel.send(0, turn, torch.ones(2500))
            for turn in range(30):
                channel.receive(0, turn)

        together(lambda: go(leader), lambda: go(follower))


def test_a_window_is_refilled_without_waiting_for_a_heartbeat():
    with pair(window=100_000, heartbeat=100.0, timeout=10.0) as (leader, follower, _):

        def send():
            for turn in range(200):
                leader.tell("a", "x" * 300)
                leader.send(0, turn, torch.ones(20_000))

        def receive():
            for turn in range(200):
                follower.hear("a")
                follower.receive(0, turn)

        begin = time.monotonic()
        together(send, receive)
        assert time.monotonic() - begin < 5.0


def test_windows_of_different_sizes():
    leader, follower = make(window=1000, heartbeat=100.0), make("follower", "leader", window=1 << 20, heartbeat=100.0)
    with joined(leader, follower):
        together(leader.open, follower.open)
        both = together(lambda: numbers(leader, 300), lambda: numbers(follower, 300))
        assert both == [everything(300)] * 2


# ---- deadlines


def test_a_peer_that_never_comes():
    channel = make(timeout=0.3)
    begin = time.monotonic()
    error = error_of(channel.open, FederalError)
    assert 0.3 <= time.monotonic() - begin < 1.0
    assert "the leader waited 0.3 s for the follower (for a session, since " in str(error)
    assert "never heard" in str(error)
    channel.close()


def test_a_peer_that_falls_silent():
    with pair(timeout=0.5) as (leader, _, link):
        link.cut()
        begin = time.monotonic()
        error = error_of(lambda: leader.receive(0, 12, what="'hidden' of step 12"), FederalError)
        assert 0.4 <= time.monotonic() - begin < 1.5
        assert "(for 'hidden' of step 12, since " in str(error)
        assert "last heard at" in str(error)
        assert "fell silent" in str(error)


def test_a_peer_that_lives_and_never_answers():
    with pair(timeout=0.2, heartbeat=0.05) as (leader, follower, _):
        follower.tell("b", 1)
        begin = time.monotonic()
        error = error_of(lambda: leader.receive(1, 1), FederalError)
        assert 1.9 <= time.monotonic() - begin < 4.0
        assert "it is there, and does something else" in str(error)
        assert "bytes of other messages" in str(error)


def test_a_full_window_has_a_deadline_too():
    with pair(timeout=0.3, window=1000) as (leader, _, link):
        link.cut()
        leader.send(0, 0, torch.ones(1000))
        error = error_of(lambda: leader.send(0, 1, torch.ones(1000)), FederalError)
        assert "for room to send slot 0 of turn 1" in str(error)


def test_a_long_wait_is_logged(monkeypatch, caplog):
    monkeypatch.setattr("plait.federal.patience.FIRST_NOTE", 0.1)
    caplog.set_level(logging.INFO, "plait")
    with pair() as (leader, follower, _):
        threading.Timer(0.3, follower.tell, ("a", 1)).start()
        assert leader.hear("a", "the plan") == 1
    assert [text for text in caplog.messages if "the leader waits for the follower (for the plan, since" in text]


# ---- ends


def test_whether_there_is_a_connection():
    with pair() as (leader, follower, link):
        assert leader.connected
        link.cut()
        assert not leader.connected
        assert not follower.connected
        link.restore()
        leader.tell("a", 1)
        assert follower.hear("a") == 1
        assert follower.connected


def test_all_that_was_said_is_delivered_before_the_end():
    with pair() as (leader, follower, link):
        link.cut()
        for turn in range(50):
            leader.tell("a", turn)
            leader.send(0, turn, torch.ones(1000))
        threading.Timer(0.1, link.restore).start()
        leader.close()
        assert leader.closed
        assert [follower.hear("a") for _ in range(50)] == list(range(50))
        assert all(follower.receive(0, turn) is not None for turn in range(50))
        error = error_of(lambda: follower.hear("a"), FederalError)
        assert str(error) == "the leader has ended, and the follower waits for the word 'a'"
        assert "has ended" in str(error_of(lambda: follower.tell("a", 1), FederalError))
        assert follower.look("a") is None
        begin = time.monotonic()
        follower.close()
        assert time.monotonic() - begin < 1.0


def test_close_ends_the_waits_of_other_threads():
    with pair() as (leader, _, _link):
        threading.Timer(0.1, leader.close).start()
        assert "is closed" in str(error_of(lambda: leader.hear("a"), FederalError))


def test_close_twice_and_calls_afterwards():
    with pair() as (leader, follower, _):
        together(leader.close, follower.close)
        leader.close()
        for call in (
            leader.open,
            lambda: leader.tell("a", 1),
            lambda: leader.hear("a"),
            lambda: leader.send(0, 0, None),
        ):
            assert "is closed" in str(error_of(call, FederalError))
        connection = leader.attach()
        assert connection.dropped
        assert list(connection.outgoing()) == []


def test_close_is_bounded_where_the_peer_is_gone(monkeypatch, caplog):
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    with pair() as (leader, _, link):
        link.cut()
        leader.tell("a", 1)
        begin = time.monotonic()
        leader.close()
        assert 0.1 < time.monotonic() - begin < 1.0
    assert "may not have all that was said" in caplog.text


def test_a_peer_that_starts_anew_while_this_party_closes_hears_that_it_has_ended():
    leader, dead, reborn = make(), make("follower", "leader"), make("follower", "leader")
    link = join(leader, dead)
    together(leader.open, dead.open)
    link.cut()
    link.close()
    closing = threading.Thread(target=leader.close, daemon=True)
    closing.start()
    with joined(leader, reborn):
        assert "the leader has ended" in str(error_of(reborn.open, FederalError))
        closing.join(5)


def test_a_channel_that_never_met_anybody_closes_at_once():
    channel = make()
    begin = time.monotonic()
    channel.close()
    assert time.monotonic() - begin < 0.1


def test_an_error_is_told_to_the_peer_at_once():
    with pair() as (leader, follower, _):
        follower.tell("a", "not taken any more")
        begin = time.monotonic()
        _, error = together(lambda: follower.fail("the disk is full"), lambda: error_of(lambda: leader.hear("b")))
        assert time.monotonic() - begin < 1.0
        assert str(error) == "the follower has ended with an error: the disk is full"
        assert "the disk is full" in str(error_of(lambda: leader.hear("a"), FederalError))
        assert "the disk is full" in str(error_of(leader.open, FederalError))
        assert follower.closed


def test_an_error_overtakes_what_waits_to_be_sent():
    def slow(sender, data):
        if decode(data).kind == Kind.TENSOR:
            time.sleep(0.05)
        return [data]

    with pair(slow) as (leader, follower, _):
        for turn in range(100):
            leader.send(0, turn, torch.ones(10))
        begin = time.monotonic()
        leader.fail("x")
        error_of(lambda: follower.hear("a"), FederalError)
        assert time.monotonic() - begin < 1.0


def test_an_error_is_told_before_a_session_too():
    with pair(opened=False) as (leader, follower, _):
        threading.Timer(0.1, follower.fail, ("no such file",)).start()
        assert "no such file" in str(error_of(leader.open, FederalError))


def test_telling_an_error_takes_two_seconds_at_most(monkeypatch):
    monkeypatch.setattr(module, "FAREWELL_SECONDS", 0.2)
    with pair() as (leader, follower, link):
        link.cut()
        begin = time.monotonic()
        leader.fail("x")
        assert 0.1 < time.monotonic() - begin < 1.0


def test_parties_that_do_not_fit_end_soon_with_the_difference_shown():
    leader = make(facts={"job": "a", "data": {"batch": 3}})
    follower = make("follower", "leader", facts={"job": "a", "data": {"batch": 4}})
    with joined(leader, follower):
        begin = time.monotonic()
        one, other = together(lambda: error_of(leader.open), lambda: error_of(follower.open))
        assert time.monotonic() - begin < 2.0
        for error, columns in ((one, ["leader", "follower"]), (other, ["follower", "leader"])):
            assert isinstance(error, FederalError)
            assert str(error).splitlines()[1].split() == columns
        assert str(one).splitlines()[2].split() == ["data.batch", "3", "4"]
        assert str(other).splitlines()[2].split() == ["data.batch", "4", "3"]


def test_two_leaders_end_soon():
    one, other = make(), make()
    with joined(one, other):
        for error in together(lambda: error_of(one.open), lambda: error_of(other.open)):
            assert "met one that calls itself 'leader'" in str(error)


def test_facts_are_compared_as_json_has_them():
    leader, follower = make(facts={"shape": (1, 2)}), make("follower", "leader", facts={"shape": [1, 2]})
    with joined(leader, follower):
        together(leader.open, follower.open)


def test_facts_that_are_no_json():
    with pytest.raises(ConfigError, match="JSON"):
        make(facts={"x": torch.float32})


def test_a_transport_may_say_that_the_peer_refuses_this_party():
    channel = make()
    threading.Timer(0.1, channel.refuse, ("your certificate is for nobody",)).start()
    assert str(error_of(channel.open, FederalError)) == "your certificate is for nobody"
    channel.close()


def test_words_that_ride_on_a_tensor_come_as_words():
    with pair() as (one, other, _):
        one.send(1, 1, torch.ones(2), words=[("step", 1), ("step", 2), ("check", {"a": None})])
        assert [other.hear("step"), other.hear("step"), other.hear("check")] == [1, 2, {"a": None}]
        assert torch.equal(other.receive(1, 1), torch.ones(2))
