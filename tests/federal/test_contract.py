"""The contract: announcements of both parties, and what is made of them."""

from __future__ import annotations

import contextlib
from dataclasses import asdict

import pytest
import torch

from plait import efl
from plait.errors import FederalError, FunctionError
from plait.federal.contract import TOPIC, Contract, Item, dtype_of, key_of, read_item

from .channels import error_of, pair, together

KEY = "TRAIN:"
SEND = Item("send", "hidden", "float32", True, [None, 5], 32)
RECV = Item("recv", "hidden", "float32", True, None)


@contextlib.contextmanager
def contracts():
    """Both parties' contracts, each with its channel."""
    with pair() as (leader, follower, _):
        yield (Contract("leader", "follower"), leader), (Contract("follower", "leader"), follower)


def built(contract, channel, *items, key=KEY, rows=32):
    """Announce a function's items, and the end of the build; what was received is asked for."""
    contract.begin(channel, key, rows)
    found = []
    for item in items:
        contract.add(channel, key, item)
        if item.kind == "recv":
            found.append(contract.form(channel, key, item.name))
    contract.finish(channel)
    return found


def refused(contract, channel, *items, **settings):
    """The error that ends the build; the other party is told, as a model does."""
    error = error_of(lambda: built(contract, channel, *items, **settings), FederalError)
    channel.fail(str(error))
    return error


def test_scopes_have_names_that_both_parties_write_alike():
    assert key_of(efl.TaskScope(efl.MODE.TRAIN)) == "TRAIN:"
    assert key_of(efl.TaskScope(efl.MODE.EVAL, "click")) == "EVAL:click"


def test_both_come_to_the_same_numbers_and_forms():
    with contracts() as (leader, follower):
        back = Item("send", "back", "bfloat16", False, [None, 2, 3], 32)
        found, _ = together(
            lambda: built(*leader, RECV, back),
            lambda: built(*follower, SEND, Item("recv", "back", "bfloat16", False, None)),
        )
        assert found == [SEND]
        slots = {(KEY, "leader", "back"): 2, (KEY, "follower", "hidden"): 1}
        assert leader[0].slots == follower[0].slots == slots
        wanted = {1: (torch.float32, (32, 5)), 2: (torch.bfloat16, (32, 2, 3))}
        assert leader[0].forms() == follower[0].forms() == wanted
        assert leader[0].shared(KEY)
        assert not leader[0].shared("EVAL:")


def test_a_form_is_known_before_the_other_has_built_all():
    with contracts() as (leader, follower):
        contract, channel = follower
        contract.begin(channel, KEY, 32)
        contract.add(channel, KEY, SEND)
        leader[0].begin(leader[1], KEY, 32)
        leader[0].add(leader[1], KEY, RECV)
        assert leader[0].form(leader[1], KEY, "hidden") == SEND


def test_a_function_is_announced_once():
    with contracts() as ((contract, channel), (_, other)):
        contract.begin(channel, KEY, 32)
        contract.begin(channel, KEY, 32)
        channel.tell(TOPIC, "last")
        assert [other.hear(TOPIC) for _ in range(2)] == [{"scope": KEY, "rows": 32}, "last"]


def test_one_name_in_both_directions_is_two_tensors():
    with contracts() as (leader, follower):
        together(lambda: built(*leader, SEND, RECV), lambda: built(*follower, SEND, RECV))
        assert sorted(leader[0].slots.values()) == [1, 2]


def test_one_name_twice():
    with contracts() as ((contract, channel), _):
        contract.add(channel, KEY, SEND)
        with pytest.raises(FunctionError, match=r"send of 'hidden' twice in one call for TRAIN:"):
            contract.add(channel, KEY, SEND)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (RECV, Item("send", "other", "float32", True, [None, 5], 32), ["which the follower never sends", "'other'"]),
        (Item("recv", "hidden", "float64", True, None), SEND, ["float64 [*, 5]", "float32 [*, 5]"]),
        (Item("recv", "hidden", "float32", False, None), SEND, ["without gradient", "with gradient"]),
        (Item("recv", "hidden", "float32", True, [None, 6]), SEND, ["[*, 6]", "[*, 5]"]),
        (Item("recv", "hidden", "float32", True, [None]), SEND, ["float32 [*],", "[*, 5]"]),
        (SEND, SEND, ["'hidden' of the leader", "'hidden' of the follower", "missing"]),
    ],
    ids=["name", "dtype", "gradient", "shape", "dimensions", "nobody receives"],
)
def test_what_differs_is_shown_at_both(ours, theirs, words):
    with contracts() as (leader, follower):
        for error in together(lambda: refused(*leader, ours), lambda: refused(*follower, theirs)):
            assert [word for word in words if word not in str(error)] == []


