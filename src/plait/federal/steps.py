"""The leader's word on steps: what it reads, when passes and loops end, when it saves; and how a follower follows.

A step that follows for certain is told a step ahead, and that word rides on a gradient: then nobody waits for it, and
it is no message of its own. Where a hook might end the loop after any step, each step is told when it is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from plait.data import Sample, Stream
from plait.data.parts import Strided
from plait.engine.stage import LoopStage, Stage
from plait.engine.task import MODE
from plait.engine.update import LeftError
from plait.errors import DataError, FederalError, OutOfRangeError
from plait.federal.difference import side_by_side
from plait.federal.exchange import Exchange
from plait.federal.samples import digest

if TYPE_CHECKING:
    from plait.engine.monitored import MonitoredSession

__all__ = ["Following", "Leading", "MisalignedError", "Steps"]

Read = Callable[[], Sample]
PLACES = {
    "fit": "the beginning of its procedure",
    "checkpoints": "the choice of a checkpoint",
    "stage": "the beginning of a stage",
    "lead": "the end of a loop, stage or procedure",
    "done": "the end of its procedure",
}
"""What the parties meet at, by the topic of what they say there."""


class MisalignedError(DataError):
    """The parties' batches do not belong together; the text holds nothing of them, and is told to both."""


class Steps:
    """What both parties' steps have in common."""

    def __init__(self, exchange: Exchange, sample_id: str | None, stale: int) -> None:
        self.key = b""
        """Of the ids' digests, in this session."""
        self.saving = True
        """Whether checkpoints are made."""
        self._exchange = exchange
        self._sample_id = sample_id
        self._stale = stale

    def _facts(self, sample: Sample) -> dict[str, Any]:
        """What both parties' batches have in common."""
        if self._sample_id is None:
            return {"rows": sample.batch_size}
        if self._sample_id not in sample:
            raise DataError(f"the batch has no field {self._sample_id!r} for sample_id: there are {', '.join(sample)}")
        return {"rows": sample.batch_size, "ids": digest(sample[self._sample_id], self.key)}


