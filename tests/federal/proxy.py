"""A TCP forwarder that does what networks do: cuts, resets, delays, slows down, and alters what passes.

In a test: `with Proxy(listener.endpoint) as proxy: ...`. As a process of its own:

    python proxy.py --target 127.0.0.1:50051 --plan '[{"at": 1.5, "do": "cut"}, {"at": 2, "do": "delay", "value": 0.1}]'

It prints the endpoint to dial, takes further {"do": ...} as lines of its input, and ends when the input does.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

CHUNK = 64 << 10
TICK = 0.02
"""Seconds after which a waiting thread looks whether it has to end."""
ORDERS = ("cut", "reset", "delay", "throttle", "cut_after", "flip_after", "refuse")


class Proxy:
    def __init__(self, target: str, listen: str = "127.0.0.1:0") -> None:
        self.delay = 0.0
        """Seconds for which every piece of at most 64 KiB is held back, each way."""
        self.throttle = 0.0
        """Bytes a second, each way; 0: as fast as it goes."""
        self.accepted = 0
        """Connections that were forwarded."""
        self.flipped = 0
        self.bytes = 0
        self._target = _address(target)
        self._cut_at = self._flip_at = -1
        self._refuse_until = 0.0
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self._closed = False
        self._server = socket.create_server(_address(listen))
        self._server.settimeout(TICK)
        host, port = self._server.getsockname()[:2]
        self.endpoint = f"{host}:{port}"
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self) -> None:
        """Close every connection now."""
        for pair in self._taken():
            pair.ended = True

    def reset(self) -> None:
        """The same, with a reset instead of an orderly end."""
        for pair in self._taken():
            pair.reset = True
            pair.ended = True

    def cut_after(self, count: int) -> None:
        """Close every connection once `count` more bytes have passed, either way."""
        with self._lock:
            self._cut_at = self.bytes + count

    def flip_after(self, count: int) -> None:
        """Alter one byte once `count` more have passed, either way."""
        with self._lock:
            self._flip_at = self.bytes + count

    def refuse(self, seconds: float) -> None:
        """Close new connections as soon as they come, for a time."""
        self._refuse_until = time.monotonic() + seconds

    def do(self, order: Mapping[str, Any]) -> None:
        """{"do": "cut"}, {"do": "delay", "value": 0.1}: one of `ORDERS`."""
        name, value = order["do"], order.get("value")
        if name not in ORDERS:
            raise ValueError(f"do={name!r}: write one of {', '.join(ORDERS)}")
        if name in ("delay", "throttle"):
            setattr(self, name, float(value or 0))
        elif value is None:
            getattr(self, name)()
        else:
            getattr(self, name)(value)

    def close(self) -> None:
        self._closed = True
        self.cut()
        self._thread.join(5)
        for pair in self._taken():
            pair.ended = True
            pair.join(5)

    def _taken(self) -> list[_Pair]:
        with self._lock:
            self._pairs = [pair for pair in self._pairs if pair.alive]
            return list(self._pairs)

    def _accept(self) -> None:
        with self._server:
            while not self._closed:
                try:
                    near = self._server.accept()[0]
                except TimeoutError:
                    continue
                try:
                    far = socket.create_connection(self._target, timeout=2) if self._open else None
                except OSError:
                    far = None
                if far is None:
                    near.close()
                    continue
                pair = _Pair(self, near, far)
                with self._lock:
                    self._pairs.append(pair)
                    self.accepted += 1
                pair.start()

    @property
    def _open(self) -> bool:
        return time.monotonic() >= self._refuse_until

    def passing(self, data: bytes) -> tuple[bytes, bool]:
        """What is forwarded of `data`, and whether the connection ends after it."""
        with self._lock:
            start = self.bytes
            self.bytes += len(data)
            if start <= self._flip_at < self.bytes:
                altered = bytearray(data)
                altered[self._flip_at - start] ^= 0x10
                data = bytes(altered)
                self._flip_at = -1
                self.flipped += 1
            if start <= self._cut_at < self.bytes:
                data = data[: self._cut_at - start]
                self._cut_at = -1
                return data, True
            return data, False


class _Pair:
    """The two sockets of a forwarded connection, and a thread for each direction; they close what they use."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket) -> None:
        self.ended = self.reset = False
        self._proxy = proxy
        self._sockets = (near, far)
        for end in self._sockets:
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._running = 2
        self._threads = [
            threading.Thread(target=self._pump, args=ends, name="proxy-pump", daemon=True)
            for ends in ((near, far), (far, near))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return self._running > 0

    def join(self, seconds: float) -> None:
        for thread in self._threads:
            thread.join(seconds)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while not self.ended:
                data = self._read(source)
                if data is not None:
                    data, last = self._proxy.passing(data)
                    self._wait(self._proxy.delay)
                    self._write(sink, data)
                    if last:
                        break
                    if self._proxy.throttle:
                        self._wait(len(data) / self._proxy.throttle)
        except OSError:
            pass
        self._leave()

    def _read(self, source: socket.socket) -> bytes | None:
        if not select.select([source], [], [], TICK)[0]:
            return None
        data = source.recv(CHUNK)
        if not data:
            raise ConnectionResetError
        return data

    def _write(self, sink: socket.socket, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.ended:
            if select.select([], [sink], [], TICK)[1]:
                view = view[sink.send(view) :]

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.ended and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, TICK))

    def _leave(self) -> None:
        self.ended = True
        with self._lock:
            self._running -= 1
            if self._running:
                return
        for end in self._sockets:
            if self.reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def follow(proxy: Proxy, plan: Iterable[Mapping[str, Any]], ended: threading.Event) -> None:
    """Carry out the orders of `plan`, each "at" so many seconds from now."""
    start = time.monotonic()
    for order in sorted(plan, key=lambda order: order.get("at", 0.0)):
        if ended.wait(max(0.0, start + order.get("at", 0.0) - time.monotonic())):
            return
        proxy.do(order)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--plan", default="[]")
    arguments = parser.parse_args()
    ended = threading.Event()
    with Proxy(arguments.target, arguments.listen) as proxy:
        print(proxy.endpoint, flush=True)
        planner = threading.Thread(target=follow, args=(proxy, json.loads(arguments.plan), ended))
        planner.start()
        for line in sys.stdin:
            proxy.do(json.loads(line))
        ended.set()
        planner.join()


if __name__ == "__main__":
    main()
