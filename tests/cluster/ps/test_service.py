from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import zmq

from plait.cluster.ps.client import Connection, Refused, wait_all
from plait.cluster.ps.service import Service, address, curve_keys
from plait.cluster.ps.wire import decode, encode
from plait.errors import ClusterError, ConfigError

MEGABYTE = 1 << 20


@pytest.fixture
def raw():
    """A socket of ZeroMQ that says whatever it likes."""
    context, made = zmq.Context(), []

    def start(service, kind=zmq.DEALER, queued=1000):
        peer = context.socket(kind)
        peer.linger = 0
        peer.rcvhwm = queued
        made.append(peer)
        peer.connect(address(service.endpoint))
        return peer

    yield start
    for peer in made:
        peer.close()
    context.term()


def echo(request):
    request.reply(request.head, request.tensors)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def eventually(look, seconds=10.0):
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.0005)


def test_a_request_is_answered_with_what_the_handler_says(serve, connect):
    sent = [torch.arange(5), torch.randn(300, 1000)]
    got = connect(serve()).request("echo", {"step": 1}, sent)
    assert got.head == {"step": 1}
    assert all(torch.equal(a, b) for a, b in zip(got.tensors, sent, strict=True))


def test_a_request_may_be_answered_later_and_out_of_order(serve, connect):
    kept = []

    def handle(request):
        kept.append(request)
        if len(kept) == 3:
            for one in reversed(kept):
                one.reply({"was": one.head["i"]})

    connection = connect(serve(handle))
    pendings = [connection.send("a", {"i": i}) for i in range(3)]
    assert [message.head["was"] for message in wait_all(pendings)] == [0, 1, 2]


def test_the_clock_is_looked_at_with_and_without_requests(serve, connect):
    seen, kept = [], []

    def tick(now):
        seen.append(now)
        while kept:
            kept.pop().reply({"at": now})

    connection = connect(serve(kept.append, tick=tick))
    assert connection.request("a").head["at"] in seen
    eventually(lambda: len(seen) >= 4)
    assert seen == sorted(seen)


def test_an_error_in_the_handler_is_a_refusal_and_the_loop_goes_on(serve, connect, caplog):
    def handle(request):
        if request.kind == "bad":
            raise ValueError("no such table")
        if request.kind == "ours":
            raise ClusterError("table 3: write 0, 1 or 2")
        echo(request)

    connection = connect(serve(handle))
    with pytest.raises(Refused, match=r"server 0 \(127.0.0.1:\d+\) refused 'bad': ValueError: no such table") as error:
        connection.request("bad")
    assert error.value.code == "error"
    with pytest.raises(Refused, match="refused 'ours': table 3: write 0, 1 or 2"):
        connection.request("ours")
    assert connection.request("good", {"a": 1}).head == {"a": 1}
    assert "a request 'bad' failed" in caplog.text
    assert "a request 'ours' is refused: table 3" in caplog.text


def test_an_error_after_the_answer_or_in_tick_does_not_stop_the_loop(serve, connect, caplog):
    ticked = threading.Event()

    def handle(request):
        echo(request)
        raise ValueError("afterwards")

    def tick(now):
        ticked.set()
        raise ValueError("late")

    connection = connect(serve(handle, tick=tick))
    connection.request("a")
    assert ticked.wait(5)
    assert connection.request("a", {"b": 2}).head == {"b": 2}
    assert "looking at the clock failed" in caplog.text


def test_a_refusal_has_a_code_and_a_text(serve, connect):
    connection = connect(serve(lambda request: request.refuse("step 3 is over", "late")))
    with pytest.raises(Refused, match="refused 'push': step 3 is over") as error:
        connection.request("push")
    assert error.value.code == "late"


def test_a_second_answer_is_an_error(serve, connect):
    found = []

    def handle(request):
        request.reply()
        try:
            request.refuse("changed my mind")
        except ClusterError as error:
            found.append(str(error))

    connection = connect(serve(handle))
    connection.request("push")
    connection.request("push")  # the first is handled to its end
    assert found[0] == "a request 'push' was answered twice: answer each once"


