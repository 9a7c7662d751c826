from __future__ import annotations

import threading
import time

import pytest
import torch

from plait.cluster.ps import client as client_module
from plait.cluster.ps.client import Heartbeat, Refused, wait_all
from plait.cluster.ps.service import QUEUED, Service
from plait.errors import ClusterError, ConfigError, RecoverableError, UnavailableError

pytestmark = pytest.mark.alone  # it measures how long things take


@pytest.fixture
def beating():
    made = []

    def start(endpoints, **settings):
        heartbeat = Heartbeat(endpoints, {"worker": 0, "incarnation": "w"}, **{"interval": 0.05, **settings})
        made.append(heartbeat)
        heartbeat.start()
        return heartbeat

    yield start
    for heartbeat in made:
        heartbeat.stop()


def echo(request):
    request.reply(request.head, request.tensors)


def silent(request):
    pass


def eventually(look, seconds=5.0):
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.01)


# ---- requests


def test_send_does_not_wait_and_done_tells_whether_the_answer_is_here(serve, connect):
    go = threading.Event()

    def handle(request):
        go.wait(5)
        echo(request)

    pending = connect(serve(handle).endpoint).send("a", {"b": 1})
    assert not pending.done()
    with pytest.raises(ClusterError, match="has not answered 'a' yet"):
        pending.result()
    go.set()
    eventually(pending.done)
    assert pending.wait().head == {"b": 1}
    assert pending.result().head == {"b": 1}


def test_many_requests_under_way_get_each_its_own_answer(serve, connect):
    service = serve(echo)
    connection = connect(service.endpoint)
    pendings = [connection.send("a", {"i": i}, [torch.full((10_000,), i)]) for i in range(500)]
    for i, message in enumerate(wait_all(pendings)):
        assert message.head == {"i": i}
        assert message.tensors[0][0] == i
    assert service.dropped == 0


def test_no_answer_is_lost_when_all_that_may_be_under_way_are_answered_at_once(serve, connect):
    kept = []

    def handle(request):
        kept.append(request)
        if len(kept) == QUEUED:
            for one in kept:
                echo(one)
            kept.clear()

    service = serve(handle)
    connection = connect(service.endpoint)
    for _ in range(20):
        wait_all([connection.send("a", {"i": i}, [torch.zeros(20_000)]) for i in range(QUEUED)])
    assert service.dropped == 0


def test_what_is_sent_is_what_lay_in_the_tensor_until_the_answer(serve, connect):
    connection = connect(serve(echo).endpoint)
    tensor = torch.zeros(500_000)
    for i in range(20):
        tensor.fill_(i)
        assert (connection.request("a", {}, [tensor]).tensors[0] == i).all()


def test_a_deadline_says_who_waited_for_whom(serve, connect):
    service = serve(silent)
    connection = connect(service.endpoint)
    begun = time.monotonic()
    with pytest.raises(ClusterError, match=rf"worker 0 waited 0.3 s for server 0 \({service.endpoint}\) .* 'push'"):
        connection.send("push").wait(0.3)
    assert 0.3 <= time.monotonic() - begun < 2


def test_a_server_that_never_was_is_a_deadline_too(connect):
    connection = connect("127.0.0.1:1", timeout=0.2)
    with pytest.raises(ClusterError, match=r"waited 0.2 s for server 0 \(127.0.0.1:1\)"):
        connection.request("push")


def test_an_answer_that_comes_too_late_is_dropped(serve, connect):
    kept = []

    def handle(request):
        if request.kind == "slow":
            kept.append(request)
        else:
            for one in kept:
                one.reply({"slow": 1})
            echo(request)

    connection = connect(serve(handle).endpoint)
    slow = connection.send("slow")
    with pytest.raises(ClusterError, match="waited"):
        slow.wait(0.1)
    assert connection.request("a", {"b": 1}).head == {"b": 1}
    assert not slow.done()
    assert not connection._waiting


def test_check_ends_a_wait(serve, connect):
    calls = []

    def check():
        calls.append(time.monotonic())
        if len(calls) == 2:
            raise UnavailableError("server 0 is gone")

    connection = connect(serve(silent).endpoint)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="is gone"):
        wait_all([connection.send("a")], 10, check)
    assert calls[-1] - begun < 3 * client_module.LOOK
    assert not connection._waiting


def test_answers_of_several_servers_come_in_the_order_asked(serve, connect):
    def slow(request):
        time.sleep(0.1)
        request.reply({"server": 0})

    first = connect(serve(slow).endpoint)
    second = connect(serve(lambda request: request.reply({"server": 1})).endpoint, name="server 1")
    pendings = [first.send("a"), second.send("a"), second.send("b"), first.send("b")]
    assert [message.head["server"] for message in wait_all(pendings)] == [0, 1, 1, 0]
    assert wait_all([]) == []


def test_the_missing_server_is_named_among_several(serve, connect):
    first, second = connect(serve(echo).endpoint), connect(serve(silent).endpoint, name="server 1")
    with pytest.raises(ClusterError, match="waited 0.2 s for server 1 "):
        wait_all([first.send("a"), second.send("a")], 0.2)


