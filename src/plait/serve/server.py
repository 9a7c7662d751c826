"""`plait serve`: the application on uvicorn, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from plait.errors import ConfigError, DataError
from plait.federal.settings import Party
from plait.serve.rows import Rows, read_rows
from plait.serve.settings import Settings

__all__ = ["answer", "bind", "party_of", "serve"]

log = logging.getLogger("plait")

KEEP_ALIVE = 75
"""Seconds that a connection without requests is kept: longer than clients and proxies keep theirs."""

BACKLOG = 2048
SILENCE = 60.0
"""Seconds after which a silent party is met anew."""


def serve(
    directory: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    party: Party | None = None,
) -> None:
    """Serve the models of `directory` until SIGTERM or SIGINT; requests under way are answered first.

    `party` says who this is, and where the other party is, where the models are parts of a federation's.
    """
    try:
        import uvicorn  # noqa: PLC0415 - only who serves needs it

        from plait.serve.app import make_app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'plait[serve]'") from error
    if not Path(directory).is_dir():
        raise DataError(f"there is no directory {directory}: name one with exported models")
    chosen = settings or Settings()
    _log_to_terminal()
    with contextlib.ExitStack() as stack:
        asker = None
        if party is not None:
            from plait.serve.asking import Asker  # noqa: PLC0415

            asker = Asker(party, chosen.timeout / 2)
            stack.callback(asker.close)
        app = make_app(directory, chosen, asker)
        with bind(host, port) as sock:
            asyncio.run(_serve(uvicorn.Server(_config(uvicorn, app, chosen)), app, sock))
    log.info("stopped")


def _config(uvicorn: Any, app: Any, settings: Settings) -> Any:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody looks at a client's address
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(settings.stop_timeout)),
    )


def answer(
    directory: str | os.PathLike[str],
    *,
    party: Party,
    rows: Rows | str | os.PathLike[str],
    settings: Settings | None = None,
) -> None:
    """Answer the other party, and nobody else, with the parts of `directory`, until SIGTERM or SIGINT.

    `rows` is a function that gives the inputs of the rows with some keys, or a safetensors file that has them.
    """
    from plait.serve.answering import Answerer, Parts  # noqa: PLC0415 - only who answers needs it

    chosen = settings or Settings()
    if not Path(directory).is_dir():
        raise DataError(f"there is no directory {directory}: name one with exported parts")
    _log_to_terminal()
    parts = Parts(directory, chosen)
    looked_up = rows if callable(rows) else read_rows(rows, parts.key)
    answerer = Answerer(party, parts, looked_up, batch=chosen.batch)
    try:
        words = "listens at" if party.listen is not None else "dials"
        stop = threading.Event()
        before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
        log.info("the %s %s %s, for the %s", party.role, words, answerer.endpoint, party.peer_role)
        try:
            stop.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    finally:
        answerer.close()
    log.info("stopped")


def party_of(role: str | None, **given: Any) -> Party | None:
    """The party that options describe; None if they say nothing of any."""
    if role is None:
        said = [name for name in ("listen", "peer", "certs", "insecure", "rows") if given.get(name)]
        if said:
            raise ConfigError(f"--{said[0]} is for a party of a federation: write --party leader or --party follower")
        return None
    certs = None if given["certs"] is None else str(given["certs"])
    fields = {name: given[name] for name in ("listen", "peer", "job", "insecure")}
    return Party(role=role, certs=certs, timeout=SILENCE, **fields)


async def _serve(server: Any, app: Any, sock: socket.socket) -> None:
    """Start up, say where, and run. The models are loaded first, by themselves: what is wrong is our own error then."""
    async with app.router.lifespan_context(app):
        sock.listen(BACKLOG)  # now, so that who reads the next line finds somebody
        log.info("http://%s", _address(sock))
        before = {number: signal.signal(number, _done) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            await server.serve(sockets=[sock])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet: nobody connects before the models are loaded."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"the port is {port}: write one from 1 to 65535, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"there is no address {host}:{port} ({error}): write --host and --port") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ConfigError(f"{host}:{port} cannot be used ({error}): write another --port, or --port 0") from error
    return made


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _done(number: int, frame: FrameType | None) -> None:
    """Nothing: the web server raises a signal again once it has stopped for it, and that it stopped was all we want."""


def _log_to_terminal() -> None:
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a line for every malformed request fills disks