def test_an_answer_that_cannot_be_sent_is_a_refusal(serve, connect, caplog):
    connection = connect(serve(lambda request: request.reply({"loss": float("nan")})))
    with pytest.raises(Refused, match="finite numbers"):
        connection.request("a")


def test_an_answer_to_a_peer_that_is_gone_is_dropped(serve, connect):
    kept = []

    def handle(request):
        if request.kind == "keep":
            kept.append(request)
        elif request.kind == "answer":
            kept.pop().reply()
            echo(request)
        else:
            request.reply({"kept": len(kept)})

    service = serve(handle)
    gone, here = connect(service), connect(service)
    gone.send("keep")
    eventually(lambda: here.request("count").head["kept"])
    gone.close()
    time.sleep(0.2)
    here.request("answer")
    assert service.dropped == 1


@pytest.mark.alone
def test_a_peer_that_reads_nothing_does_not_eat_the_memory(serve, connect, raw):
    handled = []

    def handle(request):
        handled.append(request.kind)
        request.reply({}, [torch.zeros(200_000, dtype=torch.uint8)])

    service = serve(handle)
    deaf, other = raw(service, queued=1), connect(service)
    before = resident()
    for number in range(1000):  # 200 MB of answers
        assert deaf.poll(5000, zmq.POLLOUT)
        deaf.send_multipart(encode("pull", {}, number=number))
    eventually(lambda: len(handled) >= 1000, 30)
    assert other.request("pull").tensors[0].numel() == 200_000
    assert service.dropped > 500
    assert resident() - before < 100 * MEGABYTE


def test_stop_ends_the_thread_and_a_service_can_stop_itself(serve, connect):
    services = []

    def handle(request):
        echo(request)
        if request.kind == "end":
            services[0].stop()

    services.append(serve(handle))
    connection = connect(services[0])
    assert not services[0].wait(0)
    assert connection.request("end", {"last": 1}).head == {"last": 1}  # what was answered before still arrives
    assert services[0].wait(5)


def test_a_loop_that_breaks_is_told_to_those_who_wait_for_its_end(monkeypatch):
    service = Service("127.0.0.1:0", echo)
    monkeypatch.setattr(Service, "_drain", lambda self: 1 / 0)
    service.start()
    connection = Connection(service.endpoint)
    try:
        connection.send("a")
        with pytest.raises(ClusterError, match="broke: ZeroDivisionError"):
            service.wait(5)
    finally:
        connection.close()
        service.stop()


def test_a_service_that_was_never_started_can_be_stopped():
    service = Service("127.0.0.1:0", echo)
    service.stop()
    assert service.wait(0)


def test_a_port_that_is_taken_is_said(serve):
    service = serve()
    with pytest.raises(ClusterError, match=f"cannot listen at {service.endpoint}.*choose another port"):
        Service(service.endpoint, echo)


@pytest.mark.parametrize("endpoint", ["7001", "host:", ":7001", "host:http", "host:-1", ""])
def test_what_is_no_endpoint_is_said(endpoint):
    with pytest.raises(ConfigError, match="write host:port"):
        address(endpoint, {})


def test_a_host_that_nobody_knows_is_said():
    with pytest.raises(ClusterError, match="'no.such.host.invalid' is not known here"):
        Service("no.such.host.invalid:0", echo)


def test_addresses_are_sockets_in_a_directory_only_for_this_host():
    sockets = {"PLAIT_SOCKETS": "/run/p"}
    assert address("127.0.0.1:7001", {}) == "tcp://127.0.0.1:7001"
    assert address("127.0.0.1:7001", sockets) == "ipc:///run/p/7001.sock"
    assert address("localhost:7001", sockets) == "ipc:///run/p/7001.sock"
    assert address("10.0.0.3:7001", sockets) == "tcp://10.0.0.3:7001"
    assert address("ps-0.train:7001", sockets) == "tcp://ps-0.train:7001"
    assert address("127.0.0.1:7001", {"PLAIT_SOCKETS": ""}) == "tcp://127.0.0.1:7001"
    with pytest.raises(ConfigError, match="choose a shorter directory"):
        address("127.0.0.1:7001", {"PLAIT_SOCKETS": "/run/" + "p" * 100})