def test_one_refusal_among_answers_is_raised_when_all_are_here(serve, connect):
    good = connect(serve(echo).endpoint)
    bad = connect(serve(lambda request: request.refuse("no", "late")).endpoint, name="server 1")
    pendings = [bad.send("a"), good.send("a")]
    with pytest.raises(Refused, match="server 1 .* refused 'a': no") as error:
        wait_all(pendings)
    assert error.value.code == "late"
    assert pendings[1].done()


def test_a_full_queue_is_waited_for_and_then_said(connect):
    connection = connect("127.0.0.1:1", timeout=0.2)
    for _ in range(QUEUED):
        connection.send("a")
    with pytest.raises(ClusterError, match=r"worker 0 waited 0.2 s for server 0 \(127.0.0.1:1\) to take 'a'"):
        connection.send("a")


def test_after_a_reset_nothing_old_is_sent(serve, connect):
    seen = []

    def handle(request):
        seen.append(request.kind)
        echo(request)

    free = Service("127.0.0.1:0", handle)
    endpoint = free.endpoint
    free.stop()
    connection = connect(endpoint)
    old = connection.send("old")
    connection.reset()
    serve(handle, endpoint)
    assert connection.request("new", {"b": 1}).head == {"b": 1}
    assert seen == ["new"]
    assert not old.done()


def test_a_service_that_comes_back_is_found_again(serve, connect):
    first = serve(lambda request: request.reply({"server": "first"}))
    connection = connect(first.endpoint)
    assert connection.request("a").head == {"server": "first"}
    first.stop()
    serve(lambda request: request.reply({"server": "second"}), first.endpoint)
    assert connection.request("a").head == {"server": "second"}


# ---- the heartbeat


def pong(incarnation, notice=None):
    return lambda request: request.reply({"incarnation": incarnation, "notice": notice})


def lives(heartbeat):
    try:
        heartbeat.check()
    except UnavailableError:
        return False
    return True


def test_every_server_hears_the_beat_and_its_notice_is_kept(serve, beating):
    heard = []

    def first(request):
        heard.append((request.kind, request.head))
        request.reply({"incarnation": "s0", "notice": {"step": 7}})

    heartbeat = beating([serve(first).endpoint, serve(pong("s1", [1])).endpoint])
    eventually(lambda: len(heard) > 3 and len(heartbeat.notices) == 2)
    heartbeat.check()
    assert heartbeat.notices == {0: {"step": 7}, 1: [1]}
    assert heard[0] == ("beat", {"worker": 0, "incarnation": "w"})


def test_a_silent_server_is_noticed_and_named(serve, beating):
    good, mute = serve(pong("a")), serve(silent)
    heartbeat = beating([good.endpoint, mute.endpoint], limit=0.4)
    heartbeat.check()
    begun = time.monotonic()
    eventually(lambda: not lives(heartbeat))
    assert 0.3 < time.monotonic() - begun < 1.5
    with pytest.raises(UnavailableError, match=rf"server 1 \({mute.endpoint}\) has not answered for 0.\d s; 0.4 s are"):
        heartbeat.check()
    assert issubclass(UnavailableError, RecoverableError)


def test_refusals_are_no_sign_of_life(serve, beating):
    heartbeat = beating([serve(lambda request: request.refuse("who are you")).endpoint], limit=0.2)
    eventually(lambda: not lives(heartbeat))


def test_a_server_that_was_started_again_is_noticed_until_reset(serve, beating):
    incarnation = ["first"]

    def handle(request):
        request.reply({"incarnation": incarnation[0]})

    heartbeat = beating([serve(handle).endpoint])
    eventually(lambda: heartbeat._incarnations.get(0) == ("first", "first"))
    heartbeat.check()
    incarnation[0] = "second"
    eventually(lambda: not lives(heartbeat))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="server 0 .* was started again"):
            heartbeat.check()
    heartbeat.reset()
    heartbeat.check()
    eventually(lambda: heartbeat._incarnations.get(0) == ("second", "second"))
    heartbeat.check()


def test_a_server_that_is_expected_is_not_taken_for_another_and_another_is_noticed(serve, beating):
    heartbeat = beating([serve(pong("second")).endpoint])
    heartbeat.expect(0, "second")
    eventually(lambda: 0 in heartbeat.notices)
    heartbeat.check()
    heartbeat.expect(0, "first")
    eventually(lambda: not lives(heartbeat))


def test_seconds_in_which_we_stood_still_are_not_held_against_a_server(serve, beating, monkeypatch):
    shift = [0.0]
    real = time.monotonic

    class Clock:
        @staticmethod
        def monotonic():
            return real() + shift[0]

    heartbeat = beating([serve(pong("a")).endpoint], limit=2.0)
    eventually(lambda: 0 in heartbeat.notices)
    monkeypatch.setattr(client_module, "time", Clock)
    shift[0] = 1000.0
    time.sleep(0.1)
    heartbeat.check()


def test_a_wrong_endpoint_is_said_at_once():
    with pytest.raises(ConfigError, match="write host:port"):
        Heartbeat(["127.0.0.1:1", "nowhere"], {})


def test_a_heartbeat_that_was_never_started_can_be_stopped():
    heartbeat = Heartbeat(["127.0.0.1:1"], {})
    heartbeat.check()
    heartbeat.stop()
