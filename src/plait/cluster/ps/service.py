"""The server's end of the wire: one loop that receives requests and sends answers, now or later."""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.z85
from torch import Tensor

from plait.cluster.ps.wire import MAX_TENSORS, Buffer, WireError, decode, encode
from plait.errors import ClusterError, ConfigError, PlaitError

__all__ = [
    "QUEUED",
    "Request",
    "Service",
    "address",
    "curve_keys",
    "readable",
    "receive_frames",
    "send_frames",
    "set_options",
]

log = logging.getLogger("plait")

TICK = 0.1
"""Seconds between two looks at the clock, at most; also how soon `stop` is noticed."""
BATCH = 64
"""Requests between two looks at the clock, at most."""
QUEUED = 64
"""Requests of one peer that are under way, at most."""
ANSWERS = 4 * QUEUED
"""Answers that wait for one peer, at most; a peer that reads nothing loses the others. ZeroMQ counts what was read in
steps of half of this, so less than twice QUEUED would lose answers of peers that do read."""
MAX_BYTES = 2**31
"""Of one message."""
PING_SECONDS = 5
SILENT_SECONDS = 30  # longer than a frame of MAXMSGSIZE takes: a ping cannot overtake it
COPIED = 1 << 18
"""Bytes below which a frame is copied when sent: keeping track of its memory would cost more."""
MAX_PATH = 100  # of a Unix socket; the system's own limit is 107 bytes
ZAP = "inproc://zeromq.zap.01"

# Plain numbers: these are used a dozen times a request, where operations on enumerations show.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


