"""What the wire of the parameter server moves, as a fraction of what a raw socket moves between the same processes.

A push sends so many bytes and gets a short answer; a pull asks briefly and gets so many bytes. The raw socket does the
same with `sendall` and `recv_into` a buffer that is used again: no message could be quicker. One at a time shows what
waiting costs, four under way what the wire moves. Both sides of a pair are measured in turn, so load on the machine
falls on both.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import zmq
from rich.console import Console
from rich.table import Table

from plait.cluster.ps.client import Connection, Pending
from plait.cluster.ps.service import Request, Service

__all__ = ["main", "measure", "serve"]

RESULTS = Path(__file__).parent / "results" / "transport.json"
SIZES = [1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
ORDER = struct.Struct("<cQ")
UNDER_WAY = (1, 4)
SECONDS = 0.1
"""How long one measurement lasts, about."""

Exchange = tuple[Callable[[int], None], Callable[[int], None]]
"""What begins an exchange of so many bytes, and what ends the one that began first."""


# ---- the other process


def serve(raw: socket.socket, directory: str | None) -> None:
    """Answer both: the raw socket here, messages in the service's thread; until the raw peer leaves."""
    if directory:
        os.environ["PLAIT_SOCKETS"] = directory
    buffer = torch.zeros(max(SIZES), dtype=torch.uint8)

    def handle(request: Request) -> None:
        request.reply({}, [buffer[: request.head["bytes"]]] if request.kind == "pull" else ())

    service = Service("127.0.0.1:0", handle)
    service.start()
    print(service.endpoint, flush=True)
    peer, _ = raw.accept()
    with peer, contextlib.suppress(ConnectionError):
        prepare(peer)
        view = memoryview(buffer.numpy())
        while True:
            kind, size = ORDER.unpack(receive(peer, memoryview(bytearray(ORDER.size))))
            if kind == b"<":
                peer.sendall(view[:size])
            else:
                receive(peer, view[:size])
                peer.sendall(b"!")
    service.stop()


def prepare(peer: socket.socket) -> None:
    if peer.family == socket.AF_INET:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive(peer: socket.socket, view: memoryview) -> memoryview:
    got = 0
    while got < len(view):
        count = peer.recv_into(view[got:])
        if not count:
            raise ConnectionError("the peer has left")
        got += count
    return view


# ---- measuring


@contextlib.contextmanager
def other_process(transport: str) -> Iterator[dict[str, dict[str, Exchange]]]:
    """How to push and pull, raw and by messages, to one process."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        sockets = directory if transport == "ipc" else None
        family, name = (socket.AF_UNIX, f"{directory}/raw") if sockets else (socket.AF_INET, ("127.0.0.1", 0))
        listener = stack.enter_context(socket.socket(family))
        listener.bind(name)
        listener.listen()
        child = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(listener.fileno()), "--sockets", sockets or ""],
            pass_fds=[listener.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(child.wait, 30)
        stack.callback(child.kill)
        watch = threading.Timer(60, child.kill)  # its first line then is empty
        watch.start()
        endpoint = child.stdout.readline().strip()
        watch.cancel()
        if sockets:
            os.environ["PLAIT_SOCKETS"] = sockets
            stack.callback(os.environ.pop, "PLAIT_SOCKETS")
        connection = Connection(endpoint, name="the other process", timeout=60)
        stack.callback(connection.close)
        peer = stack.enter_context(socket.socket(family))
        peer.connect(listener.getsockname())
        prepare(peer)
        yield {"raw": raw_exchanges(peer), "plait": exchanges(connection)}


def raw_exchanges(peer: socket.socket) -> dict[str, Exchange]:
    view = memoryview(torch.zeros(max(SIZES), dtype=torch.uint8).numpy())
    answer = memoryview(bytearray(1))

    def push(size: int) -> None:
        peer.sendall(ORDER.pack(b">", size))
        peer.sendall(view[:size])

    def pull(size: int) -> None:
        peer.sendall(ORDER.pack(b"<", size))

    return {"push": (push, lambda size: receive(peer, answer)), "pull": (pull, lambda size: receive(peer, view[:size]))}


def exchanges(connection: Connection) -> dict[str, Exchange]:
    tensor = torch.zeros(max(SIZES), dtype=torch.uint8)
    begun: deque[Pending] = deque()

    def push(size: int) -> None:
        begun.append(connection.send("push", {}, [tensor[:size]]))

    def pull(size: int) -> None:
        begun.append(connection.send("pull", {"bytes": size}))

    def end(size: int) -> None:
        begun.popleft().wait()

    return {"push": (push, end), "pull": (pull, end)}


def seconds(exchange: Exchange, size: int, times: int, under_way: int) -> float:
    begin, end = exchange
    start = time.perf_counter()
    for _ in range(under_way - 1):
        begin(size)
    for _ in range(times - under_way + 1):
        begin(size)
        end(size)
    for _ in range(under_way - 1):
        end(size)
    return (time.perf_counter() - start) / times


def measure(transport: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with other_process(transport) as ways:
        for direction, under_way, size in itertools.product(("push", "pull"), UNDER_WAY, SIZES):
            pair = ways["raw"][direction], ways["plait"][direction]
            for exchange in pair:
                first = seconds(exchange, size, 4, under_way)
            times = max(2 * under_way, min(1000, int(SECONDS / first)))
            taken = [tuple(seconds(exchange, size, times, under_way) for exchange in pair) for _ in range(rounds)]
            rows.append(
                {"over": transport, "what": direction, "under_way": under_way, "bytes": size, **row(size, taken)}
            )
    return rows


def row(size: int, taken: list[tuple[float, ...]]) -> dict[str, Any]:
    raw, plait = (statistics.median(column) for column in zip(*taken))
    return {
        "raw_us": round(raw * 1e6, 1),
        "us": round(plait * 1e6, 1),
        "raw_gb_per_s": round(size / raw / 1e9, 3),
        "gb_per_s": round(size / plait / 1e9, 3),
        "fraction": round(statistics.median(before / after for before, after in taken), 3),
    }


# ---- showing


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="Push and pull over the wire, and over a raw socket")
    for heading in ("over", "what"):
        made.add_column(heading, no_wrap=True)
    for heading in ("at once", "KB", "raw us", "us", "raw GB/s", "GB/s", "ratio"):
        made.add_column(heading, justify="right", no_wrap=True)
    for one in rows:
        times = (f"{one['raw_us']:.0f}", f"{one['us']:.0f}")
        speeds = (f"{one['raw_gb_per_s']:.2f}", f"{one['gb_per_s']:.2f}", f"{one['fraction']:.2f}")
        made.add_row(one["over"], one["what"], f"{one['under_way']}", f"{one['bytes'] >> 10}", *times, *speeds)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sockets", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"got --rounds {arguments.rounds}: write at least 1")
    os.environ.pop("PLAIT_SECRET", None)  # encryption is another question
    if arguments.serve is not None:
        serve(socket.socket(fileno=arguments.serve), arguments.sockets)
        return
    rows = [row for transport in ("tcp", "ipc") for row in measure(transport, arguments.rounds)]
    Console().print(table(rows))
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
        "cpus": os.cpu_count(),
        "rounds": arguments.rounds,
        "rows": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