class Leading(Steps):
    """The leader: it tells of its steps."""

    def __init__(self, exchange: Exchange, sample_id: str | None, stale: int) -> None:
        super().__init__(exchange, sample_id, stale)
        self.promises = True
        """Several workers of a party would have to promise alike; they do not."""
        exchange.riding = self._take_riding
        self.reset()

    def reset(self) -> None:
        """A new session begins."""
        self._stage: Stage | None = None
        self._session: MonitoredSession | None = None
        self._promised = 0
        """How many steps were told that are still to be made."""
        self._riding: list[tuple[str, Any]] = []
        """Words that wait for a tensor to ride on."""
        self._abreast = False
        """The follower has made the last step of both, and waits for the next word before it goes on."""
        self._saves = False
        """A checkpoint was made since the last word."""
        self._due: Callable[..., bool] | None = None
        self._decided: bool | None = None
        """Whether a checkpoint is made after this step, where that was told ahead."""
        self._regular: dict[str, bool] = {}
        """For each task and mode of this loop: whether its steps can be told ahead at all."""

    def begin_stage(self, stage: Stage) -> None:
        self._stage, self._session, self._abreast = stage, None, False
        self._due = None
        self._regular = {}

    def stopper(self, session: MonitoredSession) -> Callable[[], bool]:
        self._session = session
        self._regular = {}

        def is_over() -> bool:
            if self._exchange.channel.look("stop"):
                session.request_stop()
            return session.should_stop() and not self._promised

        return is_over

    def choose(self, value: Any) -> Any:
        return value

    def read(self, stream: Stream, read: Read, key: str) -> Sample:
        place, spent, exchange = [stream.epoch, stream.position], stream.spent, self._exchange
        if self._riding:
            self._flush()
        try:
            sample = read()
        except OutOfRangeError:
            self._say({"pass": key, "spent": spent})
            self._abreast = False
            raise
        exchange.turn += 1
        self._abreast = True
        exchange.channel.forget(exchange.turn)
        if not self._promised:
            self._say({"go": key, "turn": exchange.turn, "place": place, **self._facts(sample)})
        else:
            self._promised -= 1
            if self._sample_id is not None:
                self._riding.append(("check", {"place": place, **self._facts(sample)}))
        self._promise(stream, key)
        return sample

    def _promise(self, stream: Stream, key: str) -> None:
        """Tell of the steps after this one, as many as the follower may be ahead, if they are certain."""
        source, turn = stream.source, self._exchange.turn
        while self._promised <= self._stale and self._is_certain(stream, key, self._promised + 1):
            self._promised += 1
            place = [stream.epoch, stream.position + self._promised]
            word = {"go": key, "turn": turn + self._promised, "place": place, "rows": source.batch_size}
            if not self._stale:
                self._decided = self._due is not None and self._due(ahead=1)
                word |= {"save": True} if self._decided else {}
            self._riding.append(("step", word))

    def _is_certain(self, stream: Stream, key: str, ahead: int) -> bool:
        regular = self._regular.get(key)
        if regular is None:
            regular = self._regular[key] = self._is_regular(stream, key)
        stage: Any = self._stage
        session: Any = self._session
        source: Any = stream.source
        if not regular or session.should_stop() or (stage.step is not None and stage.run_step + ahead >= stage.step):
            return False
        if self.saving and self._due is None and not self._stale:  # nobody has said yet when it is time to save
            return False
        return bool(stream.position + ahead < source.count(stream.epoch) - 1)  # the last batch of a pass may be short

    def _is_regular(self, stream: Stream, key: str) -> bool:
        """Whether the steps of this loop can be told ahead; it stays so until the loop is over."""
        stage, session, source = self._stage, self._session, stream.source
        return (
            isinstance(stage, LoopStage)
            and stage.scope.mode is MODE.TRAIN
            and stage.seconds is None
            and session is not None
            and self.promises
            and not session.may_stop
            and self._exchange.contract.gives_back(key)
            and source.batch_size is not None
            and isinstance(source, Strided)
        )

    def end_loop(self) -> None:
        self._say({"end": True})

    def meet(self, topic: str) -> None:
        self._say({"at": topic})

    def is_due(self, due: Callable[..., bool]) -> bool:
        """Whether to save after this step; the next word says so."""
        self._due = due
        decided, self._decided = self._decided, None
        if decided is not None:
            return decided
        if self._promised or self._saves or not self._abreast or not due():
            return False
        self._saves = True
        return True

    def _say(self, word: dict[str, Any]) -> None:
        self._flush()
        if self._saves:
            word["save"], self._saves = True, False
        self._exchange.channel.tell("step", word)

    def _flush(self) -> None:
        """What found nothing to ride on is said."""
        for topic, value in self._take_riding():
            self._exchange.channel.tell(topic, value)

    def _take_riding(self) -> list[tuple[str, Any]]:
        riding, self._riding = self._riding, []
        return riding