class Request:
    """One request; answer it once, in the thread of the service, when the answer is known."""

    __slots__ = ("_number", "_peer", "_service", "answered", "head", "kind", "tensors", "worker")

    def __init__(
        self, service: Service, peer: bytes, kind: str, head: dict[str, Any], tensors: list[Tensor], number: int
    ) -> None:
        self._service, self._peer, self._number = service, peer, number
        self.kind = kind
        self.head = head
        self.tensors = tensors
        self.worker: int | None = None
        """For the handler's use."""
        self.answered = False

    def reply(self, head: dict[str, Any] | None = None, tensors: Sequence[Tensor] = ()) -> None:
        """Answer. The tensors are sent from where they lie: do not write into them afterwards."""
        self._answer("reply", head or {}, tensors)

    def refuse(self, text: str, code: str = "refused") -> None:
        """Answer that it cannot be; `Pending.wait` raises Refused with this text and code."""
        self._answer("refused", {"code": code, "text": text}, ())

    def _answer(self, kind: str, head: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        if self.answered:
            raise ClusterError(f"a request {self.kind!r} was answered twice: answer each once")
        frames = encode(kind, head, tensors, number=self._number)
        self.answered = True
        self._service._send(self._peer, frames)  # noqa: SLF001 - the two are one thing


class Service:
    """Receives requests at `endpoint` ("host:port"; port 0: any free one) and gives them to `handle`, one by one.

    `handle` and `tick` run in the service's thread and should be quick: while they run, nobody is answered. Without a
    `secret` (PLAIT_SECRET when None) anybody who reaches the port may ask; with one, only those who know it.
    """

    def __init__(
        self,
        endpoint: str,
        handle: Callable[[Request], None],
        *,
        tick: Callable[[float], None] | None = None,
        secret: str | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.rejected = 0
        """Messages that were not understood."""
        self.dropped = 0
        """Answers whose peer was gone, or read nothing."""
        self._handle, self._tick = handle, tick
        self._max_bytes = max_bytes
        self._ended = threading.Event()
        self._stopping = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        secret = os.environ.get("PLAIT_SECRET") if secret is None else secret
        self._context = zmq.Context()
        self._allowed = b""
        self._zap: zmq.Socket[bytes] | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            set_options(self._socket)
            self._socket.sndhwm = ANSWERS
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
            if secret:
                self._require(secret)
            self.endpoint = _bind(self._socket, endpoint)
        except BaseException:
            self._close(linger=0)
            raise
        if not secret and not _protected(self.endpoint):
            log.warning(
                "%s takes requests from anybody who reaches it: set PLAIT_SECRET to the same words for every process",
                self.endpoint,
            )

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="plait-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the loop; answers that are under way get a second. From the service's own thread: without waiting."""
        self._stopping = True
        if self._thread is None:
            self._close(linger=0)
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the loop has ended, after at most `timeout` seconds; ClusterError if it ended by a mistake."""
        ended = self._ended.wait(timeout)
        if self._failure is not None:
            raise ClusterError(f"the server's loop at {self.endpoint} broke: {self._failure!r}") from self._failure
        return ended

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._zap is not None:
            poller.register(self._zap, zmq.POLLIN)
        ticked = time.monotonic()
        try:
            while not self._stopping:
                ready = dict(poller.poll(int(TICK * 1000)))
                if self._zap is not None and self._zap in ready:
                    self._let_in(self._zap)
                if self._socket in ready:
                    self._drain()
                now = time.monotonic()
                if self._tick is not None and now - ticked >= TICK:
                    ticked = now
                    self._guarded(self._tick, now)
        except Exception as error:  # noqa: BLE001 - `wait` raises it
            self._failure = error
        finally:
            self._close(linger=1000)

    def _drain(self) -> None:
        for _ in range(BATCH):
            frames = receive_frames(self._socket, self._max_bytes)
            if len(frames) > 1:
                self._serve(frames[0].bytes, frames[1:])
            else:
                self.rejected += 1
            if self._stopping or not readable(self._socket):
                return

    def _serve(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        try:
            message = decode(frames)
        except WireError as error:
            self.rejected += 1
            log.debug("%s: not understood: %s", self.endpoint, error)
            if error.number is not None:
                head = {"code": "malformed", "text": str(error)}
                self._send(peer, encode("refused", head, number=error.number))
            return
        request = Request(self, peer, message.kind, message.head, message.tensors, message.number)
        try:
            self._handle(request)
        except PlaitError as error:  # the peer asked for what cannot be, and is told
            log.warning("%s: a request %r is refused: %s", self.endpoint, message.kind, error)
            _refuse(request, str(error))
        except Exception as error:
            log.exception("%s: a request %r failed", self.endpoint, message.kind)
            _refuse(request, f"{type(error).__name__}: {error}")

    def _guarded(self, call: Callable[[float], None], now: float) -> None:
        try:
            call(now)
        except Exception:
            log.exception("%s: looking at the clock failed", self.endpoint)

    def _send(self, peer: bytes, frames: list[Buffer]) -> None:
        try:
            send_frames(self._socket, [peer, *frames])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.dropped += 1

    def _require(self, secret: str) -> None:
        """CURVE: both keys come from the secret, and only its worker's key is let in."""
        keys = curve_keys(secret)
        self._allowed = zmq.utils.z85.decode(keys["worker"][0])
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP)
        self._socket.curve_publickey, self._socket.curve_secretkey = keys["server"]
        self._socket.curve_server = True
        self._socket.setsockopt_string(zmq.ZAP_DOMAIN, "plait")

    def _let_in(self, zap: zmq.Socket[bytes]) -> None:
        parts = zap.recv_multipart()
        known = len(parts) == 7 and parts[5] == b"CURVE" and hmac.compare_digest(parts[6], self._allowed)
        status = [b"200", b"OK", b"worker"] if known else [b"400", b"the key is not this cluster's", b""]
        zap.send_multipart([b"1.0", parts[1], *status, b""])

    def _close(self, *, linger: int) -> None:
        self._socket.close(linger)
        if self._zap is not None:
            self._zap.close(0)
        self._context.term()
        self._ended.set()


def _refuse(request: Request, text: str) -> None:
    if not request.answered:
        request.refuse(text, "error")


def set_options(peer: zmq.Socket[bytes]) -> None:
    """What both ends have in common: bounded queues, no waiting at the end, a look at silent peers."""
    peer.linger = 0
    peer.sndhwm = peer.rcvhwm = QUEUED
    peer.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    peer.setsockopt(zmq.HEARTBEAT_IVL, PING_SECONDS * 1000)
    peer.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_SECONDS * 1000)
    peer.setsockopt(zmq.HEARTBEAT_TTL, SILENT_SECONDS * 1000)


