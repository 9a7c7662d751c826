"""Links: gRPC streams with mutual TLS that carry a channel's frames from one party to the other.

One party listens, the other dials; then both are alike. There is one method, /plait.Federal/Exchange: a stream of
frames each way. The listener answers with a header as soon as it has seen who dials, and the dialler sends no frame
before that.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import grpc

from plait.errors import ConfigError
from plait.federal.certificates import Credentials, load
from plait.federal.channel import Channel, Connection
from plait.federal.reading import Reading
from plait.federal.settings import Party, split_endpoint
from plait.federal.wire import FrameError

__all__ = ["Dialer", "Link", "Listener", "connect", "is_loopback"]

SERVICE, METHOD = "plait.Federal", "Exchange"
ACCEPTED = ("plait-accepted", "1")
"""The header with which a listener takes a peer."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 2.0
"""Seconds between two attempts to dial: at first, and at most."""
CLOSE_SECONDS = 2.0
"""For how long the orderly end of a stream is waited for before it is cut off."""
MAX_MESSAGE = (1 << 30) + (1 << 16)
"""gRPC takes no memory for a longer one. The limit that users are told is that of `wire.decode`."""
STREAMS = 4
"""Streams that a listener may have at once: the one in use, those that it follows, and those being refused."""
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    # for a peer that stands still, or whose network went without a word; the channel's heartbeats cannot see that
    # while a message waits to be sent
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # a window that is large from the start, and large frames: tensors do not wait for gRPC to find out how much may be
    # under way; how much may really be is the channel's window
    ("grpc.http2.lookahead_bytes", 1 << 24),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
]
LISTENER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # a second listener on the port is an error, and does not get half of the connections
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
DIALER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.enable_retries", 0),  # the channel says again what was lost
    ("grpc.use_local_subchannel_pool", 1),  # each attempt is a new one, and waits for as long as we say
]
HANDSHAKE_WORDS = ("andshake", "erification", "Socket closed", "reset by peer")
"""In gRPC's reasons, when somebody answered and the two sides did not come to terms."""
TLS_HINT = (
    "do both certificates come from the CA that both parties have, are they in date, and do both parties have one?"
)
PLAIN_HINT = "this party has no certificates: does the other one ask for them?"
FINAL_WORDS = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed")
"""In gRPC's words for a peer whose certificate this party does not take."""
STRANGERS = 3
"""After how many of them it is no use to dial again."""
REFUSALS = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)

log = logging.getLogger("plait")


class Listener:
    """Waits for one peer, and carries the frames of `channel` once that peer has shown who it is."""

    def __init__(self, channel: Channel, endpoint: str, peer: str, credentials: Credentials | None = None) -> None:
        self._channel, self._peer, self._credentials = channel, peer, credentials
        self._closed = threading.Event()
        self._connection: Connection | None = None
        self._readers: list[threading.Thread] = []
        self._say_refused = _Occasionally(60.0)
        self._pool = _DaemonThreads("plait-listener")
        handler = grpc.stream_stream_rpc_method_handler(self._exchange)
        self._server = grpc.server(
            self._pool,
            handlers=[grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})],
            options=[*OPTIONS, *LISTENER_OPTIONS],
            maximum_concurrent_rpcs=STREAMS,
        )
        try:
            port = self._bind(endpoint)
        except RuntimeError as error:
            self.close()
            raise ConfigError(f"listen={endpoint!r}: this machine cannot listen there ({error})") from None
        self.endpoint = f"{split_endpoint('listen', endpoint)[0]}:{port}"
        """Where it listens; the port is known even if 0 was asked for."""
        self._server.start()

    def close(self) -> None:
        """End the stream and every thread. Close the channel first, so that all it said arrives."""
        self._closed.set()
        if self._connection is not None:
            self._connection.lost("this party closed the link")
        self._server.stop(CLOSE_SECONDS).wait(2 * CLOSE_SECONDS)
        self._pool.shutdown(wait=True)
        for reader in self._readers:
            reader.join(CLOSE_SECONDS)

    def _bind(self, endpoint: str) -> int:
        if self._credentials is None:
            return int(self._server.add_insecure_port(endpoint))
        pair = (self._credentials.key, self._credentials.certificate)
        asks = grpc.ssl_server_credentials([pair], self._credentials.ca, require_client_auth=True)
        return int(self._server.add_secure_port(endpoint, asks))

    def _exchange(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self._check_name(context)
        connection = self._connection = self._channel.attach()
        # this wakes `outgoing` when the stream breaks while there is nothing to send
        if not context.add_callback(lambda: connection.lost("the stream broke")):
            connection.lost("the stream broke at once")
        if self._closed.is_set():
            connection.lost("this party closed the link")
        context.send_initial_metadata((ACCEPTED,))
        log.info("the %s has connected from %s", self._peer, context.peer())
        reader = threading.Thread(
            target=_read, args=(requests, connection, context.cancel), name="plait-listener-reader", daemon=True
        )
        self._readers = [*(thread for thread in self._readers if thread.is_alive()), reader]
        reader.start()
        yield from connection.outgoing()
        if connection.dropped and not self._closed.is_set():
            context.cancel()  # the channel has given it up; an orderly end would wait for the peer

    def _check_name(self, context: grpc.ServicerContext) -> None:
        if self._credentials is None:
            return
        names = [name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())]
        if self._peer not in names:
            shown = ", ".join(names)[:200] or "nobody"
            text = "a connection from %s was refused: its certificate is for %s, and only the %s may connect"
            self._say_refused(logging.WARNING, text, context.peer(), shown, self._peer)
            text = f"this party's certificate is for {shown}, and only the {self._peer} may connect"
            context.abort(grpc.StatusCode.PERMISSION_DENIED, text)