class Following(Steps):
    """The follower: it makes a step when it hears of one."""

    def __init__(self, exchange: Exchange, sample_id: str | None, stale: int) -> None:
        super().__init__(exchange, sample_id, stale)
        self.reset()

    def reset(self) -> None:
        self._word: dict[str, Any] | None = None
        """The leader's word that was heard and not yet followed."""
        self._ended = False
        """The leader's loop is over, and this party has heard of it."""
        self._wished = False
        """The leader was told that this party would like to stop."""
        self._unchecked: list[tuple[str, str]] = []
        """The inputs and digests of batches that were read before the leader has said what it read."""

    def begin_stage(self, stage: Stage) -> None:
        del stage
        self._ended = self._wished = False

    def stopper(self, session: MonitoredSession) -> Callable[[], bool]:
        def is_over() -> bool:
            if session.should_stop() and not self._wished:
                self._wished = True
                self._exchange.channel.tell("stop", True)
            if "end" not in self._next_word():
                return False
            self._word, self._ended = None, True
            return True

        return is_over

    def choose(self, value: Any) -> Any:
        del value
        word = self._next_word()
        key = word.get("go", word.get("pass"))
        if key is None:
            raise _astray(word, "makes a step")
        return str(key).partition(":")[2] or None

    def read(self, stream: Stream, read: Read, key: str) -> Sample:
        word = self._next_word()
        self._word = None
        if "end" in word:
            self._ended = True
            raise LeftError(stop=False)
        if word.get("go", word.get("pass")) != key:
            raise _astray(word, f"makes a step of {key!r}")
        if "pass" in word:
            raise _end_pass(stream, read, word)
        return self._read_along(stream, read, word)

    def _next_word(self) -> dict[str, Any]:
        if self._word is None:
            word = self._exchange.channel.hear("step", "the next step")
            if not _is_word(word):
                raise FederalError("the leader's word is no word of a step")
            self._word = word
        return self._word

    def _read_along(self, stream: Stream, read: Read, word: Mapping[str, Any]) -> Sample:
        own = {"pass": stream.epoch, "batch": stream.position}
        try:
            sample = read()
        except OutOfRangeError:
            raise MisalignedError(
                f"input {stream.name!r}: the follower's pass {own['pass']} is over after {own['batch']} batches, the "
                "leader's is not: give both parties the same rows"
            ) from None
        facts = self._facts(sample)
        own["rows"] = facts["rows"]
        epoch, position = word["place"]
        theirs = {"pass": epoch, "batch": position, "rows": word["rows"]}
        if own != theirs:
            found = side_by_side("follower", own, "leader", theirs)
            raise MisalignedError(f"input {stream.name!r}: the two parties are not at the same batch:\n{found}")
        if "ids" in facts:
            self._compare_ids(stream.name, facts["ids"], word)
        self._exchange.turn = int(word["turn"])
        self._exchange.channel.forget(self._exchange.turn - self._stale)
        return sample

    def _compare_ids(self, name: str, ids: str, word: Mapping[str, Any]) -> None:
        """Now, or, where the leader has told of the step before it has read, when it has."""
        if "ids" in word:
            _check_ids(name, ids, word)
        else:
            self._unchecked.append((name, ids))
        self._compare_those_told(wait=False)

    def _compare_those_told(self, *, wait: bool) -> None:
        channel = self._exchange.channel
        while self._unchecked:
            word = channel.hear("check", "what it has read") if wait else channel.look("check")
            if word is None:
                return
            _check_ids(*self._unchecked.pop(0), word)

    def end_loop(self) -> None:
        while not self._ended:  # this party's own workers have ended it
            self._ended = "end" in self._next_word()
            self._word = None
        self._compare_those_told(wait=True)

    def meet(self, topic: str) -> None:
        """The leader is where this party is, in the procedure; else each would wait for what the other never says."""
        word = self._next_word()
        self._word = None
        if word.get("at") != topic:
            raise _astray(word, f"is at {PLACES[topic]}")

    def is_due(self, due: Callable[..., bool]) -> bool:
        del due
        return bool(self._next_word().pop("save", False))


def _is_word(word: Any) -> bool:
    """Whether it has what a word of its kind has; what comes from another company is looked at first."""
    if not isinstance(word, dict) or len(word.keys() & {"go", "pass", "end", "at"}) != 1:
        return False
    if "go" not in word:
        return True
    place = word.get("place")
    numbers = [word.get("turn"), *(place if isinstance(place, list) else [])]
    return len(numbers) == 3 and all(type(one) is int and one >= 0 for one in numbers) and "rows" in word


def _check_ids(name: str, ids: str, word: Mapping[str, Any]) -> None:
    if ids != word.get("ids"):
        epoch, position = word["place"]
        raise MisalignedError(
            f"input {name!r}: batch {position} of pass {epoch} is of other samples than the leader's, or in another "
            "order: give both parties the same rows in the same order, and the same batch_size, shuffle and seed"
        )


def _end_pass(stream: Stream, read: Read, word: Mapping[str, Any]) -> OutOfRangeError:
    """The leader's pass is over: so is this one."""
    if word.get("spent"):
        return OutOfRangeError(f"input {stream.name!r}: no pass is left at the leader")
    try:
        read()
    except OutOfRangeError as error:
        return error
    warnings.warn(
        f"input {stream.name!r}: the leader's pass is over after {stream.position} batches, the follower has more: "
        "they are left out",
        stacklevel=2,
    )
    stream.close()
    stream.pending, stream.epoch, stream.position = None, stream.epoch + 1, 0
    return OutOfRangeError(f"input {stream.name!r}: the leader's pass is over")


def _astray(word: Mapping[str, Any], follower: str) -> FederalError:
    if "at" in word:
        leader = f"is at {PLACES.get(str(word['at']), 'another place')}"
    elif "end" in word:
        leader = "has ended its loop"
    else:
        step = f"makes a step of {word.get('go')!r:.60}"
        leader = step if "go" in word else f"has ended a pass of {word.get('pass')!r:.60}"
    return FederalError(
        f"the two parties do not do the same: the leader {leader}, the follower {follower}; run the same stages, with "
        "as many steps, in both"
    )
