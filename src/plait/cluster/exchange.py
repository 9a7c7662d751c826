"""How the workers of a group find each other, and tell each other small things.

They meet at a store that the chief keeps, and from then on every two of them have a socket: on one host a Unix one,
otherwise TCP. So a worker that dies is noticed at once, by everybody, and by its number.
"""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import hashlib
import hmac
import json
import logging
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import safetensors.torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from plait.errors import CheckpointError, ClusterError, ConfigError, UsageError
from plait.variables.tree import join_tree, snapshot, split_tree

__all__ = ["LIMIT", "Meeting", "Member", "Mesh", "meet", "pack", "unpack"]

log = logging.getLogger("plait")

LIMIT = 1 << 34
"""The most bytes that a worker takes from another at once."""

_HEADER = struct.Struct("<IHQ")  # the exchange's number, the length of its name, bytes that follow the name
_LENGTH = struct.Struct("<Q")
_LEAVING = 0xFFFFFFFF  # the number of no exchange: the bytes say why a worker leaves
_NAME = 200  # bytes of a name that travel
_SMALL = 1 << 12
_LARGE = 1 << 20
_FDS = socket.CMSG_SPACE(struct.calcsize("i")) if hasattr(socket, "CMSG_SPACE") else 0
_HELLO = struct.Struct("<8sI16s")
_MAGIC = b"plait-1\n"
_SPIN = 100e-6
"""Seconds to look for a message again and again before sleeping: to be woken takes several times as long as it does."""
_STRANGER_SECONDS = 2.0
"""How long somebody who connects may take to say who it is."""


_kept: dict[tuple[str, int], TCPStore] = {}
"""The chief keeps a store for as long as its process lives: others may still need it, or come to meet again."""
_meetings: collections.Counter[tuple[int, str, int]] = collections.Counter()
"""How often this process, as which worker, has come to a place."""


