"""What this party has said: numbered, kept until the peer has it, and counted until the peer has consumed it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from plait.federal.wire import HEADER_BYTES, FrameError, Kind, encode_json, encode_tensor

__all__ = ["Message", "Outbox", "Stamp"]

Stamp = tuple[int, int, int]
"""What every frame says besides its message: session, received, consumed."""
KEPT_AS_BYTES = 1 << 18
"""Larger messages are encoded anew if they have to be sent again."""
_DESCRIPTION_BYTES = 48
"""Of a tensor with up to three dimensions."""


class Message:
    """A numbered message. A tensor is encoded when it is about to be sent, so that `send` does not wait for that."""

    __slots__ = ("_gradient", "_precision", "_slot", "_tensor", "_turn", "_version", "_words", "data", "number", "size")

    def __init__(
        self,
        data: bytes | None,
        slot: int = 0,
        turn: int = 0,
        tensor: Tensor | None = None,
        gradient: bool = False,
        precision: str | None = None,
        words: bytes = b"",
    ) -> None:
        self.data = data
        self.number = 0
        self._slot, self._turn, self._gradient, self._precision = slot, turn, gradient, precision
        self._tensor, self._words = tensor, words
        self._version = _version(tensor)
        if data is not None:
            self.size = len(data)
        else:  # until it is encoded
            self.size = HEADER_BYTES + _DESCRIPTION_BYTES + len(words) + (tensor.nbytes if tensor is not None else 0)

    def encode(self, stamp: Stamp, *, checksum: bool) -> bytes:
        """FrameError if the tensor cannot be sent, or is not what it was when it was given."""
        tensor, (session, received, consumed) = self._tensor, stamp
        if self.data is not None:  # another connection was quicker; it kept the bytes before it gave up the tensor
            return self.data
        data = encode_tensor(
            self._slot,
            self._turn,
            tensor,
            session=session,
            number=self.number,
            received=received,
            consumed=consumed,
            gradient=self._gradient,
            precision=self._precision,
            words=self._words,
            checksum=checksum,
        )
        if _version(tensor) != self._version:
            raise FrameError(
                f"the tensor of slot {self._slot}, turn {self._turn} was changed in place after it was sent: change a "
                "clone() of it"
            )
        return data

    def settle(self, data: bytes) -> None:
        """From now on the bytes are kept, and the tensor is not; but of a large one, the tensor.

        It is there anyway, and bytes that are not kept are memory that is used again, and is in the caches.
        """
        self.size = len(data)
        if len(data) <= KEPT_AS_BYTES:
            self.data, self._tensor = data, None


class Outbox:
    """The messages of one session. It knows no locks: the channel calls it with its own held."""

    def __init__(self) -> None:
        self.last = 0
        """The highest number given."""
        self.received = 0
        """The highest number that the peer has."""
        self.consumed = 0
        """Bytes that the peer has consumed."""
        self.said = 0
        """Bytes of all messages."""
        self._kept: dict[int, Message] = {}

    @property
    def unconsumed(self) -> int:
        """Bytes that count against the window."""
        return self.said - self.consumed

    @property
    def kept(self) -> int:
        """Bytes that are kept because the peer may not have them."""
        return sum(message.size for message in self._kept.values())

    def add(self, message: Message) -> None:
        self.last += 1
        message.number = self.last
        self._kept[self.last] = message
        self.said += message.size

    def word(self, kind: Kind, topic: str, value: Any, stamp: Stamp, *, checksum: bool) -> None:
        """Add what is encoded at once: so a wrong value fails who said it, and it may be changed afterwards."""
        session, received, consumed = stamp
        data = encode_json(
            kind,
            value,
            session=session,
            number=self.last + 1,
            received=received,
            consumed=consumed,
            topic=topic,
            checksum=checksum,
        )
        self.add(Message(data))

    def get(self, number: int) -> Message | None:
        return self._kept.get(number)

    def settle(self, message: Message, data: bytes) -> bytes:
        """Keep a message's bytes; if two connections have encoded it, those of the first."""
        if message.data is None:
            self.said += len(data) - message.size
            message.settle(data)
        return message.data or data

    def acknowledge(self, received: int, consumed: int) -> bool:
        """Note what the peer has; whether that is news. Old news come again with what is sent again."""
        if received > self.last or consumed > self.said:
            raise FrameError("the other party acknowledges more than was sent to it")
        news = received > self.received or consumed > self.consumed
        for number in range(self.received + 1, received + 1):
            del self._kept[number]
        self.received = max(self.received, received)
        self.consumed = max(self.consumed, consumed)
        return news


def _version(tensor: Tensor | None) -> int | None:
    """How often a tensor was changed; one made in inference mode does not say."""
    return tensor._version if tensor is not None and not tensor.is_inference() else None  # noqa: SLF001  the only way