def test_with_a_directory_of_sockets_no_port_is_opened(serve, connect, monkeypatch, tmp_path_factory):
    directory = tmp_path_factory.mktemp("s")
    monkeypatch.setenv("PLAIT_SOCKETS", str(directory))
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the port is taken by somebody else: it does not matter
        service = serve(endpoint=f"127.0.0.1:{taken.getsockname()[1]}")
    other = serve()
    assert len(list(directory.iterdir())) == 2
    for one in (service, other):
        assert connect(one).request("a", {"b": 1}).head == {"b": 1}
        with pytest.raises((ConnectionError, OverflowError)):
            socket.create_connection(("127.0.0.1", int(one.endpoint.split(":")[1])), timeout=1)


def test_a_socket_that_a_killed_server_left_is_taken_over(serve, connect, monkeypatch, tmp_path):
    monkeypatch.setenv("PLAIT_SOCKETS", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "7001.sock"))
    assert connect(serve(endpoint="127.0.0.1:7001")).request("a", {"b": 1}).head == {"b": 1}


def test_a_name_can_be_listened_at(serve, connect):
    assert connect(serve(endpoint="localhost:0")).request("a", {"b": 1}).head == {"b": 1}


def test_an_open_port_without_a_secret_is_warned_of_once(serve, caplog, monkeypatch):
    monkeypatch.delenv("PLAIT_SECRET", raising=False)
    with caplog.at_level(logging.WARNING, "plait"):
        serve()
        serve(endpoint="0.0.0.0:0", secret="words")
        assert not caplog.records
        serve(endpoint="0.0.0.0:0")
    assert len(caplog.records) == 1
    assert "set PLAIT_SECRET" in caplog.text


# ---- peers that do not speak our language


def garbage(draw: random.Random) -> list[bytes]:
    """Frames that are wrong in one of many ways."""
    whole = [bytes(memoryview(f)) for f in encode("push", {"a": 1}, [torch.ones(8), torch.arange(3)], number=5)]
    choice = draw.randrange(8)
    if choice == 0:
        return [draw.randbytes(draw.randrange(200)) for _ in range(draw.randrange(1, 6))]
    if choice == 1:
        return whole[: draw.randrange(1, 3)]
    if choice == 2:
        return [frame[: draw.randrange(len(frame))] for frame in whole]
    if choice == 3:
        size = draw.choice([1 << 30, 1 << 40, 1 << 62, 1 << 80, -1])
        return [b'[1,"push",5,{},[["float32",[%d,%d]]]]' % (size, size), b"1234"]
    if choice == 4:
        depth = draw.choice([40, 900, 200_000])
        return [b'[1,"push",5,{"a":' + b"[" * depth + b"]" * depth + b"},[]]"]
    if choice == 5:
        return [whole[0], *[b""] * draw.randrange(3, 40)]
    if choice == 6:
        return [b'[1,"push",5,{"a":%s},[]]' % draw.choice([b"NaN", b"1e999", b"9" * 9000, b'"\xff"', b"tru"])]
    return [b"[1," + b" " * (2 << 20)]


@pytest.mark.alone
def test_a_thousand_fuzzed_messages_are_refused_and_disturb_nobody(serve, connect, raw):
    service = serve(lambda request: request.reply({"twice": 2 * request.head["x"]}, request.tensors))
    peer, good, draw = raw(service), connect(service), random.Random(0)
    answers = []

    def fuzz(times):
        for i in range(times):
            sent = service.rejected + 1
            peer.send_multipart(garbage(draw))
            tensor = torch.full((100,), float(i))
            got = good.request("double", {"x": i}, [tensor])
            assert got.head == {"twice": 2 * i}
            assert torch.equal(got.tensors[0], tensor)
            eventually(lambda: service.rejected == sent)
            while peer.poll(0):
                answers.append(decode(peer.recv_multipart()).kind)

    fuzz(200)  # what is taken once and kept: caches, arenas
    before = resident()
    fuzz(1000)
    assert service.rejected == 1200
    assert set(answers) == {"refused"}
    assert resident() - before < 8 * MEGABYTE


