"""Servers in processes of their own: killed, stopped, started again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from plait.cluster.ps.client import Connection, Heartbeat, wait_all
from plait.errors import UnavailableError

SERVER = """
import os, sys
from plait.cluster.ps.service import Service

def handle(request):
    if request.kind == "beat":
        request.reply({"incarnation": str(os.getpid()), "notice": None})
    elif request.kind != "hang":
        request.reply({"pid": os.getpid()}, request.tensors)

service = Service(sys.argv[1], handle)
service.start()
print(service.endpoint, flush=True)
service.wait()
"""
START_SECONDS = 60.0


@pytest.fixture
def server():
    """Start a server process, and wait until it listens."""
    made = []

    def start(endpoint="127.0.0.1:0"):
        process = subprocess.Popen([sys.executable, "-c", SERVER, endpoint], stdout=subprocess.PIPE, text=True)
        made.append(process)
        assert select.select([process.stdout], [], [], START_SECONDS)[0], "the server did not start"
        process.endpoint = process.stdout.readline().strip()
        return process

    yield start
    for process in made:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(10)
        process.stdout.close()


@pytest.fixture
def client():
    """A connection, and a heartbeat beside it."""
    made = []

    def start(endpoint, **settings):
        connection = Connection(endpoint, name="server 0", own="worker 0", timeout=30)
        heartbeat = Heartbeat([endpoint], {"worker": 0, "incarnation": "w"}, **settings)
        heartbeat.start()
        made.extend([connection.close, heartbeat.stop])
        until = time.monotonic() + 10
        while 0 not in heartbeat.notices and time.monotonic() < until:
            time.sleep(0.01)
        return connection, heartbeat

    yield start
    for close in made:
        close()


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_killed_server_is_noticed_and_its_successor_is_found(server, client, transport, monkeypatch, tmp_path):
    if transport == "ipc":
        monkeypatch.setenv("PLAIT_SOCKETS", str(tmp_path))
    first = server("127.0.0.1:0")
    connection, heartbeat = client(first.endpoint, interval=0.2, limit=1.0)
    assert connection.request("a").head == {"pid": first.pid}
    pending = connection.send("hang")
    first.kill()
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match=r"server 0 .* has not answered for"):
        wait_all([pending], 30, heartbeat.check)
    assert time.monotonic() - begun < 2.0
    first.wait(10)
    second = server(first.endpoint)
    tensor = torch.arange(100_000.0)
    answer = connection.request("a", {}, [tensor])
    assert answer.head == {"pid": second.pid}
    assert torch.equal(answer.tensors[0], tensor)
    with pytest.raises(UnavailableError, match=r"started again|not answered"):
        heartbeat.check()
    heartbeat.reset()
    heartbeat.check()


def test_a_stopped_server_is_noticed_and_goes_on_when_continued(server, client):
    process = server()
    connection, heartbeat = client(process.endpoint, interval=0.2, limit=1.0)
    process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 5
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until, "it did not stop"
    pending = connection.send("a")
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match=r"server 0 .* has not answered for"):
        wait_all([pending], 30, heartbeat.check)
    assert time.monotonic() - begun < 2.0
    process.send_signal(signal.SIGCONT)
    assert connection.request("a").head == {"pid": process.pid}
    until = time.monotonic() + 5
    while heartbeat._silent[0] > 1.0 and time.monotonic() < until:
        time.sleep(0.01)
    heartbeat.check()  # the same incarnation: nothing was lost


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_with_the_defaults_a_lost_server_ends_a_wait_within_six_seconds(server, client, blow):
    process = server()
    connection, heartbeat = client(process.endpoint)
    pending = connection.send("hang")
    os.kill(process.pid, blow)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match=r"server 0 .* has not answered for"):
        wait_all([pending], 30, heartbeat.check)
    assert 3.5 < time.monotonic() - begun < 6.5
