"""Links: frames pass both ways, streams that break are made anew, and everything ends."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from plait.errors import ConfigError
from plait.federal import certificates, link
from plait.federal.channel import Channel
from plait.federal.link import Dialer, Listener, connect, is_loopback
from plait.federal.settings import Party

from .links import Post, both, linked, wait_for

pytestmark = pytest.mark.alone  # it measures how long things take

CONNECT_SECONDS = 5.0


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certs")
    certificates.init(directory)
    return str(directory)


@pytest.fixture(params=["tls", "plain"])
def credentials(request, certs):
    return tuple(certificates.load(certs, role) if request.param == "tls" else None for role in ("leader", "follower"))


@pytest.fixture
def posts():
    return Post(), Post()


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "[::1]", "localhost"])
def test_loopback(host):
    assert is_loopback(f"{host}:1")


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "localhost.example", "leader.example", "128.0.0.1"])
def test_not_loopback(host):
    assert not is_loopback(f"{host}:1")


def test_connect_listens_or_dials_with_certificates(certs, posts):
    with contextlib.closing(connect(posts[0], Party(role="leader", listen="127.0.0.1:0", certs=certs))) as listener:
        assert isinstance(listener, Listener)
        assert int(listener.endpoint.rpartition(":")[2]) > 0
        party = Party(role="follower", peer=listener.endpoint, certs=certs)
        with contextlib.closing(connect(posts[1], party)) as dialer:
            assert isinstance(dialer, Dialer)
            assert dialer.endpoint == listener.endpoint
            posts[1].put(b"hello")
            assert posts[0].take() == b"hello"


def test_the_follower_may_listen(certs, posts):
    with contextlib.closing(connect(posts[1], Party(role="follower", listen="127.0.0.1:0", certs=certs))) as listener:
        party = Party(role="leader", peer=listener.endpoint, certs=certs)
        with contextlib.closing(connect(posts[0], party)):
            posts[1].put(b"hello")
            assert posts[0].take() == b"hello"


@pytest.mark.parametrize("where", [{"listen": "0.0.0.0:0"}, {"peer": "leader.example:50051"}])
def test_plain_text_stays_within_the_machine(posts, where):
    with pytest.raises(ConfigError, match="plait certs init --party leader --party follower DIR"):
        connect(posts[0], Party(role="leader", **where))


def test_insecure_warns_at_each_start(posts, caplog):
    for count in (1, 2):
        connect(posts[0], Party(role="leader", listen="0.0.0.0:0", insecure=True)).close()
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == count
        assert "plain text" in warnings[-1].getMessage()


def test_plain_text_within_the_machine_needs_no_word(posts, caplog):
    connect(posts[0], Party(role="leader", listen="127.0.0.1:0")).close()
    assert not caplog.records


def test_insecure_and_certificates_contradict(certs, posts):
    with pytest.raises(ConfigError, match="give one of them"):
        connect(posts[0], Party(role="leader", listen="127.0.0.1:0", certs=certs, insecure=True))


def test_bad_certificates_are_found_before_anything_starts(tmp_path, posts):
    with pytest.raises(ConfigError, match=r"ca\.pem is missing"):
        connect(posts[0], Party(role="leader", listen="127.0.0.1:0", certs=str(tmp_path)))


def test_a_port_has_one_listener(posts):
    listener = Listener(posts[0], "127.0.0.1:0", "follower")
    with contextlib.closing(listener), pytest.raises(ConfigError, match="cannot listen there"):
        Listener(posts[1], listener.endpoint, "follower")


def test_frames_pass_both_ways_in_order(posts, credentials):
    with linked(*posts, credentials):
        sent = [bytes([number]) * size for number, size in enumerate((1, 64, 1000, 5_000_000, 3))]
        for data in sent:
            posts[0].put(data)
            posts[1].put(data)
        assert [posts[0].take() for _ in sent] == sent
        assert [posts[1].take() for _ in sent] == sent


def test_the_dialler_waits_for_the_listener(posts, caplog):
    caplog.set_level(logging.INFO, "plait")
    endpoint = free_endpoint()
    with contextlib.closing(Dialer(posts[1], endpoint, "leader")):
        time.sleep(0.5)
        assert not posts[1].attached
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert said[0].startswith(f"the leader at {endpoint} is not there yet")
        with contextlib.closing(Listener(posts[0], endpoint, "follower")):
            posts[1].put(b"at last")
            assert posts[0].take(CONNECT_SECONDS) == b"at last"


@pytest.mark.parametrize("how", ["cut", "reset"])
def test_a_broken_stream_is_made_anew(posts, credentials, how):
    with linked(*posts, credentials) as proxy:
        for count in (1, 2, 3):
            posts[0].put(b"to follower")
            posts[1].put(b"to leader")
            assert posts[1].take() == b"to follower"
            assert posts[0].take() == b"to leader"
            assert proxy.accepted == count
            getattr(proxy, how)()
            wait_for(lambda: all(post.attached[count - 1].dropped for post in posts))
            wait_for(lambda: all(len(post.attached) == count + 1 for post in posts))


def test_a_network_that_is_away_is_dialled_again(posts, credentials):
    with linked(*posts, credentials) as proxy:
        wait_for(lambda: posts[1].attached)
        proxy.refuse(0.5)
        proxy.cut()
        wait_for(lambda: len(posts[1].attached) == 2)
        posts[1].put(b"back")
        assert posts[0].take() == b"back"


def test_a_listener_that_is_started_again_is_found(posts, certs):
    later = Post()
    tls = [certificates.load(certs, role) for role in ("leader", "follower")]
    first = Listener(posts[0], "127.0.0.1:0", "follower", tls[0])
    with contextlib.closing(Dialer(posts[1], first.endpoint, "leader", tls[1])):
        wait_for(lambda: posts[0].attached)
        first.close()
        with contextlib.closing(Listener(later, first.endpoint, "follower", tls[0])):
            later.put(b"hello again")
            assert posts[1].take() == b"hello again"


def test_a_newer_stream_replaces_the_older(posts):
    newer = Post()
    with linked(*posts) as proxy:
        wait_for(lambda: posts[1].attached and posts[0].attached)
        with contextlib.closing(Dialer(newer, proxy.endpoint, "leader")):
            wait_for(lambda: len(posts[0].attached) >= 2)
            wait_for(lambda: posts[1].attached[0].dropped)
            newer.close()


@pytest.mark.parametrize("side", [0, 1])
def test_a_refused_frame_ends_the_connection_and_another_is_made(posts, credentials, side, caplog):
    bad, good = posts[side], posts[1 - side]
    with linked(*posts, credentials):
        bad.put(b"bad")
        wait_for(lambda: all(len(post.attached) == 2 and post.attached[0].dropped for post in posts))
        bad.put(b"good")
        assert good.take() == b"good"
    assert "a frame was refused: the frame is bad; the connection is made anew" in caplog.text


@pytest.mark.parametrize("side", [0, 1])
def test_a_connection_that_its_channel_gives_up_is_made_anew(posts, credentials, side):
    with linked(*posts, credentials):
        wait_for(lambda: posts[0].attached and posts[1].attached)
        posts[side].attached[0].lost("nothing was heard on it")
        wait_for(lambda: all(len(post.attached) == 2 and post.attached[0].dropped for post in posts))
        posts[side].put(b"again")
        assert posts[1 - side].take() == b"again"


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_frame_arrives_though_the_link_is_closed_at_once(posts, credentials, first):
    listener = Listener(posts[0], "127.0.0.1:0", "follower", credentials[0])
    dialer = Dialer(posts[1], listener.endpoint, "leader", credentials[1])
    links = [listener, dialer]
    try:
        wait_for(lambda: posts[0].attached and posts[1].attached)
        data = bytes(5_000_000)
        posts[first].put(data)
        wait_for(lambda: not posts[first]._out)
        posts[first].close()
        links[first].close()
        assert posts[1 - first].take() == data
    finally:
        both(listener.close, dialer.close)


def test_closing_is_quick_while_nobody_is_there(posts):
    dialer = Dialer(posts[1], free_endpoint(), "leader")
    time.sleep(0.2)
    begin = time.monotonic()
    dialer.close()
    assert time.monotonic() - begin < 1.0
    assert not dialer._thread.is_alive()


def test_closing_is_bounded_while_the_peer_does_not_answer(posts):
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and says nothing
        dialer = Dialer(posts[1], f"127.0.0.1:{mute.getsockname()[1]}", "leader")
        time.sleep(0.3)
        begin = time.monotonic()
        dialer.close()
        assert time.monotonic() - begin < 2.0
    assert not posts[1].attached


def test_closing_is_bounded_while_the_network_stands_still(posts, credentials, monkeypatch):
    monkeypatch.setattr(link, "CLOSE_SECONDS", 0.5)
    with linked(*posts, credentials) as proxy:
        wait_for(lambda: posts[0].attached and posts[1].attached)
        proxy.delay = 60.0
        for post in posts:
            post.put(bytes(20_000_000))
        time.sleep(0.2)
        begin = time.monotonic()
    assert time.monotonic() - begin < 4.0


def test_closing_twice_is_fine(posts):
    listener = Listener(posts[0], "127.0.0.1:0", "follower")
    dialer = Dialer(posts[1], listener.endpoint, "leader")
    for closed in (dialer, listener, dialer, listener):
        closed.close()


def test_no_thread_is_left(posts):
    before = set(threading.enumerate())
    with linked(*posts):
        wait_for(lambda: posts[0].attached and posts[1].attached)
    wait_for(lambda: set(threading.enumerate()) <= before, 2.0)


def test_another_service_at_the_endpoint_is_not_taken_for_the_peer(posts, caplog):
    caplog.set_level(logging.INFO, "plait")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with contextlib.closing(Dialer(posts[1], f"127.0.0.1:{port}", "leader")):
            wait_for(lambda: "UNIMPLEMENTED" in caplog.text)
            assert not posts[1].attached
    finally:
        server.stop(0).wait(5)


def test_a_session_over_a_link(certs):
    leader, follower = (Channel(*names, timeout=30.0) for names in (("leader", "follower"), ("follower", "leader")))
    with linked(leader, follower, tuple(certificates.load(certs, role) for role in ("leader", "follower"))):
        both(leader.open, follower.open)
        leader.tell("stage", {"name": "first", "steps": 3})
        follower.send(0, 1, torch.arange(12.0).reshape(3, 4))
        assert follower.hear("stage") == {"name": "first", "steps": 3}
        assert torch.equal(leader.receive(0, 1), torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("how", ["cut", "reset", "cut_after"])
def test_a_session_survives_its_connections(certs, how):
    leader, follower = (Channel(*names, timeout=30.0) for names in (("leader", "follower"), ("follower", "leader")))
    turns, made = 60, []

    def train(own):
        got = []
        for turn in range(turns):
            own.send(0, turn, torch.full((500,), float(turn)))
            got.append(own.receive(0, turn))
            made.append(turn)
        return got

    def break_often(proxy, ended):
        before = -1
        while not ended.wait(0.15):
            if len(made) == before:  # on a busy machine they have not even met again
                continue
            before = len(made)
            if how == "cut_after":
                proxy.cut_after(1500)
            else:
                getattr(proxy, how)()

    with linked(leader, follower, tuple(certificates.load(certs, role) for role in ("leader", "follower"))) as proxy:
        both(leader.open, follower.open)
        proxy.delay = 0.002
        ended = threading.Event()
        breaker = threading.Thread(target=break_often, args=(proxy, ended))
        breaker.start()
        try:
            found = both(lambda: train(leader), lambda: train(follower))
        finally:
            ended.set()
            breaker.join()
        assert proxy.accepted > 1
        for got in found:
            assert [tensor[0].item() for tensor in got] == list(range(turns))