class Dialer:
    """Dials the peer, carries the frames of `channel`, and dials again when the stream breaks, until it is closed."""

    def __init__(self, channel: Channel, endpoint: str, peer: str, credentials: Credentials | None = None) -> None:
        self.endpoint = endpoint
        self._channel, self._peer, self._credentials = channel, peer, credentials
        self._closed = threading.Event()
        self._call: Any = None
        self._connection: Connection | None = None
        self._strangers = 0
        self._say_absent, self._say_failed = _Occasionally(60.0), _Occasionally(30.0)
        self._thread = threading.Thread(target=self._run, name="plait-dialer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the stream and every thread. Close the channel first, so that all it said arrives."""
        self._closed.set()
        connection, call = self._connection, self._call
        if connection is not None:
            connection.lost("this party closed the link")
            self._thread.join(CLOSE_SECONDS)
        if call is not None:
            call.cancel()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        wait = FIRST_WAIT / 2
        while not self._closed.is_set():
            try:
                cut_off = self._dial()
            except _RefusedError as error:
                log.warning("%s", error)
                self._channel.refuse(str(error))
                return
            wait = FIRST_WAIT if cut_off else min(2 * wait, LONGEST_WAIT)
            self._closed.wait(wait)

    def _dial(self) -> bool:
        """Dial once, and carry frames until the stream ends; whether there was a stream, and the network ended it."""
        taken: Future[_Taken | None] = Future()
        with self._open() as channel:
            call = self._call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(self._frames(taken))
            if self._closed.is_set():  # `close` may not have seen the call
                call.cancel()
            try:
                if ACCEPTED not in call.initial_metadata():
                    self._explain(call)
                    return False
                self._carry(call, taken)
                return call.code() is grpc.StatusCode.UNAVAILABLE
            finally:
                if not taken.done():
                    taken.set_result(None)

    def _frames(self, taken: Future[_Taken | None]) -> Iterator[bytes]:
        """What this party sends in a call: nothing until it is taken, then all that the channel has to say."""
        stream = taken.result()
        if stream is None:
            return
        connection, cancel = stream
        yield from connection.outgoing()
        if connection.dropped and not self._closed.is_set():
            cancel()  # the channel has given it up; what still comes need not be waited for

    def _carry(self, call: Any, taken: Future[_Taken | None]) -> None:
        connection = self._connection = self._channel.attach()
        if self._closed.is_set():
            connection.lost("this party closed the link")
        log.info("connected to the %s at %s", self._peer, self.endpoint)
        taken.set_result((connection, call.cancel))
        reason = _read(call, connection, call.cancel)
        self._connection = None
        if not self._closed.is_set():
            log.info("the connection to the %s at %s ended: %s", self._peer, self.endpoint, reason)

    def _open(self) -> Any:
        options: list[tuple[str, int | str]] = [*OPTIONS, *DIALER_OPTIONS]
        if is_loopback(self.endpoint):
            options.append(("grpc.enable_http_proxy", 0))
        if self._credentials is None:
            return grpc.insecure_channel(self.endpoint, options)
        own = self._credentials
        shows = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
        return grpc.secure_channel(self.endpoint, shows, [*options, ("grpc.ssl_target_name_override", self._peer)])

    def _explain(self, call: Any) -> None:
        """Say, once in a while, why there was no stream. A refusal is final."""
        with contextlib.suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
            call.exception(timeout=CLOSE_SECONDS)
        call.cancel()  # a stranger's service may have taken the call
        code, details = call.code(), call.details() or ""
        where = f"the {self._peer} at {self.endpoint}"
        if code in REFUSALS:
            raise _RefusedError(f"{where} refused this party: {details}")
        if self._closed.is_set():
            return
        if any(word in details for word in FINAL_WORDS):
            self._strangers += 1
            if self._strangers >= STRANGERS:
                raise _RefusedError(
                    f"{where} was refused by this party: its certificate is not the {self._peer}'s, or not from the CA "
                    f"of this party's certs: give both the ca.pem of one `plait certs init`, and each its own role"
                )
        if any(word in details for word in HANDSHAKE_WORDS):
            hint = TLS_HINT if self._credentials is not None else PLAIN_HINT
            self._say_failed(logging.WARNING, "%s answered, and no connection was made: %s (%s)", where, details, hint)
        else:
            self._say_absent(logging.INFO, "%s is not there yet, and is tried again: %s: %s", where, code.name, details)


_Taken = tuple[Connection, Callable[[], object]]
"""The connection of a stream that was taken, and what cuts the stream off."""
Link = Listener | Dialer
"""What `connect` gives: it has an `endpoint`, and `close()`."""


def connect(channel: Channel, party: Party) -> Link:
    """Listen or dial, as `party` says; its certificates are checked first."""
    credentials = _credentials(party)
    if party.listen is not None:
        return Listener(channel, party.listen, party.peer_role, credentials)
    return Dialer(channel, party.endpoint, party.peer_role, credentials)


def is_loopback(endpoint: str) -> bool:
    """Whether nothing that is sent to `endpoint` leaves this machine."""
    host = split_endpoint("endpoint", endpoint)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _credentials(party: Party) -> Credentials | None:
    if party.certs is not None:
        if party.insecure:
            raise ConfigError(f"certs={party.certs!r} and insecure=True: give one of them")
        return load(party.certs, party.role)
    if is_loopback(party.endpoint):
        return None
    if not party.insecure:
        raise ConfigError(
            f"the {party.role} has no certificates, and {party.endpoint} is not within this machine: make them with "
            "`plait certs init --party leader --party follower DIR`, and give certs='DIR'; insecure=True, for a tunnel "
            "of your own, does without"
        )
    log.warning(
        "insecure=True: what the %s sends and receives at %s is plain text, and nobody is asked for a certificate",
        party.role,
        party.endpoint,
    )
    return None


def _read(frames: Iterable[bytes], connection: Connection, cancel: Callable[[], object]) -> str:
    """Give all that comes to the connection; how it ended."""

    def failed(error: Exception) -> str:
        if isinstance(error, FrameError):
            log.warning("a frame was refused: %s; the connection is made anew", error)
            cancel()
            return f"a frame was refused: {error}"
        if not isinstance(error, grpc.RpcError):
            raise error
        # a dialler's call is its own error; a listener's error says nothing
        return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else "the stream broke"

    connection.reading = Reading(frames, connection, failed, cancel)
    return connection.reading.carry()


class _DaemonThreads(Executor):
    """A thread for each stream. For those of a ThreadPoolExecutor Python waits before a program can say goodbye."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the future's owner raises it
                done.set_exception(error)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        del cancel_futures  # none waits
        for thread in self._threads if wait else []:
            thread.join(2 * CLOSE_SECONDS)


class _RefusedError(Exception):
    """The peer does not take this party, and will not."""


class _Occasionally:
    """Logs something at once, and the same kind of thing again only after a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def __call__(self, level: int, text: str, *values: object) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._seconds
            log.log(level, text, *values)
