from __future__ import annotations

import pytest
import torch

from plait.federal.outbox import Message, Outbox
from plait.federal.wire import FrameError, Kind, decode

STAMP = (77, 5, 6)


def word(box, value):
    box.word(Kind.WORD, "a", value, STAMP, checksum=False)


def test_messages_are_numbered_and_kept_until_received():
    box = Outbox()
    for value in range(4):
        word(box, value)
    assert [decode(box.get(number).data).value for number in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert [decode(box.get(number).data).number for number in (1, 2, 3, 4)] == [1, 2, 3, 4]
    kept = box.kept
    assert box.acknowledge(3, 0)
    assert [box.get(number) is not None for number in (1, 2, 3, 4)] == [False, False, False, True]
    assert box.kept * 4 == kept
    assert box.unconsumed == kept


def test_old_news_change_nothing():
    box = Outbox()
    word(box, 1)
    word(box, 2)
    assert box.acknowledge(2, 100)
    assert not box.acknowledge(1, 50)
    assert (box.received, box.consumed) == (2, 100)


@pytest.mark.parametrize(("received", "consumed"), [(2, 0), (1, 10_000)])
def test_nobody_acknowledges_what_was_not_sent(received, consumed):
    box = Outbox()
    word(box, 1)
    with pytest.raises(FrameError, match="more than was sent"):
        box.acknowledge(received, consumed)


def test_a_word_that_cannot_be_said_takes_no_number():
    box = Outbox()
    with pytest.raises(FrameError):
        word(box, object())
    word(box, 1)
    assert box.last == 1


def test_a_tensor_is_encoded_later_and_counted_exactly_then():
    box = Outbox()
    message = Message(None, 3, 9, torch.arange(6.0).view(2, 3), True)
    box.add(message)
    guessed = box.unconsumed
    data = box.settle(message, message.encode(STAMP, checksum=True))
    frame = decode(data)
    assert (frame.slot, frame.turn, frame.gradient, frame.session, frame.number) == (3, 9, True, 77, 1)
    assert (frame.received, frame.consumed) == (5, 6)
    assert torch.equal(frame.tensor, torch.arange(6.0).view(2, 3))
    assert box.unconsumed == len(data) == guessed
    assert message.encode(STAMP, checksum=True) is data


def test_of_two_encodings_the_first_counts():
    box = Outbox()
    message = Message(None, 0, 0, torch.ones(3))
    box.add(message)
    first, second = message.encode(STAMP, checksum=False), message.encode((77, 8, 8), checksum=False)
    assert box.settle(message, first) is first
    assert box.settle(message, second) is first
    assert box.unconsumed == len(first)


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[0].zero_(), lambda x: x.view(-1).mul_(2)])
def test_a_change_in_place_is_noticed(change):
    x = torch.ones(2, 2)
    message = Message(None, 3, 9, x.detach())
    change(x)
    with pytest.raises(FrameError, match=r"slot 3, turn 9 was changed in place.*clone"):
        message.encode(STAMP, checksum=False)


def test_a_change_after_it_was_encoded_does_not_matter():
    box, x = Outbox(), torch.ones(3)
    message = Message(None, 0, 0, x.detach())
    box.add(message)
    data = box.settle(message, message.encode(STAMP, checksum=False))
    x.zero_()
    assert torch.equal(decode(data).tensor, torch.ones(3))


def test_tensors_of_inference_mode_can_be_sent():
    with torch.inference_mode():
        x = torch.ones(3)
    assert torch.equal(decode(Message(None, 0, 0, x).encode(STAMP, checksum=False)).tensor, torch.ones(3))


def test_a_large_tensor_is_kept_as_it_is_and_encoded_again(monkeypatch):
    monkeypatch.setattr("plait.federal.outbox.KEPT_AS_BYTES", 100)
    box, tensor = Outbox(), torch.arange(64.0)
    message = Message(None, 1, 2, tensor)
    box.add(message)
    first = box.settle(message, message.encode((7, 0, 0), checksum=False))
    assert message.data is None
    assert box.settle(message, message.encode((7, 0, 0), checksum=False)) == first
    assert box.said == len(first)
    tensor.add_(1.0)
    with pytest.raises(FrameError, match="changed in place"):
        message.encode((7, 0, 0), checksum=False)
