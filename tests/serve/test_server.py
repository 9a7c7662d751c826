"""The socket, and what is missing."""

from __future__ import annotations

import socket
import sys

import pytest

from plait.errors import ConfigError, DataError
from plait.serve.server import bind, serve


def test_a_port_that_is_taken():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_no_such_address():
    with pytest.raises(ConfigError, match="--host"):
        bind("no.such.host.invalid", 80)


@pytest.mark.parametrize("port", [-1, 70000])
def test_no_such_port(port):
    with pytest.raises(ConfigError, match="65535"):
        bind("127.0.0.1", port)


def test_nothing_listens_before_the_models_are_loaded():
    with bind("127.0.0.1", 0) as bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname(), timeout=5)


def test_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"pip install 'plait\[serve\]'"):
        serve(tmp_path)


def test_no_directory(tmp_path):
    with pytest.raises(DataError, match="no directory"):
        serve(tmp_path / "nowhere")


def test_nothing_to_serve(tmp_path):
    with pytest.raises(DataError, match="no exported model"):
        serve(tmp_path, port=0)
