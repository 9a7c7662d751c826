"""A party that is broken or malicious: the other one refuses what it sends, says what, and ends."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from plait.errors import FederalError
from plait.federal.communicator import Communicator
from plait.psi import curve
from plait.psi.exchange import ANSWERS, POINTS, REVEAL
from plait.psi.run import align

from .parties import together, write_csv

BATCH = 4
FACTS = {
    "protocol": "psi 1",
    "job": "plait",
    "reveal": "both",
    "key columns": 1,
    "keys": "NFC, stripped",
    "shards": 1,
    "batch": BATCH,
}
STAND = {"run": "ab", "rows": 6, "have": 0, "answers": 0, "agreed": None}
GOOD = sorted(curve.multiply(bytes([7] * 32), curve.hash_to_curve(b"%d" % number)) for number in range(12))
TWIST = next(u for u in range(2, 50) if not curve.is_on_curve(u)).to_bytes(32, "little")


def tensor(points):
    return torch.frombuffer(bytearray(b"".join(points)), dtype=torch.uint8).view(-1, 32)


def met(tmp_path, follower, reveal="both", honest="leader"):
    """What an honest leader with six keys ends with, whose follower is a function of the channel; or the other way."""
    write_csv(tmp_path / "leader.csv", [(number, "") for number in range(6)])
    ends = Communicator.pair(timeout=10.0)
    if honest == "follower":
        ends = ends[::-1]
    over = threading.Event()

    def lead():
        try:
            return align(
                tmp_path / "leader.csv", "id", tmp_path / "out", communicator=ends[0], batch=BATCH, reveal=reveal
            )
        finally:
            over.set()

    def follow():
        channel = ends[1].connect(0, {**FACTS, "reveal": reveal})
        try:
            channel.open()
            follower(channel)
            over.wait(20)
        finally:
            ends[1].close()

    return together(lead, follow)[0]


def refused(tmp_path, follower, reveal="both", honest="leader"):
    error = met(tmp_path, follower, reveal, honest)
    assert isinstance(error, FederalError), error
    assert not list((tmp_path / "out").glob("part-*"))
    return str(error)


def sends(*batches, stand=None, slot=POINTS):
    def follower(channel):
        channel.tell("psi", STAND | (stand or {}))
        for number, points in enumerate(batches):
            channel.send(slot, number, tensor(points))

    return follower


@pytest.mark.parametrize("u", [u for u in curve.LOW_ORDER if u < curve.LARGEST])
def test_points_of_low_order(tmp_path, u):
    wrong = [*GOOD[:3], u.to_bytes(32, "little")]
    assert "the follower's points hold a point of low order" in refused(tmp_path, sends(wrong))


@pytest.mark.parametrize("reveal", REVEAL)
@pytest.mark.parametrize("honest", ["leader", "follower"])
@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([[*GOOD[:3], bytes(32)]], "points hold a point of low order"),
        ([[TWIST] * BATCH], "points that are not on the curve"),
        ([[*GOOD[:3], b"\xff" * 32]], "coordinate that is not below"),
        ([GOOD[:4], GOOD[:2]], "repeat points"),
        ([GOOD[:3]], "has 3 points, and 4 were announced"),
        ([GOOD[:5]], "has 5 points, and 4 were announced"),
    ],
    ids=["low order", "twist", "too large", "repeated", "short", "long"],
)
def test_both_roles_refuse_whoever_learns(tmp_path, reveal, honest, batches, said):
    assert said in refused(tmp_path, sends(*batches), reveal, honest)


@pytest.mark.parametrize(
    ("honest", "reveal"), [("leader", "both"), ("leader", "leader"), ("follower", "leader"), ("follower", "sizes")]
)
def test_a_batch_that_is_repeated_in_another_session(tmp_path, monkeypatch, honest, reveal):
    """The points before it are gone, only their multiples are kept: it shows there, also to who learns nothing else."""
    monkeypatch.setattr("plait.psi.pool.cores", lambda: 1)
    first = tmp_path / "out" / ".psi" / "theirs" / "00000000.bin"

    def other(channel):
        sends(GOOD[:4], GOOD[4:8], stand={"rows": 12})(channel)
        until = time.monotonic() + 10
        while not first.exists() and time.monotonic() < until:
            time.sleep(0.005)
        channel.open()
        channel.tell("psi", STAND | {"rows": 12})
        assert channel.hear("psi")["have"] == 1
        for number, points in [(1, GOOD[:4]), (2, GOOD[8:])]:
            channel.send(POINTS, number, tensor(points))
        for number, points in enumerate((GOOD[:4], GOOD[4:6])):
            channel.send(ANSWERS, number, tensor(points))
        if reveal == "leader" and honest == "follower":
            channel.tell("agree", {})

    assert "points that are the same once both have multiplied them" in refused(tmp_path, other, reveal, honest)


def test_numbers_that_are_no_coordinates(tmp_path):
    assert "coordinate that is not below" in refused(tmp_path, sends([*GOOD[:3], b"\xff" * 32]))


def test_points_that_are_not_on_the_curve(tmp_path):
    assert "points that are not on the curve" in refused(tmp_path, sends([TWIST] * BATCH))


def test_a_batch_that_is_repeated(tmp_path):
    assert "repeat points" in refused(tmp_path, sends(GOOD[:4], GOOD[:2]))


def test_a_batch_that_comes_twice(tmp_path):
    def follower(channel):
        channel.tell("psi", STAND)
        channel.send(POINTS, 1, tensor(GOOD[4:6]))
        channel.send(POINTS, 1, tensor(GOOD[4:6]))

    assert "slot 1, turn 1 came twice" in refused(tmp_path, follower)


def test_a_point_that_is_there_twice(tmp_path):
    assert "repeat points" in refused(tmp_path, sends([GOOD[0], GOOD[1], GOOD[1], GOOD[2]]))


def test_points_in_an_order_that_may_tell_something(tmp_path):
    assert "in a wrong order" in refused(tmp_path, sends(GOOD[3::-1]))


@pytest.mark.parametrize("batches", [[GOOD[:3]], [GOOD[:5]], [GOOD[:4], GOOD[4:7]], [[]]])
def test_other_counts_than_were_announced(tmp_path, batches):
    text = refused(tmp_path, sends(*[batch or GOOD[:0] for batch in batches]) if batches != [[]] else empty)
    assert "were announced: it is refused" in text


def empty(channel):
    channel.tell("psi", STAND)
    channel.send(POINTS, 0, torch.empty((0, 32), dtype=torch.uint8))


@pytest.mark.parametrize(
    "form", [torch.zeros(4, 31, dtype=torch.uint8), torch.zeros(4, 32), torch.zeros(4, 4, 8, dtype=torch.uint8)]
)
def test_tensors_of_another_form(tmp_path, form):
    def follower(channel):
        channel.tell("psi", STAND)
        channel.send(POINTS, 0, form)

    assert "is expected" in refused(tmp_path, follower)


@pytest.mark.parametrize(
    "stand",
    [
        {"rows": -1},
        {"rows": 2**60},
        {"rows": "6"},
        {"rows": True},
        {"have": 3},
        {"answers": 3},
        {"run": 7},
        {"run": "x" * 99},
        {"run": "\u00e4"},
        {"agreed": 1},
        {"more": 1},
    ],
)
def test_words_that_cannot_be(tmp_path, stand):
    assert "says of itself what cannot be" in refused(tmp_path, lambda channel: channel.tell("psi", STAND | stand))


def test_a_word_of_another_kind(tmp_path):
    assert "says of itself what cannot be" in refused(tmp_path, lambda channel: channel.tell("psi", [1]))


def test_one_that_says_that_all_is_done(tmp_path):
    text = refused(tmp_path, lambda channel: channel.tell("psi", STAND | {"agreed": {"common": 6, "order": ""}}))
    assert "here batches of it are missing" in text


class TestAnswers:
    def test_of_low_order(self, tmp_path):
        text = refused(tmp_path, sends([*GOOD[:3], bytes(32)], slot=ANSWERS))
        assert "the follower's answers hold a point of low order" in text

    def test_of_another_count(self, tmp_path):
        assert "batch 0 of the follower's answers has 2 points, and 4" in refused(
            tmp_path, sends(GOOD[:2], slot=ANSWERS)
        )

    def test_that_are_not_sorted_where_they_have_to_be(self, tmp_path):
        text = refused(tmp_path, sends(GOOD[3::-1], slot=ANSWERS), reveal="sizes")
        assert "the follower's answers repeat points, or have them in a wrong order" in text

    def test_that_are_made_up(self, tmp_path):
        """Points that are none of the leader's: nothing is common, and the follower cannot say so with a digest."""

        def follower(channel):
            sends(GOOD[:4], GOOD[4:6])(channel)
            for number, points in enumerate((GOOD[6:10], GOOD[10:])):
                channel.send(ANSWERS, number, tensor(points))
            channel.hear("agree")
            channel.tell("agree", {"common": 6, "order": "00"})

        assert "have not found the same rows" in refused(tmp_path, follower)

    def test_that_are_the_points_of_the_follower(self, tmp_path):
        """Answers that repeat each other."""

        def follower(channel):
            sends(GOOD[:4], GOOD[4:6])(channel)
            for number, points in enumerate((GOOD[6:10], GOOD[6:8])):
                channel.send(ANSWERS, number, tensor(points))

        assert "points that are the same once both have multiplied them" in refused(tmp_path, follower)


def test_points_with_a_part_of_low_order_are_found_out_when_they_are_joined(tmp_path):
    """P and P + T differ, T of low order; multiplied by a secret they are the same. Here: a double, seen again."""

    def follower(channel):
        channel.tell("psi", STAND | {"rows": 2})
        base = int.from_bytes(curve.hash_to_curve(b"x"), "little")
        other = pow(base, -1, curve.PRIME)  # u -> 1/u adds the point (0, 0), whose order is 2
        pair = sorted(u.to_bytes(32, "little") for u in (base, other))
        channel.send(POINTS, 0, tensor(pair))
        for number, points in enumerate((GOOD[:4], GOOD[4:6])):
            channel.send(ANSWERS, number, tensor(points))

    assert "points that are the same once both have multiplied them" in refused(tmp_path, follower)
