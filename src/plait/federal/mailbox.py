"""What has come from the peer and was not taken yet, and how much of it counts as consumed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.errors import FederalError
from plait.federal.wire import Frame, Kind

__all__ = ["EAGER_WINDOWS", "NOTHING", "Form", "Mailbox", "misfit"]

Form = tuple[torch.dtype, tuple[int, ...]]
"""A dtype and a shape, of which the first dimension is free."""
EAGER_WINDOWS = 4
"""How many windows of messages that nobody has taken a waiting party lets come."""
NOTHING = object()
"""What is not there; None may be."""


class Mailbox:
    """The messages of one session. It knows no locks: the channel calls it with its own held."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.number = 0
        """The highest number received; none below it is missing."""
        self.received = 0
        """Bytes of all messages that came."""
        self.taken = 0
        """Bytes of those that nobody needs any more."""
        self.credit = 0
        """Bytes that the peer is told are consumed."""
        self.floor = 0
        """Tensors of turns before this one are dropped."""
        self._words: dict[str, deque[tuple[Any, int]]] = {}
        self._tensors: dict[tuple[int, int, bool], tuple[Tensor | None, int]] = {}

    @property
    def waiting(self) -> int:
        """Bytes that wait to be taken."""
        return self.received - self.taken

    def put(self, frame: Frame, size: int) -> str | None:
        """Keep the next numbered message; what is wrong with it, if it cannot be kept."""
        if self.waiting > (EAGER_WINDOWS + 1) * self.window:
            return f"{self.waiting} bytes that nobody has taken, and the window is {self.window}"
        self.number = frame.number
        self.received += size
        if frame.kind == Kind.WORD:
            self._words.setdefault(frame.topic, deque()).append((frame.value, size))
            return None
        for place, (topic, value) in enumerate(frame.words, start=1):  # the last of them counts for all
            counted = frame.riding if place == len(frame.words) else 0
            self._words.setdefault(topic, deque()).append((value, counted))
            size -= counted
        if frame.kind == Kind.TENSOR and frame.turn >= self.floor:
            key = (frame.slot, frame.turn, frame.gradient)
            if key in self._tensors:
                return f"{_name(*key)} came twice"
            self._tensors[key] = (frame.tensor, size)
        else:  # a goodbye, or a tensor of a turn that is over
            self.taken += size
        return None

    def has_word(self, topic: str) -> bool:
        """Whether there is a word of a topic; may be asked without a lock."""
        return topic in self._words

    def word(self, topic: str, *, take: bool) -> Any:
        """The next word of a topic, or NOTHING."""
        words = self._words.get(topic)
        if not words:
            return NOTHING
        if not take:
            return words[0][0]
        value, size = words.popleft()
        if not words:
            del self._words[topic]
        self.taken += size
        return value

    def tensor(self, slot: int, turn: int, gradient: bool) -> Any:
        """A tensor, taken, or NOTHING."""
        if turn < self.floor:
            raise FederalError(
                f"{_name(slot, turn, gradient)} is asked for, and turns before {self.floor} are forgotten"
            )
        found = self._tensors.pop((slot, turn, gradient), None)
        if found is None:
            return NOTHING
        self.taken += found[1]
        return found[0]

    def forget(self, before: int) -> bool:
        """Drop the tensors of turns before this one; whether there were any."""
        self.floor = max(self.floor, before)
        old = [key for key in self._tensors if key[1] < before]
        for key in old:
            self.taken += self._tensors.pop(key)[1]
        return bool(old)

    def advance(self, *, eager: bool) -> None:
        """Raise the credit to what was taken, or, for a party that waits, to what came, within bounds.

        It never falls: what was let come early is made up for by what is taken later.
        """
        limit = min(self.received, self.taken + EAGER_WINDOWS * self.window) if eager else self.taken
        self.credit = max(self.credit, limit)

    def complaint(self, expected: Mapping[int, Form]) -> str | None:
        """What is wrong with the tensors that are here already."""
        kept = ((*key, tensor) for key, (tensor, _) in self._tensors.items())
        return next(filter(None, (misfit(expected, *item) for item in kept)), None)


def misfit(
    expected: Mapping[int, Form] | None, slot: int, turn: int, gradient: bool, tensor: Tensor | None
) -> str | None:
    """What is wrong with a tensor that came, if anything is; nothing of what is in it."""
    if expected is None:
        return None
    name = _name(slot, turn, gradient)
    if slot not in expected:
        return f"{name} came, and tensors are expected in {_slots(expected)}"
    dtype, shape = expected[slot]
    if tensor is None:
        return None
    if tensor.dtype != dtype:
        return f"{name} is of {tensor.dtype}, and {dtype} is expected"
    if tensor.ndim != len(shape) or tensor.shape[1:] != shape[1:]:
        return f"{name} has shape {list(tensor.shape)}, and {_shape(shape)} is expected"
    return None


def _name(slot: int, turn: int, gradient: bool) -> str:
    return f"the {'gradient' if gradient else 'tensor'} of slot {slot}, turn {turn}"


def _slots(slots: Iterable[int]) -> str:
    return f"slots {', '.join(map(str, sorted(slots))) or '(none)'}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(['any', *map(str, shape[1:])]) if shape else ''}]"