class Member(Protocol):
    """What `meet` needs to know of a worker; `plait.cluster.roles.Role` has it."""

    @property
    def index(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def master(self) -> str | None: ...
    @property
    def restart(self) -> int: ...


# ---- trees as bytes


def pack(tree: Any) -> bytes:
    """A tree as bytes: its JSON part, then its tensors. Nothing in it is ever run as code, as a pickle would be."""
    try:
        plain, tensors = split_tree(snapshot(tree))
    except CheckpointError as error:
        raise UsageError(f"workers cannot tell each other this value: {error}") from error
    text = json.dumps(plain).encode()
    return _LENGTH.pack(len(text)) + text + (safetensors.torch.save(tensors) if tensors else b"")


def unpack(data: bytes) -> Any:
    """The reverse of `pack`; tensors are on the CPU."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        plain = json.loads(data[_LENGTH.size : end])
        return join_tree(plain, safetensors.torch.load(data[end:]) if end < len(data) else {})
    except Exception as error:  # safetensors has a kind of its own for every way to be wrong
        raise ClusterError(f"a worker sent {len(data)} bytes that are no tree: {error}") from error


# ---- sockets between every two workers


class _LostError(Exception):
    """A peer is gone; the text says how."""


class _Peer:
    """One other worker: what is still to be sent to it, and what has come from it."""

    __slots__ = ("buffer", "fds", "out", "socket")

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.buffer = bytearray()
        self.out = memoryview(b"")
        self.fds: list[int] = []

    def push(self, fd: int | None = None) -> None:
        """Send what the socket takes now."""
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
        try:
            while self.out:
                self.out = self.out[self.socket.sendmsg([self.out], ancillary) :]
                ancillary = []
        except BlockingIOError:
            pass
        except OSError:  # it is gone; what it said before comes from `pull`
            self.out = memoryview(b"")

    def pull(self) -> bool:
        """Take what has come; whether anything had."""
        wanted = _LARGE if len(self.buffer) > _SMALL else _SMALL
        try:
            data, ancillary, _, _ = self.socket.recvmsg(wanted, _FDS)
        except BlockingIOError:
            return False
        except OSError:
            data, ancillary = b"", []
        for _, _, numbers in ancillary:
            self.fds += struct.unpack("i", numbers)
        if not data:
            raise _LostError("it is gone: its process has ended or was killed")
        self.buffer += data
        return True

    def frame(self) -> tuple[int, bytes, bytes] | None:
        """The next whole message, if it is here: its number, name and payload."""
        if len(self.buffer) < _HEADER.size:
            return None
        number, letters, length = _HEADER.unpack_from(self.buffer)
        if length > LIMIT:
            raise _LostError(f"it wants to send {length} bytes, more than {LIMIT}")
        begin = _HEADER.size + letters
        if len(self.buffer) < begin + length:
            return None
        name, payload = bytes(self.buffer[_HEADER.size : begin]), bytes(self.buffer[begin : begin + length])
        del self.buffer[: begin + length]
        if number == _LEAVING:
            raise _LostError(f"it has left: {payload.decode(errors='replace')}")
        return number, name, payload


class Mesh:
    """A group's sockets. All workers call the same methods in the same order; one that does not is noticed.

    It is a `plait.cluster.control.Control`, for a cluster without servers.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout: float) -> None:
        self.rank = rank
        self.size = len(sockets) + 1
        self.timeout = timeout
        self.on_one_host = all(one.family == socket.AF_UNIX for one in sockets.values())
        """Whether this worker reaches all others without a network."""
        self._peers = {other: _Peer(sockets[other]) for other in sorted(sockets)}
        self._number = 0
        self._ended = ""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._spin = _SPIN if cores >= self.size else 0.0

    def exchange(
        self,
        name: str,
        payload: bytes = b"",
        *,
        fd: int | None = None,
        patient: bool = False,
    ) -> list[bytes]:
        """Everybody's payload, in rank order; nobody gets them before all have given theirs.

        `fd` goes along to the others, who find it with `taken_fds`. With `patient`, those who live are waited for
        however long they take, and it is said now and then for whom.
        """
        if self._ended:
            raise ClusterError(f"worker {self.rank} is in no group any more ({self._ended}), so there is no {name!r}")
        if len(payload) > LIMIT:
            raise UsageError(f"{name!r}: {len(payload)} bytes are more than workers tell each other, {LIMIT}")
        self._number = (self._number + 1) % _LEAVING
        sign = name.encode()[:_NAME]
        frame = memoryview(_HEADER.pack(self._number, len(sign), len(payload)) + sign + payload)
        for peer in self._peers.values():
            peer.out = frame
            peer.push(fd)
        found = {self.rank: payload}
        try:
            self._collect(name, sign, found, patient=patient)
        except ClusterError as error:
            self.close(str(error))
            raise
        return [found[rank] for rank in range(self.size)]

    def _collect(self, name: str, sign: bytes, found: dict[int, bytes], *, patient: bool) -> None:
        waiting, begun = dict(self._peers), time.monotonic()
        spin_until = begun + self._spin
        while True:
            for rank, peer in list(waiting.items()):
                if peer.out:
                    peer.push()
                payload = self._from(rank, peer, name, sign) if rank not in found else None
                if payload is not None:
                    found[rank] = payload
                if rank in found and not peer.out:
                    del waiting[rank]
            if not waiting:
                return
            now = time.monotonic()
            if now < spin_until:
                os.sched_yield()  # whoever is waited for may have been put on this core
                continue
            if now - begun > self.timeout:
                late = self._late(name, [rank for rank in waiting if rank not in found] or list(waiting))
                if not patient:
                    raise ClusterError(late)
                log.warning("%s; still waiting", late)
                begun = now
            _wait(waiting.values(), begun + self.timeout - now)

    def _from(self, rank: int, peer: _Peer, name: str, sign: bytes) -> bytes | None:
        try:
            message = peer.frame()
            while message is None and peer.pull():
                message = peer.frame()
        except _LostError as error:
            raise ClusterError(f"worker {self.rank} waits for worker {rank} in {name!r}: {error}") from None
        if message is None:
            return None
        if message[:2] != (self._number, sign):
            other = message[1].decode(errors="replace")
            raise ClusterError(
                f"workers do not do the same: worker {self.rank} is in {name!r} (number {self._number}), worker {rank}"
                f" in {other!r} (number {message[0]}); every worker has to run the same program"
            )
        return message[2]

    def _late(self, name: str, missing: list[int]) -> str:
        return (
            f"worker {self.rank} has waited {self.timeout:g} s for {_workers(missing)} in {name!r}: stopped, stuck or"
            " slower than Distributed(timeout=...) allows"
        )

    def taken_fds(self) -> dict[int, int]:
        """The file descriptors that came with the last exchange, by rank; the caller closes them."""
        return {rank: peer.fds.pop() for rank, peer in self._peers.items() if peer.fds}

    def gather(self, name: str, value: Any, *, everyone: bool = False) -> list[Any]:
        """Everybody's tree, in rank order."""
        del everyone  # there are no servers
        return [
            value if rank == self.rank else unpack(data)
            for rank, data in enumerate(self.exchange(name, pack(value) if self._peers else b""))
        ]

    def tell(self, name: str, value: Any) -> Any:
        """The chief's tree, on every worker."""
        if not self._peers:
            return value
        if self.rank == 0:
            self.exchange(name, pack(value))
            return value
        return unpack(self.exchange(name)[0])

    def close(self, reason: str = "its program has ended") -> None:
        """Leave; the others are told why."""
        if self._ended:
            return
        self._ended = reason or "it has left"
        text = reason.encode()
        for peer in self._peers.values():
            if not peer.out:  # in the middle of a message, the end of the stream says enough
                peer.out = memoryview(_HEADER.pack(_LEAVING, 0, len(text)) + text)
                peer.push()
            peer.socket.close()
            for fd in peer.fds:
                os.close(fd)
            peer.fds.clear()


