from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from plait.errors import DataError, FederalError
from plait.federal.communicator import Communicator
from plait.federal.settings import Party
from plait.serve import answering as room
from plait.serve.answering import Parts
from plait.serve.peer import ANSWER, ASK, FIRST, KEYS
from plait.serve.settings import Settings

from .conftest import write_version
from .parted import ROWS, answering, asking, open_part, write_follower, write_leader


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    monkeypatch.setattr(room, "load", open_part)


def ask(asker, pair="one", *keys):
    return asker.ask(pair, np.array(keys or [10], np.int64))["the/half"].tolist()


def test_each_pair_has_its_own_part(tmp_path):
    write_follower(tmp_path, "one", 2.0)
    write_follower(tmp_path, "two", 3.0)
    with answering(tmp_path) as answerer, asking(answerer.endpoint) as asker:
        assert ask(asker, "two") == [[3, 3]]
        assert ask(asker, "one") == [[2, 2]]
        write_follower(tmp_path, "three", 4.0)  # found when it is asked for
        assert ask(asker, "three") == [[4, 4]]


def test_old_parts_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "KEPT", 2)
    for number in range(3):
        write_follower(tmp_path, str(number), float(number))
    parts = Parts(tmp_path, Settings())
    assert [parts.get(pair) is not None for pair in ("0", "1", "2", "9")] == [True, True, True, False]
    assert len(parts._opened) == 2


def test_several_models(tmp_path):
    write_follower(tmp_path / "one", "one", 2.0)
    write_follower(tmp_path / "two", "two", 3.0)
    parts = Parts(tmp_path, Settings())
    assert parts.key == "id"
    assert parts.get("one") is not parts.get("two")


def test_nothing_to_answer_with(tmp_path):
    write_version(tmp_path / "doubler", 1)
    write_leader(tmp_path / "leader")
    with pytest.raises(DataError, match="no part that sends"):
        Parts(tmp_path, Settings())


def test_more_rows_than_a_batch_are_computed_in_pieces(tmp_path):
    write_follower(tmp_path)
    with answering(tmp_path) as answerer, asking(answerer.endpoint) as asker:
        assert ask(asker, "one", 10, 20, 30, 20, 10) == [[2, 2], [4, 4], [6, 6], [4, 4], [2, 2]]


def test_what_goes_wrong_inside_is_said_to_nobody_else(tmp_path, caplog):
    write_follower(tmp_path)

    def rows(keys):
        if keys[0] == 1:
            raise ValueError("secret 4711")
        return {"x": ROWS["x"][:1]} if keys[0] == 2 else {"other": ROWS["x"][:1]}

    with answering(tmp_path, rows=rows) as answerer, asking(answerer.endpoint) as asker:
        with caplog.at_level(logging.WARNING, "plait"):
            for key in (1, 3):
                with pytest.raises(RuntimeError, match="the follower's part failed"):
                    ask(asker, "one", key)
        assert "4711" not in caplog.text
        assert "rows has no 'x'" in caplog.text
        assert ask(asker, "one", 2) == [[6, 6]]


class Leader:
    """A leader that says what it likes."""

    def __init__(self, endpoint, facts):
        self.communicator = Communicator(Party(role="leader", peer=endpoint, timeout=10.0))
        self.channel = self.communicator.connect(0, facts)

    def __enter__(self):
        self.channel.open()
        return self.channel

    def __exit__(self, *error):
        self.communicator.close()


FACTS = {"serving": 1, "job": "plait"}


def test_what_is_said(tmp_path):
    write_follower(tmp_path)
    with answering(tmp_path) as answerer, Leader(answerer.endpoint, FACTS) as channel:
        channel.send(KEYS, 7, torch.tensor([30]), words=[(ASK, {"turn": 7, "pair": "one"})])
        assert channel.hear(ANSWER) == {"turn": 7, "sent": ["the/half"]}
        assert channel.receive(FIRST, 7).tolist() == [[6, 6]]


@pytest.mark.parametrize("word", [None, 5, {}, {"turn": "1", "pair": "one"}, {"turn": 1, "pair": 2}, {"turn": True}])
def test_what_is_no_question_ends_the_session_and_not_the_server(tmp_path, word):
    write_follower(tmp_path)
    with answering(tmp_path) as answerer:
        with Leader(answerer.endpoint, FACTS) as channel:
            channel.tell(ASK, word)
            with pytest.raises(FederalError, match="the follower has ended"):
                channel.hear(ANSWER)
        with asking(answerer.endpoint) as asker:
            assert ask(asker) == [[2, 2]]


@pytest.mark.parametrize("keys", [torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1], dtype=torch.int32)])
def test_keys_of_another_form_are_refused(tmp_path, keys):
    write_follower(tmp_path)
    with answering(tmp_path) as answerer:
        with Leader(answerer.endpoint, FACTS) as channel:
            channel.send(KEYS, 1, keys, words=[(ASK, {"turn": 1, "pair": "one"})])
            with pytest.raises(FederalError, match="refuses what the leader"):
                channel.hear(ANSWER)
        with asking(answerer.endpoint) as asker:
            assert ask(asker) == [[2, 2]]


def test_too_many_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "MAX_ROWS", 3)
    write_follower(tmp_path)
    with answering(tmp_path) as answerer, Leader(answerer.endpoint, FACTS) as channel:
        channel.send(KEYS, 1, torch.tensor([10] * 4), words=[(ASK, {"turn": 1, "pair": "one"})])
        with pytest.raises(FederalError, match="the follower has ended"):
            channel.hear(ANSWER)


def test_one_that_trains_is_not_served(tmp_path):
    write_follower(tmp_path)
    with answering(tmp_path) as answerer:
        leader = Leader(answerer.endpoint, {"protocol": 1, "job": "plait"})
        with pytest.raises(FederalError, match="do not fit together"):
            leader.channel.open()
        leader.communicator.close()