def send_frames(peer: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Hand a message over without waiting: zmq.Again, and nothing of it sent, when the peer's queue is full."""
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        copy = type(frame) is bytes or frame.nbytes < COPIED
        peer.send(frame, _MORE if i < last else _NOW, copy=copy)


def readable(peer: zmq.Socket[bytes]) -> bool:
    """Whether a message is here; asking is quicker than the exception that says no."""
    return int(peer.get(_EVENTS)) & _POLLIN != 0


def receive_frames(peer: zmq.Socket[bytes], max_bytes: int) -> list[zmq.Frame]:
    """The frames of the message that is here; an empty list, and none kept, when they are too many or too large."""
    frames: list[zmq.Frame] = []
    size, more = 0, True
    while more:
        frame = peer.recv(_NOW, copy=False)
        more = frame.more
        size += len(frame)
        if size <= max_bytes and len(frames) < MAX_TENSORS + 2:
            frames.append(frame)
        else:
            frames.clear()
            size = max_bytes + 1
    return frames


def curve_keys(secret: str) -> dict[str, tuple[bytes, bytes]]:
    """The (public, secret) keys of "server" and "worker", the same wherever the secret is."""
    keys = {}
    for role in ("server", "worker"):
        raw = hmac.new(secret.encode(), f"plait {role} key".encode(), hashlib.sha256).digest()
        own = zmq.utils.z85.encode(raw)
        keys[role] = (zmq.curve_public(own), own)
    return keys


def address(endpoint: str, environ: Mapping[str, str] | None = None) -> str:
    """Where ZeroMQ finds "host:port": a Unix socket in PLAIT_SOCKETS if that is set and the host is this one."""
    host, port = _split(endpoint)
    directory = (os.environ if environ is None else environ).get("PLAIT_SOCKETS")
    if not directory or not _is_loopback(host):
        return f"tcp://{host}:{port}"
    path = str(Path(directory) / f"{port}.sock")
    if len(path.encode()) > MAX_PATH:
        raise ConfigError(f"PLAIT_SOCKETS={directory!r} is too long for a socket's name: choose a shorter directory")
    return f"ipc://{path}"


def _bind(server: zmq.Socket[bytes], endpoint: str) -> str:
    host, port = _split(endpoint)
    where = address(endpoint)
    try:
        if where.startswith("ipc://"):
            return f"{host}:{_bind_path(server, host, port)}"
        return f"{host}:{_bind_port(server, host, port)}"
    except zmq.ZMQError as error:
        raise ClusterError(f"a server cannot listen at {endpoint}: {error}; choose another port") from error


def _bind_path(server: zmq.Socket[bytes], host: str, port: int) -> int:
    while port == 0:
        port = random.randrange(1 << 16, 1 << 24)  # noqa: S311 - a name; no port of TCP has it
        if Path(address(f"{host}:{port}").removeprefix("ipc://")).exists():
            port = 0
    server.bind(address(f"{host}:{port}"))
    return port


def _bind_port(server: zmq.Socket[bytes], host: str, port: int) -> int:
    """ZeroMQ binds to numbers, not to names; a name may be one that others reach us by (Kubernetes' services)."""
    number = _number_of(host)
    try:
        server.bind(f"tcp://{number}:{port or '*'}")
    except zmq.ZMQError as error:
        if number == host or error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
            raise
        server.bind(f"tcp://0.0.0.0:{port or '*'}")
    return int(server.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])


def _number_of(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ClusterError(f"the host {host!r} is not known here ({error}): write a name that resolves") from error


def _protected(endpoint: str) -> bool:
    return _is_loopback(_split(endpoint)[0])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise ConfigError(f"{endpoint!r} is no endpoint: write host:port, as in 127.0.0.1:7001")
    return host, int(port)
