"""Tensors of 16 MB one way: over a bare TLS socket, a bare gRPC stream, and plait's channel; all with mutual TLS.

The follower dials and sends, the leader says when it has them all. `python stream.py WAY ROLE PORT CERTIFICATES`
"""

from __future__ import annotations

import queue
import socket
import ssl
import sys
import time
from pathlib import Path

import bare_grpc
import split
import torch

ROWS, WIDTH = 4096, 1024
BYTES = 4 * ROWS * WIDTH
COUNT = 8
"""So many are sent before an answer is waited for."""
WAIT = 60.0


def data() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))


# ---- a TLS socket: one buffer that is used again and again; Python's ssl reads 16 KB at a time


def context(role: str, directory: Path) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if role == "leader" else ssl.PROTOCOL_TLS_CLIENT)
    made.load_cert_chain(directory / f"{role}.pem", directory / f"{role}.key")
    made.load_verify_locations(directory / "ca.pem")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def tls_leader(port: int, directory: Path) -> None:
    view = memoryview(bytearray(BYTES))
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(WAIT)
        plain, _ = server.accept()
        plain.setblocking(True)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context("leader", directory).wrap_socket(plain, server_side=True) as peer:
            while True:
                for _ in range(COUNT):
                    got = 0
                    while got < BYTES:
                        count = peer.recv_into(view[got:])
                        if not count:
                            return
                        got += count
                peer.sendall(b"!")


def tls_follower(port: int, directory: Path) -> None:
    view = memoryview(data().numpy()).cast("B")
    with context("follower", directory).wrap_socket(dial(port), server_hostname="leader") as peer:

        def step() -> float:
            for _ in range(COUNT):
                peer.sendall(view)
            return float(len(peer.recv(1)))

        split.obey(step)


def dial(port: int) -> socket.socket:
    end = time.monotonic() + WAIT
    while True:
        try:
            found = socket.create_connection(("127.0.0.1", port))
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found
        except ConnectionRefusedError:  # the leader is not there yet
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


# ---- a gRPC stream


def grpc_leader(port: int, directory: Path) -> None:
    ended: queue.SimpleQueue = queue.SimpleQueue()

    def handler(requests, context):
        for number, message in enumerate(requests, 1):
            torch.frombuffer(message, dtype=torch.float32).view(ROWS, WIDTH)
            if number % COUNT == 0:
                yield b"!"
        ended.put(None)

    server = bare_grpc.serve(handler, port, directory)
    ended.get()
    server.stop(1).wait(5)


def grpc_follower(port: int, directory: Path) -> None:
    outgoing: queue.SimpleQueue = queue.SimpleQueue()
    channel, incoming = bare_grpc.dial(map(bare_grpc.pack, iter(outgoing.get, None)), port, directory)
    tensor = data()

    def step() -> float:
        for _ in range(COUNT):
            outgoing.put(tensor)
        return float(len(next(incoming)))

    split.obey(step)
    outgoing.put(None)
    channel.close()


# ---- plait


def plait_channel(role: str, port: int, directory: Path):
    from plait.federal.channel import Channel
    from plait.federal.link import connect
    from plait.federal.settings import Party, other

    where = {"leader": "listen", "follower": "peer"}[role]
    party = Party(role=role, certs=str(directory), **{where: f"127.0.0.1:{port}"})
    channel = Channel(role, other(role), timeout=WAIT, window=party.window)
    channel.expect({0: (torch.float32, (ROWS, WIDTH))})
    link = connect(channel, party)
    channel.open()
    return channel, link


def plait_leader(port: int, directory: Path) -> None:
    from plait.errors import FederalError

    channel, link = plait_channel("leader", port, directory)
    turn = 0
    try:
        while True:
            for _ in range(COUNT):
                channel.receive(0, turn)
                turn += 1
            channel.tell("have", turn)
    except FederalError:  # the follower has ended
        channel.close()
        link.close()


def plait_follower(port: int, directory: Path) -> None:
    channel, link = plait_channel("follower", port, directory)
    tensor, turn = data(), 0

    def step() -> float:
        nonlocal turn
        for _ in range(COUNT):
            channel.send(0, turn, tensor)
            turn += 1
        return float(channel.hear("have"))

    split.obey(step)
    channel.close()
    link.close()


if __name__ == "__main__":
    split.prepare()
    globals()[f"{sys.argv[1]}_{sys.argv[2]}"](int(sys.argv[3]), Path(sys.argv[4]))