@pytest.mark.alone
def test_garbage_on_the_bare_port_disturbs_nobody(serve, connect):
    service = serve()
    host, port = service.endpoint.split(":")
    good, draw = connect(service), random.Random(1)
    good.request("a")
    before = resident()
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
    for i in range(300):
        with socket.create_connection((host, int(port)), timeout=5) as peer:
            # a right greeting now and then, so that what follows is read as commands and frames
            peer.sendall((greeting if i % 2 else b"") + draw.randbytes(draw.randrange(300)))
        if i % 10 == 0:
            assert good.request("a", {"i": i}).head == {"i": i}
    assert resident() - before < 8 * MEGABYTE
    time.sleep(0.5)  # ZeroMQ aborts a process whose socket ends while a stranger shakes hands with it: docs/limits.md


def test_a_message_of_too_many_or_too_large_frames_is_dropped_whole(serve, connect, raw):
    service = serve(max_bytes=MEGABYTE)
    peer, good = raw(service), connect(service)
    peer.send_multipart([b"x"] * 5000)
    peer.send_multipart([b"x" * 600_000, b"x" * 600_000])
    peer.send_multipart(encode("a", {"b": 1}, number=3))
    assert peer.poll(5000)
    assert decode(peer.recv_multipart()).head == {"b": 1}
    assert service.rejected == 2
    assert good.request("a", {"c": 1}).head == {"c": 1}


def test_a_frame_above_the_limit_ends_its_peers_connection_only(serve, connect, raw):
    service = serve(max_bytes=MEGABYTE)
    peer, good = raw(service), connect(service)
    peer.send_multipart([b"x" * (2 * MEGABYTE)])
    assert good.request("a", {"c": 1}).head == {"c": 1}
    assert not peer.poll(300)


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.ROUTER, zmq.PUSH, zmq.SUB, zmq.PAIR])
def test_sockets_of_other_kinds_disturb_nobody(serve, connect, raw, kind):
    service = serve()
    peer, good = raw(service, kind), connect(service)
    if kind in (zmq.REQ, zmq.PUSH, zmq.PAIR):
        peer.setsockopt(zmq.SNDTIMEO, 200)
        with contextlib.suppress(zmq.Again):
            peer.send_multipart([b"hello", b"there"])
    assert good.request("a", {"c": 1}).head == {"c": 1}


# ---- the secret


def test_only_those_who_know_the_secret_get_an_answer(serve, connect, monkeypatch):
    monkeypatch.delenv("PLAIT_SECRET", raising=False)
    asked = []

    def handle(request):
        asked.append(request.kind)
        echo(request)

    service = serve(handle, secret="a long sentence")
    right = connect(service, secret="a long sentence").send("right", {"a": 1}, [torch.ones(100_000)])
    assert right.wait().head == {"a": 1}
    assert not answered(connect(service, timeout=1), "without")
    assert not answered(connect(service, secret="another", timeout=1), "wrong")
    assert asked == ["right"]


def answered(connection, kind):
    """A request that is refused at the door may not even be taken: that depends on who is quicker."""
    try:
        return connection.send(kind).ready(0.5)
    except ClusterError:
        return False


def test_knowing_the_servers_public_key_is_not_enough(serve, raw, monkeypatch):
    service = serve(secret="a long sentence")
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    try:
        peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
        peer.curve_serverkey = curve_keys("a long sentence")["server"][0]
        peer.connect(address(service.endpoint))
        peer.send_multipart(encode("a", {}))
        assert not peer.poll(700)
    finally:
        peer.close()
        context.term()


def test_the_secret_is_read_from_the_environment(serve, connect, monkeypatch):
    monkeypatch.setenv("PLAIT_SECRET", "from outside")
    service = serve()
    assert connect(service).request("a", {"b": 1}).head == {"b": 1}
    monkeypatch.delenv("PLAIT_SECRET")
    assert not answered(connect(service, timeout=1), "a")


def test_keys_follow_from_the_secret_alone():
    assert curve_keys("a") == curve_keys("a")
    keys = [key for secret in ("a", "b") for pair in curve_keys(secret).values() for key in pair]
    assert len(set(keys)) == 8