def test_rows_differ_only_where_both_exchange_something():
    with contracts() as (leader, follower):
        leader[0].begin(leader[1], "EVAL:", 100)
        follower[0].begin(follower[1], "EVAL:", 10)
        together(lambda: built(*leader, RECV), lambda: built(*follower, SEND))
    with contracts() as (leader, follower):
        for error in together(lambda: refused(*leader, RECV), lambda: refused(*follower, SEND, rows=16)):
            assert "TRAIN rows of a batch" in str(error)


class TestComingBack:
    def test_a_peer_that_builds_the_same_anew(self):
        with contracts() as (leader, follower):
            together(lambda: built(*leader, RECV), lambda: built(*follower, SEND))
            again = Contract("follower", "leader")
            together(lambda: leader[0].repeat(leader[1]), lambda: built(again, follower[1], SEND))
            assert again.slots == leader[0].slots

    def test_both_come_back(self):
        with contracts() as (leader, follower):
            together(lambda: built(*leader, RECV), lambda: built(*follower, SEND))
            together(lambda: leader[0].repeat(leader[1]), lambda: follower[0].repeat(follower[1]))

    def test_a_peer_that_comes_back_with_another_program(self):
        wider = Item("send", "hidden", "float32", True, [None, 6], 32)
        with contracts() as (leader, follower):
            together(lambda: built(*leader, RECV), lambda: built(*follower, SEND))
            again = Contract("follower", "leader")
            error, _ = together(
                lambda: error_of(lambda: leader[0].repeat(leader[1]), FederalError),
                lambda: built(again, follower[1], wider),
            )
            assert "the follower came back with another program" in str(error)


GOOD = asdict(SEND)


class TestAnnouncements:
    """What a peer says is not believed before it was looked at."""

    def test_an_item_comes_back_as_it_was(self):
        assert read_item(GOOD) == SEND
        assert read_item(asdict(RECV)) == RECV

    @pytest.mark.parametrize(
        "announcement",
        [
            3,
            None,
            [],
            "rows",
            {},
            {"rows": 3},
            {"scope": 3, "rows": 3},
            {"scope": KEY, "item": 3},
            {"scope": KEY, "item": {}},
            {"scope": KEY, "item": {**GOOD, "more": 1}},
            *(
                {"scope": KEY, "item": {**GOOD, name: value}}
                for name, value in [
                    ("kind", "push"),
                    ("name", 3),
                    ("dtype", None),
                    ("gradient", 1),
                    ("rows", -1),
                    ("rows", 1.5),
                    ("shape", None),
                    ("shape", "ab"),
                    ("shape", [None, -5]),
                    ("shape", [None, True]),
                    ("shape", [None, "5"]),
                ]
            ),
        ],
        ids=str,
    )
    def test_what_is_none(self, announcement):
        with contracts() as ((contract, channel), (_, other)):
            other.tell(TOPIC, announcement)
            with pytest.raises(FederalError, match="the follower announced what is no announcement"):
                contract.form(channel, KEY, "hidden")

    @pytest.mark.parametrize(
        "changes", [{"shape": [None, 10**15]}, {"rows": 1 << 40}, {"shape": [None, 1 << 20], "rows": 1 << 20}], ids=str
    )
    def test_no_memory_is_taken_for_what_is_too_large(self, changes):
        with contracts() as ((contract, channel), (_, other)):
            other.tell(TOPIC, {"scope": KEY, "item": {**GOOD, **changes}})
            with pytest.raises(FederalError, match="too large to send"):
                contract.form(channel, KEY, "hidden")

    @pytest.mark.parametrize("name", ["float33", "nn", "Tensor", ""])
    def test_a_dtype_that_is_none(self, name):
        with pytest.raises(FederalError, match="announced as the dtype of a tensor"):
            dtype_of(name)
        assert dtype_of("bfloat16") is torch.bfloat16
