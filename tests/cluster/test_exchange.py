from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from plait.cluster import exchange
from plait.cluster.exchange import Mesh, meet, pack, unpack
from plait.errors import ClusterError, ConfigError, UsageError

pytestmark = pytest.mark.alone  # it measures how long things take


@contextlib.contextmanager
def meshes(count, timeout=5.0):
    """The meshes of a group whose workers are all in this process."""
    sockets = [{} for _ in range(count)]
    for one in range(count):
        for other in range(one):
            sockets[one][other], sockets[other][one] = socket.socketpair()
    made = [Mesh(rank, sockets[rank], timeout) for rank in range(count)]
    try:
        yield made
    finally:
        for mesh in made:
            mesh.close()


def together(acts):
    """What each of these returns, or raises; each runs in a thread of its own."""
    with ThreadPoolExecutor(len(acts)) as pool:
        futures = [pool.submit(act) for act in acts]
        return [future.exception(timeout=20) or future.result() for future in futures]


# ---- trees


def test_trees_survive_the_way():
    tree = {"a": [1, 2.5, None, True, "text"], "t": torch.arange(6).view(2, 3).t(), "deep": {"b": torch.tensor(1.5)}}
    found = unpack(pack(tree))
    assert found["a"] == tree["a"]
    assert torch.equal(found["t"], tree["t"])
    assert found["deep"]["b"].item() == 1.5


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text().filter(lambda s: s != "$tensor"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_trees_come_back_equal(tree):
    assert unpack(pack(tree)) == tree


@given(st.binary(max_size=64))
def test_bytes_that_are_no_tree_are_refused(data):
    with contextlib.suppress(ClusterError):
        tree = unpack(data)
        assert repr(unpack(pack(tree))) == repr(tree)  # the few that are one


def test_what_is_no_tree_is_refused_before_it_is_sent():
    with pytest.raises(UsageError, match="workers cannot tell each other this value"):
        pack({"f": print})


# ---- sockets


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_everybody_gets_everybodys_payload_in_order(count):
    with meshes(count) as group:
        for payloads in ([b"%d" % rank for rank in range(count)], [b""] * count, [b"x" * 3_000_000] * count):
            found = together([lambda m=m, p=p: m.exchange("test", p) for m, p in zip(group, payloads, strict=True)])
            assert found == [payloads] * count


def test_a_fast_worker_may_be_one_exchange_ahead():
    with meshes(2) as (one, two):
        late = threading.Event()
        first = lambda: [one.exchange("a", b"1"), late.set(), one.exchange("b", b"2")]
        second = lambda: [two.exchange("a"), late.wait(5), time.sleep(0.05), two.exchange("b")]
        found = together([first, second])
        assert found[1][-1] == [b"2", b""]


def test_trees_are_gathered_and_told():
    with meshes(3) as group:
        assert together([lambda m=m: m.gather("g", [m.rank]) for m in group]) == [[[0], [1], [2]]] * 3
        assert together([lambda m=m: m.tell("t", {"from": m.rank}) for m in group]) == [{"from": 0}] * 3


def test_a_file_descriptor_goes_along():
    with meshes(2) as (one, two):
        read, write = os.pipe()
        together([lambda: one.exchange("fd", b"x" * 100_000, fd=write), lambda: two.exchange("fd")])
        os.close(write)
        (got,) = two.taken_fds().values()
        os.write(got, b"hello")
        os.close(got)
        assert os.read(read, 10) == b"hello"
        os.close(read)
        assert one.taken_fds() == {}


def test_a_worker_that_is_gone_is_named():
    with meshes(3) as group:
        group[2]._peers[0].socket.close()
        group[2]._peers[1].socket.close()
        first, second = together([lambda m=m: m.exchange("step 7") for m in group[:2]])
        assert str(first) == "worker 0 waits for worker 2 in 'step 7': it is gone: its process has ended or was killed"
        assert "worker 2" in str(second)
        with pytest.raises(ClusterError, match="is in no group any more"):
            group[0].exchange("step 8")


def test_a_worker_that_leaves_says_why():
    with meshes(2) as (one, two):
        two.close("its disk is full")
        with pytest.raises(ClusterError, match="worker 1 in 'x': it has left: its disk is full"):
            one.exchange("x")


def test_a_wait_ends_after_the_timeout_and_names_the_late():
    with meshes(3, timeout=0.2) as group:
        begun = time.monotonic()
        with pytest.raises(ClusterError, match=r"worker 0 has waited 0.2 s for workers 1, 2 in 'x'"):
            group[0].exchange("x")
        assert 0.2 <= time.monotonic() - begun < 2


def test_a_payload_that_nobody_reads_is_given_up():
    with meshes(2, timeout=0.2) as (one, two):
        two._peers[0].out = memoryview(exchange._HEADER.pack(1, 1, 0) + b"x")
        two._peers[0].push()  # its message is there, but it takes none
        with pytest.raises(ClusterError, match=r"has waited 0.2 s for worker 1"):
            one.exchange("x", b"y" * 3_000_000)


def test_different_exchanges_are_told_apart():
    with meshes(2) as (one, two):
        found = together([lambda: one.exchange("mean"), lambda: two.exchange("end of stage")])
        assert all("worker 0 is in 'mean'" in str(e) or "worker 1 is in 'end of stage'" in str(e) for e in found)


def test_a_length_past_the_limit_is_refused_before_memory_is_taken():
    with meshes(2) as (one, two):
        two._peers[0].out = memoryview(exchange._HEADER.pack(1, 1, exchange.LIMIT + 1) + b"x")
        two._peers[0].push()
        with pytest.raises(ClusterError, match="it wants to send"):
            one.exchange("x")


def test_a_payload_past_the_limit_is_not_sent(monkeypatch):
    monkeypatch.setattr(exchange, "LIMIT", 10)
    with meshes(2) as (one, _), pytest.raises(UsageError, match="11 bytes are more than workers tell each other, 10"):
        one.exchange("x", b"x" * 11)


@given(st.binary(min_size=14, max_size=64))
def test_garbage_from_a_peer_is_an_error(data):
    with meshes(2, timeout=0.01) as (one, two):
        two._peers[0].out = memoryview(data)
        two._peers[0].push()
        with pytest.raises(ClusterError):
            one.exchange("x")


# ---- meeting


def member(index, workers, port, restart=0):
    return SimpleNamespace(index=index, workers=workers, master=f"127.0.0.1:{port}", restart=restart)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def joined(members, timeout=5.0):
    return together([lambda one=one: meet(one, timeout) for one in members])


def close_all(found):
    for one in found:
        if not isinstance(one, Exception):
            one.mesh.close()


@pytest.mark.parametrize("machine", ["one", ""], ids=["one host", "hosts that differ"])
def test_workers_meet(monkeypatch, machine):
    monkeypatch.setattr(exchange, "_machine", (lambda: "one") if machine else lambda: str(threading.get_ident()))
    port = free_port()
    found = joined([member(rank, 3, port) for rank in range(3)])
    try:
        assert [one.mesh.on_one_host for one in found] == [bool(machine)] * 3
        assert together([lambda m=one.mesh: m.gather("x", m.rank) for one in found]) == [[0, 1, 2]] * 3
    finally:
        close_all(found)


def test_a_secret_keeps_others_out(monkeypatch):
    secrets = {0: b"right", 1: b"wrong"}
    own = threading.local()
    monkeypatch.setattr(exchange, "_secret", lambda: secrets[own.rank])

    def join(one):
        own.rank = one.index
        return meet(one, 0.5)

    port = free_port()
    found = together([lambda one=member(rank, 2, port): join(one) for rank in range(2)])
    assert all(isinstance(one, ClusterError) for one in found)
    assert "worker 1 of 2 never came" in str(found[0])
    assert "PLAIT_SECRET" in str(found[0])


def test_the_secret_is_the_environments(monkeypatch):
    monkeypatch.setenv("PLAIT_SECRET", "s3cret")
    port = free_port()
    found = joined([member(rank, 2, port) for rank in range(2)])
    close_all(found)
    assert not any(isinstance(one, Exception) for one in found)


def test_workers_of_another_attempt_are_not_met():
    port = free_port()
    found = joined([member(0, 2, port), member(1, 2, port, restart=1)], timeout=0.5)
    assert all("never came" in str(one) for one in found)


def test_strangers_are_sent_away(monkeypatch):
    """Somebody reads from the store where a worker listens, and says that it is worker 1, without the key."""
    answers = []
    arrive = exchange._arrive

    def with_stranger(store, one, place, timeout, until):
        if one.index == 0:
            with socket.create_connection(("127.0.0.1", place["port"])) as stranger:
                stranger.sendall(exchange._HELLO.pack(exchange._MAGIC, 1, b"n" * 16) + b"p" * 32)
                thread = threading.Thread(target=lambda s=stranger.dup(): (answers.append(read_all(s)), s.close()))
                thread.start()
                threads.append(thread)
            with socket.create_connection(("127.0.0.1", place["port"])) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 40)
        return arrive(store, one, place, timeout, until)

    def read_all(connection):
        found = b""
        with contextlib.suppress(OSError):
            while more := connection.recv(100):
                found += more
        return found

    threads = []
    monkeypatch.setattr(exchange, "_arrive", with_stranger)
    monkeypatch.setattr(exchange, "_machine", lambda: str(threading.get_ident()))  # so workers come over TCP, too
    port = free_port()
    found = joined([member(rank, 2, port) for rank in range(2)])
    for thread in threads:
        thread.join(5)
    try:
        assert together([lambda m=one.mesh: m.gather("x", m.rank) for one in found]) == [[0, 1]] * 2
        assert len(answers[0]) == 48  # a challenge and a proof, and then nothing
    finally:
        close_all(found)


def test_one_who_keeps_the_port_is_waited_for():
    port = free_port()
    busy = socket.create_server(("0.0.0.0", port))
    threading.Timer(0.3, busy.close).start()
    found = joined([member(0, 1, port)])
    close_all(found)
    assert not isinstance(found[0], Exception)


def test_a_chief_that_cannot_be_reached_is_told():
    port = free_port()
    begun = time.monotonic()
    with pytest.raises(
        ClusterError, match=rf"worker 1 cannot reach the chief's store at 127.0.0.1:{port} within 0.5 s"
    ):
        meet(member(1, 2, port), 0.5)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("master", [None, "", "host", "host:port"])
def test_a_group_needs_a_place_to_meet(master):
    role = SimpleNamespace(index=0, workers=2, master=master, restart=0)
    with pytest.raises(ConfigError, match="2 workers need a place to meet"):
        meet(role, 1.0)


def test_the_agents_store_is_used_where_torchrun_keeps_one(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    found = joined([member(rank, 2, agent.port) for rank in range(2)])
    close_all(found)
    assert not any(isinstance(one, Exception) for one in found)


def test_the_header_is_as_small_as_it_is_said_to_be():
    assert exchange._HEADER.size == struct.calcsize("<IHQ") == 14
