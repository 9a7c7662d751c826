"""The socket, and what is missing."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from plait.errors import ConfigError, DataError
from plait.federal.settings import Party
from plait.serve.server import answer, bind, party_of, serve


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


NOBODY = {"listen": None, "peer": None, "certs": None, "job": "plait", "insecure": False, "rows": None}


def test_a_party_from_options():
    assert party_of(None, **NOBODY) is None
    found = party_of("leader", **{**NOBODY, "peer": "host:1", "certs": Path("certs"), "job": "digits"})
    assert (found.role, found.peer, found.certs, found.job) == ("leader", "host:1", "certs", "digits")


@pytest.mark.parametrize("option", [{"peer": "host:1"}, {"listen": "host:1"}, {"rows": Path("x")}, {"insecure": True}])
def test_options_of_a_party_without_one(option):
    with pytest.raises(ConfigError, match=f"--{next(iter(option))} is for a party"):
        party_of(None, **{**NOBODY, **option})


def test_a_party_says_where_the_other_is():
    with pytest.raises(ConfigError, match="give one of them"):
        party_of("follower", **NOBODY)


def test_nothing_to_answer_with(tmp_path):
    party = Party(role="follower", listen="127.0.0.1:0")
    with pytest.raises(DataError, match="no directory"):
        answer(tmp_path / "nowhere", party=party, rows=tmp_path / "rows")
    with pytest.raises(DataError, match="no part that sends"):
        answer(tmp_path, party=party, rows=tmp_path / "rows")