def _wait(peers: Iterable[_Peer], seconds: float) -> None:
    """Until one of these can go on, or the time is over."""
    poller = select.poll()
    for peer in peers:
        poller.register(peer.socket, select.POLLIN | (select.POLLOUT if peer.out else 0))
    poller.poll(max(0.0, seconds) * 1000)


def _workers(ranks: list[int]) -> str:
    return f"worker{'s' if ranks[1:] else ''} {', '.join(str(rank) for rank in ranks)}"


# ---- meeting


class Meeting(NamedTuple):
    mesh: Mesh
    store: Store
    """For `torch.distributed`, and for signs of life; keys of other attempts and other secrets are not seen."""


def meet(member: Member, timeout: float) -> Meeting:
    """Join the group, or raise ClusterError after `timeout` seconds, naming those who never came."""
    until = time.monotonic() + timeout
    host, port = _address(member)
    store = _store(host, port, member, timeout, until)
    with _listening(host) as (inner, outer, place):
        places = _arrive(store, member, {**place, "machine": _machine()}, timeout, until)
        key = hashlib.sha256(_secret() + store.get("token")).digest()
        sockets: dict[int, socket.socket] = {}
        try:
            for other in range(member.index):
                sockets[other] = _connect(member.index, places[other], key, until)
            while len(sockets) < member.workers - 1:
                rank, connection = _accept([one for one in (inner, outer) if one], member, key, until)
                sockets[rank] = connection
        except (OSError, ClusterError) as error:
            for one in sockets.values():
                one.close()
            missing = [rank for rank in range(member.workers) if rank not in (*sockets, member.index)]
            raise ClusterError(f"worker {member.index} has no connection with {_workers(missing)}: {error}") from error
    return Meeting(Mesh(member.index, sockets, timeout), store)


def _address(member: Member) -> tuple[str, int]:
    host, _, port = (member.master or "").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{member.workers} workers need a place to meet, got master={member.master!r}: start them with"
            " `plait launch` or torchrun, or give the role master='host:port'"
        )
    return host.strip("[]"), int(port)


def _secret() -> bytes:
    return os.environ.get("PLAIT_SECRET", "").encode()


def _store(host: str, port: int, member: Member, timeout: float, until: float) -> Store:
    """The chief's store; where torchrun's agent keeps one at this place, that."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = member.index == 0 and not agent
    while True:
        try:
            if not keeps:  # torch would wait several times as long as it is told to
                _knock(host, port, until)
            left = dt.timedelta(seconds=max(0.1, until - time.monotonic()))
            store = _kept.get((host, port)) if keeps else None
            store = store or TCPStore(host, port, None, keeps, left, wait_for_workers=False, multi_tenant=True)
            break
        except (OSError, RuntimeError) as error:
            early = isinstance(error, OSError) or "EADDRINUSE" in str(error)  # the group before may just be ending
            if early and time.monotonic() < until:
                time.sleep(0.02)
                continue
            what = "keep the group's store" if keeps else "reach the chief's store"
            reason = str(error).partition("\n")[0]
            raise ClusterError(
                f"worker {member.index} cannot {what} at {host}:{port} within {timeout:g} s: {reason}"
            ) from error
    if keeps:
        _kept[host, port] = store
    store.set_timeout(dt.timedelta(seconds=timeout))
    again = _meetings[member.index, host, port]
    _meetings[member.index, host, port] += 1
    mark = hmac.digest(_secret(), f"plait/{member.restart}".encode(), "sha256").hex()[:32] if _secret() else "open"
    return PrefixStore(f"plait/{member.restart}/{again}/{mark}", store)


def _knock(host: str, port: int, until: float) -> None:
    """Raise OSError if nobody listens there."""
    with socket.create_connection((host, port), max(0.1, until - time.monotonic())) as connection:
        if connection.getsockname() == connection.getpeername():  # a socket can meet itself on its own host
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")


def _arrive(store: Store, member: Member, place: dict[str, Any], timeout: float, until: float) -> list[dict[str, Any]]:
    """Say where this worker is, and wait until all have."""
    keys = [f"came/{rank}" for rank in range(member.workers)]
    missing = list(range(member.workers))
    try:
        if member.index == 0:
            store.set("token", secrets.token_hex(16))
        store.set(keys[member.index], json.dumps(place))
        while True:
            missing = [rank for rank in missing if not store.check([keys[rank]])]
            if not missing and store.check(["token"]):
                return [json.loads(store.get(key)) for key in keys]
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        reason = f"has waited {timeout:g} s"
    except RuntimeError:
        reason = "has lost the group's store, which the chief keeps"
    raise ClusterError(
        f"worker {member.index} {reason}: {_workers(missing or [0])} of {member.workers} never came. See that all are"
        " started, for the same restart, with the same PLAIT_SECRET"
    )


def _machine() -> str:
    """What is the same for all processes under one kernel, and for no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


