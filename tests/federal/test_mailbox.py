from __future__ import annotations

import pytest
import torch

from plait.errors import FederalError
from plait.federal.mailbox import EAGER_WINDOWS, NOTHING, Mailbox, misfit
from plait.federal.wire import Frame, Kind


def word(box, topic, value, size=10):
    return box.put(Frame(Kind.WORD, 1, box.number + 1, 0, 0, value=value, topic=topic), size)


def tensor(box, slot, turn, value=None, *, gradient=False, size=10):
    frame = Frame(Kind.TENSOR, 1, box.number + 1, 0, 0, slot=slot, turn=turn, gradient=gradient, tensor=value)
    return box.put(frame, size)


def test_words_of_a_topic_come_in_order_and_topics_by_themselves():
    box = Mailbox(1000)
    for topic, value in [("a", 1), ("b", 2), ("a", 3), ("a", None)]:
        assert word(box, topic, value) is None
    assert box.word("b", take=True) == 2
    assert [box.word("a", take=take) for take in (False, True, False, True, True)] == [1, 1, 3, 3, None]
    assert box.word("a", take=True) is NOTHING
    assert box.waiting == 0


def test_tensors_are_found_by_slot_turn_and_direction():
    box = Mailbox(1000)
    one, two = torch.ones(1), torch.zeros(1)
    tensor(box, 3, 7, one)
    tensor(box, 3, 7, two, gradient=True)
    tensor(box, 3, 8)
    assert box.tensor(3, 7, True) is two
    assert box.tensor(3, 7, False) is one
    assert box.tensor(3, 7, False) is NOTHING
    assert box.tensor(3, 8, False) is None
    assert box.tensor(3, 9, False) is NOTHING


def test_the_same_tensor_twice_is_refused():
    box = Mailbox(1000)
    tensor(box, 3, 7)
    assert "slot 3, turn 7 came twice" in tensor(box, 3, 7)


def test_turns_that_are_over_are_dropped_now_and_later():
    box = Mailbox(1000)
    for turn in range(4):
        tensor(box, 0, turn)
    box.forget(2)
    assert box.taken == 20
    tensor(box, 1, 1)
    assert box.taken == 30
    assert box.tensor(0, 2, False) is None
    with pytest.raises(FederalError, match="turns before 2"):
        box.tensor(0, 1, False)


def test_credit_is_what_was_taken():
    box = Mailbox(1000)
    word(box, "a", 1)
    word(box, "a", 2)
    box.advance(eager=False)
    assert box.credit == 0
    box.word("a", take=True)
    box.advance(eager=False)
    assert box.credit == 10


def test_a_party_that_waits_lets_more_come_within_bounds_and_never_takes_it_back():
    box = Mailbox(100)
    for _ in range(5):
        word(box, "a", 1, size=90)
    box.advance(eager=True)
    assert box.credit == EAGER_WINDOWS * 100
    box.advance(eager=False)
    assert box.credit == EAGER_WINDOWS * 100
    box.word("a", take=True)
    box.advance(eager=True)
    assert box.credit == 450


def test_a_peer_that_fills_the_memory_is_refused():
    box = Mailbox(100)
    while box.received < 1000:
        complaint = word(box, "a", 1, size=90)
        if complaint:
            break
    assert "nobody has taken" in complaint
    assert box.received <= (EAGER_WINDOWS + 1) * 100 + 90


EXPECTED = {1: (torch.float32, (8, 3)), 2: (torch.int64, (4,)), 5: (torch.float32, ())}


@pytest.mark.parametrize(
    ("slot", "value", "complaint"),
    [
        (1, torch.ones(2, 3), None),
        (1, torch.ones(0, 3), None),
        (1, None, None),
        (2, torch.ones(9, dtype=torch.int64), None),
        (5, torch.tensor(1.0), None),
        (3, torch.ones(2, 3), "slots 1, 2, 5"),
        (3, None, "slots 1, 2, 5"),
        (1, torch.ones(2, 3, dtype=torch.float64), "torch.float64, and torch.float32"),
        (1, torch.ones(2, 4), r"[2, 4], and [any, 3]"),
        (1, torch.ones(3), "[any, 3]"),
        (1, torch.ones(2, 3, 1), "[any, 3]"),
        (5, torch.ones(1), "[]"),
    ],
)
def test_what_may_come(slot, value, complaint):
    found = misfit(EXPECTED, slot, 4, False, value)
    assert found is None if complaint is None else complaint in found


def test_everything_may_come_before_something_is_expected():
    assert misfit(None, 3, 4, False, torch.ones(1)) is None


def test_what_is_here_already_is_looked_at_as_well():
    box = Mailbox(1000)
    tensor(box, 1, 0, torch.ones(2, 3))
    assert box.complaint(EXPECTED) is None
    tensor(box, 1, 1, torch.ones(2, 4), gradient=True)
    assert "gradient of slot 1, turn 1" in box.complaint(EXPECTED)


def test_words_that_ride_count_until_they_are_taken():
    box = Mailbox(1000)
    words = {"words": [("a", 1), ("b", 2)], "riding": 200}
    frame = Frame(Kind.TENSOR, 1, 1, 0, 0, slot=1, turn=1, tensor=torch.ones(10), **words)
    box.forget(5)  # the tensor itself is of no use any more
    assert box.put(frame, 240) is None
    assert box.waiting == 200
    assert box.word("a", take=True) == 1
    assert box.waiting == 200
    assert box.word("b", take=True) == 2
    assert box.waiting == 0
