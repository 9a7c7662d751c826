"""`plait serve`: the application on uvicorn, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from plait.errors import ConfigError, DataError
from plait.serve.settings import Settings

__all__ = ["bind", "serve"]

log = logging.getLogger("plait")

KEEP_ALIVE = 75
"""Seconds that a connection without requests is kept: longer than clients and proxies keep theirs."""

BACKLOG = 2048


def serve(
    directory: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
) -> None:
    """Serve the models of `directory` until SIGTERM or SIGINT; requests under way are answered first."""
    try:
        import uvicorn  # noqa: PLC0415 - only who serves needs it

        from plait.serve.app import make_app  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'plait[serve]'") from error
    if not Path(directory).is_dir():
        raise DataError(f"there is no directory {directory}: name one with exported models")
    chosen = settings or Settings()
    _log_to_terminal()
    app = make_app(directory, chosen)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(chosen.stop_timeout)),
    )
    with bind(host, port) as sock:
        asyncio.run(_serve(uvicorn.Server(config), app, sock))
    log.info("stopped")


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