@contextlib.contextmanager
def _listening(host: str) -> Iterator[tuple[socket.socket | None, socket.socket, dict[str, Any]]]:
    """Sockets to be reached at, from this host and from others, and where they are."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as stack:
        outer = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        loopback = str(address[0]).startswith(("127.", "::1"))
        own = str(address[0]) if loopback else _own_address(family, address)
        outer.bind((own if loopback and host in ("127.0.0.1", "localhost", "::1") else "", 0))
        outer.listen(socket.SOMAXCONN)
        # An address that only this host knows is the chief's host's: others reach it by the name that they were given.
        place = {"host": host if own.startswith(("127.", "::1")) else own, "port": outer.getsockname()[1], "unix": ""}
        inner = None
        if sys.platform == "linux":
            inner = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            place["unix"] = f"plait-{secrets.token_hex(16)}"
            inner.bind(f"\0{place['unix']}")  # a name without a file: nothing is left behind
            inner.listen(socket.SOMAXCONN)
        yield inner, outer, place


def _own_address(family: int, address: Any) -> str:
    """The address under which those at `address` see this host."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address[0], 9))  # nothing is sent
        return str(probe.getsockname()[0])


def _connect(rank: int, place: Mapping[str, Any], key: bytes, until: float) -> socket.socket:
    if place["unix"] and place["machine"] == _machine():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"\0{place['unix']}")
        except OSError:  # the same kernel, but another network namespace
            connection.close()
        else:
            return _introduce(connection, rank, key, until)
    connection = socket.create_connection((place["host"], place["port"]), max(0.1, until - time.monotonic()))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return _introduce(connection, rank, key, until)


def _introduce(connection: socket.socket, rank: int, key: bytes, until: float) -> socket.socket:
    """Say who this is; each side proves that it knows the key, without telling it."""
    connection.settimeout(max(0.1, until - time.monotonic()))
    nonce = secrets.token_bytes(16)
    connection.sendall(_HELLO.pack(_MAGIC, rank, nonce))
    other = _read(connection, 16)
    if not hmac.compare_digest(_read(connection, 32), _proof(key, b"accept", nonce, other, rank)):
        connection.close()
        raise ClusterError("it does not know the group's secret")
    connection.sendall(_proof(key, b"connect", nonce, other, rank))
    return connection


def _accept(listeners: list[socket.socket], member: Member, key: bytes, until: float) -> tuple[int, socket.socket]:
    """The next one that proves to be of the group; others are sent away."""
    while True:
        left = until - time.monotonic()
        ready, _, _ = select.select(listeners, [], [], max(0.0, left))
        if not ready:
            raise ClusterError("nobody connected in time")
        connection, _ = ready[0].accept()
        connection.settimeout(min(max(0.1, left), _STRANGER_SECONDS))
        try:
            magic, rank, nonce = _HELLO.unpack(_read(connection, _HELLO.size))
            other = secrets.token_bytes(16)
            connection.sendall(other + _proof(key, b"accept", nonce, other, rank))
            known = hmac.compare_digest(_read(connection, 32), _proof(key, b"connect", nonce, other, rank))
            if magic == _MAGIC and known and member.index < rank < member.workers:
                if connection.family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                return rank, connection
        except OSError:
            pass
        connection.close()


def _proof(key: bytes, side: bytes, *parts: Any) -> bytes:
    return hmac.digest(
        key, side + b"".join(p if isinstance(p, bytes) else struct.pack("<I", p) for p in parts), "sha256"
    )


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("it hung up")
        data += more
    return data
