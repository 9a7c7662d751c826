"""Who may ask, and what it takes to meet again."""

from __future__ import annotations

import logging
import socket
import time

import numpy as np
import pytest

from plait.errors import ConfigError, UnavailableError
from plait.federal import certificates
from plait.federal.settings import Party
from plait.serve import answering as room
from plait.serve import asking as asking_room
from plait.serve.answering import Answerer, Parts
from plait.serve.asking import Asker
from plait.serve.peer import Peer
from plait.serve.rows import Table
from plait.serve.settings import Settings

from .parted import ROWS, answering, asking, open_part, write_follower

KEYS = np.array([10])


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    monkeypatch.setattr(room, "load", open_part)
    monkeypatch.setattr(asking_room, "GRACE_SECONDS", 0.5)


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    made = {}
    for name in ("own", "other"):
        made[name] = str(tmp_path_factory.mktemp(name))
        certificates.init(made[name])
    return made


@pytest.fixture
def part(tmp_path):
    write_follower(tmp_path)
    return tmp_path


def until(look, seconds=15.0):
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_over_mutual_tls(part, certs):
    with (
        answering(part, certs=certs["own"]) as answerer,
        asking(answerer.endpoint, certs=certs["own"]) as asker,
    ):
        assert asker.ask("one", KEYS)["the/half"].tolist() == [[2, 2]]


def test_the_party_that_answers_may_be_the_one_that_dials(part, certs):
    asked = Party(role="leader", listen="127.0.0.1:0", certs=certs["own"], timeout=20.0)
    asker = Asker(asked, 10.0)
    dials = Party(role="follower", peer=asker.endpoint, certs=certs["own"], timeout=20.0)
    answerer = Answerer(dials, Parts(part, Settings()), Table(ROWS), batch=2)
    try:
        until(lambda: asker.ready)
        assert asker.ask("one", KEYS)["the/half"].tolist() == [[2, 2]]
    finally:
        answerer.close()
        asker.close()


@pytest.mark.parametrize("shown", ["other", None])
def test_a_stranger_gets_nothing(part, certs, shown):
    theirs = certs[shown] if shown else None
    with (
        answering(part, certs=certs["own"]) as answerer,
        asking(answerer.endpoint, certs=theirs) as stranger,
    ):
        with pytest.raises(UnavailableError, match="cannot be reached"):
            stranger.ask("one", KEYS)
        with asking(answerer.endpoint, certs=certs["own"]) as asker:
            assert asker.ask("one", KEYS)["the/half"].tolist() == [[2, 2]]


def test_another_job_is_refused_and_the_right_one_is_not(part):
    with answering(part) as answerer:
        with asking(answerer.endpoint, job="another") as stranger, pytest.raises(UnavailableError):
            stranger.ask("one", KEYS)
        with asking(answerer.endpoint) as asker:
            until(lambda: asker.ready)
            assert asker.ask("one", KEYS)["the/half"].tolist() == [[2, 2]]


def test_what_is_wrong_from_the_start_is_said_at_once(certs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen there"):
            Peer(Party(role="leader", listen=endpoint), lambda channel: None, lambda: None)
    with pytest.raises(ConfigError, match="has no certificates"):
        Peer(Party(role="leader", peer="192.0.2.1:50051"), lambda channel: None, lambda: None)


def test_the_same_trouble_is_said_once(caplog):
    with caplog.at_level(logging.WARNING, "plait"), asking("127.0.0.1:9", timeout=0.05) as asker:
        time.sleep(1.0)
        assert not asker.ready
    said = [record.getMessage() for record in caplog.records if "waited" in record.getMessage()]
    assert len(said) <= 4  # it waits longer each time


def test_a_mistake_of_ours_ends_a_session_and_not_the_server(part, monkeypatch, caplog):
    with answering(part) as answerer:
        with monkeypatch.context() as patch, asking(answerer.endpoint) as asker:
            patch.setattr(answerer, "_answer", lambda pair, keys: 1 / 0)
            with pytest.raises(UnavailableError, match="cannot be reached"):
                asker.ask("one", KEYS)
        with asking(answerer.endpoint) as asker:
            until(lambda: asker.ready)
            assert asker.ask("one", KEYS)["the/half"].tolist() == [[2, 2]]
    assert "what should not have been" in caplog.text
