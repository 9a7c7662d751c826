"""`Federal`: a party's own strategy, and what it agrees on with the other party.

The leader's word decides: it tells of every batch that it reads, of the end of every pass and loop, and whether it
saves; the follower makes a step when it hears of one. Words and tensors are told in order and nobody waits for an
answer, so that they cost no round trip.
"""

from __future__ import annotations

import json
import logging
import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from plait.data import Sample, Stream
from plait.data.parts import Strided
from plait.engine.stage import CotrainStage, LoopStage, Stage
from plait.engine.strategy import Strategy
from plait.engine.task import MODE, TaskScope
from plait.engine.update import LeftError
from plait.errors import CheckpointError, ConfigError, DataError, FederalError, OutOfRangeError, UnavailableError
from plait.federal.channel import Channel
from plait.federal.communicator import Communicator
from plait.federal.contract import key_of
from plait.federal.delay import Delay
from plait.federal.difference import side_by_side
from plait.federal.exchange import Exchange
from plait.federal.samples import digest, session_key
from plait.federal.settings import other
from plait.variables.checkpoint import CheckpointDir, CheckpointInfo, load_parts
from plait.variables.tree import join_tree

if TYPE_CHECKING:
    from plait.engine.model import Model
    from plait.engine.monitored import MonitoredSession

__all__ = ["Federal"]

START_AGAIN = 75
"""The exit code with which a process asks its launcher to be started again."""
PROTOCOL = 1
"""Of words; frames have a version of their own."""

log = logging.getLogger("plait")


class Federal:
    """One of two parties. Among its own workers it is what `inner` is."""

    def __init__(self, inner: Strategy, communicator: Communicator, exchange: Exchange, sample_id: str | None) -> None:
        self.inner = inner
        self.communicator = communicator
        self.exchange = exchange
        self.own = communicator.role
        self.peer = other(self.own)
        self.leads = self.own == "leader"
        self.shared = False
        self._sample_id = sample_id
        self._key = b""
        self._ready = False
        """A session in which nothing was restored yet."""
        self._fit_facts: dict[str, Any] | None = None
        self._word: dict[str, Any] | None = None
        """The leader's word that was heard and not yet followed."""
        self._ended = False
        """The leader's loop is over, and this party has heard of it."""
        self._saves = False
        """The leader has saved since its last word."""
        self._wished = False
        self._own_saves: dict[str, int] = {}
        """The sequence numbers of this party's checkpoints, by the names that both gave them."""
        self._common = 0
        """The sequence number of the newest one that the peer has, too."""
        self._stale = communicator.party.staleness
        self._delay: Delay | None = None
        self._stage: Stage | None = None
        self._promised = False
        """The leader has told of its next step already, so that a follower may go on."""
        self._unchecked: list[dict[str, Any]] = []
        """What this party read before the leader said what it has read."""

    def __getattr__(self, name: str) -> Any:
        """All that concerns the party's own workers only."""
        return getattr(self.inner, name)

    @property
    def follows(self) -> bool:
        return self.shared and not self.leads

    @property
    def channel(self) -> Channel:
        return self.communicator.channel

    # ---- life

    def begin(self, model: Model) -> None:
        self.inner.begin(model)
        if self.inner.worker_num > 1 and not self.inner.in_step:
            raise FederalError("workers of a party have to take their steps together: use a collective strategy")
        party = self.communicator.party
        facts = {
            "protocol": PROTOCOL,
            "job": party.job,
            "worker": self.inner.worker_id,
            "workers": self.inner.worker_num,
            "wire_dtype": party.wire_dtype,
            "staleness": party.staleness,
            "loss_scale": model.gradient.loss_scale,
            "gradient_merge": self.inner.gradient_merge,
            "sample ids": self._sample_id is not None,
        }
        channel = self.communicator.connect(self.inner.worker_id, facts)
        self.exchange.use(channel)
        channel.open()
        self._agree_key()

    def _agree_key(self) -> None:
        own = secrets.token_hex(16)
        self.channel.tell("key", own)
        self._key = session_key(own, str(self.channel.hear("key")))

    def prepare(self, model: Model) -> None:
        self.inner.prepare(model)
        self.exchange.built()
        if not self._stale:
            return
        if self.inner.gradient_merge > 1:
            raise ConfigError("staleness=1 does not go with gradient_merge: leave one of them out")
        self.exchange.contract.check_one_way("leader")
        if not self.leads:
            self._delay = Delay(model)
            self._delay.wrap()

    def begin_fit(self, facts: dict[str, Any]) -> None:
        """Both parties have to run the same procedure."""
        self._fit_facts = facts
        self._ready = True
        self._compare("fit", facts)

    def _compare(self, topic: str, own: Mapping[str, Any]) -> None:
        self.channel.tell(topic, dict(own))
        theirs = self.channel.hear(topic, f"its {topic}")
        found = side_by_side(self.own, _as_json(own), self.peer, theirs if isinstance(theirs, dict) else {})
        if found is not None:
            raise FederalError(f"the two parties do not do the same:\n{found}")

    def close(self) -> None:
        self.communicator.close()
        self.inner.close()

    def finish(self) -> None:
        self.inner.finish()
        self.channel.tell("done", True)
        self.channel.hear("done", "its end")

    # ---- a step

    def reader(self, stream: Stream, scope: TaskScope) -> Callable[[], Sample]:
        key, read = key_of(scope), self.inner.reader(stream, scope)
        together = self._lead_reading if self.leads else self._follow_reading

        def read_together() -> Sample:
            if self.exchange.building or not self.exchange.contract.shared(key):
                return read()
            return together(stream, read, key)

        return read_together

    def _lead_reading(self, stream: Stream, read: Callable[[], Sample], key: str) -> Sample:
        place, spent = [stream.epoch, stream.position], stream.spent
        try:
            sample = read()
        except OutOfRangeError:
            self._say({"pass": key, "spent": spent})
            raise
        exchange = self.exchange
        exchange.turn += 1
        self.channel.forget(exchange.turn)
        go, facts = {"go": key, "turn": exchange.turn, "place": place}, self._facts(sample)
        if not self._stale:
            self._say({**go, **facts})
            return sample
        if not self._promised:
            self._say(go)
        self.channel.tell("check", {**go, **facts})
        self._promised = self._goes_on(stream)
        if self._promised:
            self._say({"go": key, "turn": exchange.turn + 1, "place": [place[0], place[1] + 1]})
        return sample

    def _goes_on(self, stream: Stream) -> bool:
        """Whether a step of this loop follows for certain, so that it can be told before this one is over."""
        stage, source = self._stage, stream.source
        if not isinstance(stage, LoopStage) or stage.seconds is not None or not isinstance(source, Strided):
            return False
        last = stage.step is not None and stage.run_step + 1 >= stage.step
        return not last and stream.position + 1 < source.count(stream.epoch)

    def _facts(self, sample: Sample) -> dict[str, Any]:
        """What both parties' batches have in common."""
        ids = {} if self._sample_id is None else {"ids": self._digest(sample)}
        return {"rows": sample.batch_size, **ids}

    def _say(self, word: dict[str, Any]) -> None:
        if self._saves:
            word["save"], self._saves = True, False
        self.channel.tell("step", word)

    def _follow_reading(self, stream: Stream, read: Callable[[], Sample], key: str) -> Sample:
        word = self._next_word()
        self._word = None
        if "end" in word:
            self._ended = True
            raise LeftError(stop=False)
        told = word.get("go", word.get("pass"))
        if told != key:
            raise FederalError(f"the leader makes a step of {told}, the follower one of {key}: run the same stages")
        if "pass" in word:
            raise self._end_pass(stream, read, word)
        return self._read_along(stream, read, word)

    def _next_word(self) -> dict[str, Any]:
        if self._word is None:
            word = self.channel.hear("step", "the next step")
            if not isinstance(word, dict):
                raise FederalError("the leader's word is no word of a step")
            self._word = word
        return self._word

    def _end_pass(self, stream: Stream, read: Callable[[], Sample], word: Mapping[str, Any]) -> OutOfRangeError:
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

    def _read_along(self, stream: Stream, read: Callable[[], Sample], word: Mapping[str, Any]) -> Sample:
        own = {"pass": stream.epoch, "batch": stream.position}
        try:
            sample = read()
        except OutOfRangeError:
            raise DataError(
                f"input {stream.name!r}: the follower's pass {own['pass']} is over after {own['batch']} batches, the "
                "leader's is not: give both parties the same rows"
            ) from None
        read_here = {"name": stream.name, "place": own, "facts": self._facts(sample)}
        if self._stale:
            self._unchecked.append(read_here)
            self._check_those_told()
        else:
            self._check(read_here, word)
        self.exchange.turn = int(word["turn"])
        self.channel.forget(self.exchange.turn - self._stale)
        return sample

    def _check_those_told(self, *, wait: bool = False) -> None:
        """Compare what was read ahead with what the leader has read since."""
        while self._unchecked:
            word = self.channel.hear("check", "what it has read") if wait else self.channel.look("check")
            if word is None:
                return
            self._check(self._unchecked.pop(0), word)

    def _check(self, read_here: Mapping[str, Any], word: Mapping[str, Any]) -> None:
        name, facts = read_here["name"], dict(read_here["facts"])
        own_ids, their_ids = facts.pop("ids", None), word.get("ids")
        own = {**read_here["place"], **facts}
        epoch, position = word["place"]
        theirs = {"pass": epoch, "batch": position, "rows": word["rows"]}
        if own != theirs:
            found = side_by_side(self.own, own, self.peer, theirs)
            raise DataError(f"input {name!r}: the two parties are not at the same batch:\n{found}")
        if own_ids != their_ids:
            raise DataError(
                f"input {name!r}: batch {position} of pass {epoch} is of other samples than the leader's, or in "
                "another order: sort both parties' rows by their ids (`plait psi` writes them so)"
            )

    def _digest(self, sample: Sample) -> str:
        assert self._sample_id is not None  # noqa: S101 - asked before
        if self._sample_id not in sample:
            raise DataError(f"the batch has no field {self._sample_id!r} for sample_id: there are {', '.join(sample)}")
        return digest(sample[self._sample_id], self._key)

    def choose(self, value: Any) -> Any:
        if not self.follows:
            return self.inner.choose(value)
        word = self._next_word()
        task = str(word.get("go", word.get("pass"))).partition(":")[2]
        return task or None

    # ---- loops and stages

    def begin_stage(self, name: str, stage: Stage) -> None:
        self.inner.begin_stage(name, stage)
        self._stage, scopes = stage, _scopes(stage)
        self.shared = any(self.exchange.contract.shared(key_of(scope)) for scope in scopes)
        self._ended = self._wished = False
        if self.shared:
            facts: dict[str, Any] = {"stage": name, "kind": type(stage).__name__}
            if isinstance(stage, LoopStage):
                facts |= {"of": key_of(stage.scope), "steps": stage.step, "seconds": stage.seconds}
            self._compare("stage", facts)

    def stopper(self, session: MonitoredSession) -> Callable[[], bool]:
        if not self.shared:
            return self.inner.stopper(session)

        def lead() -> bool:
            if self.channel.look("stop"):
                session.request_stop()
            return session.should_stop() and not self._promised

        def follow() -> bool:
            if session.should_stop() and not self._wished:
                self._wished = True
                self.channel.tell("stop", True)
            if "end" not in self._next_word():
                return False
            self._word, self._ended = None, True
            return True

        return lead if self.leads else follow

    def end_loop(self) -> None:
        self.inner.end_loop()
        if not self.shared:
            return
        if self.leads:
            self._say({"end": True})
            return
        while not self._ended:  # this party's own workers have ended it
            self._ended = "end" in self._next_word()
            self._word = None
        self._check_those_told(wait=True)

    def settle(self, model: Model) -> None:
        if self._delay is not None:
            self._delay.drain()
        self.inner.settle(model)

    def lead(self, value: Any) -> Any:
        if self.leads:
            self.channel.tell("lead", value)
            return value
        return self.channel.hear("lead", "its decision")

    # ---- checkpoints

    def is_due(self, due: Callable[[], bool]) -> bool:
        if not self.shared:
            return False
        if self._stale:  # the follower may be a step ahead: steps decide, in both
            is_due = self.inner.is_due(due)
            if is_due and self._delay is not None:
                self._delay.drain()
            return is_due
        if not self.leads:
            return bool(self._next_word().pop("save", False))
        if self._saves or not self.inner.is_due(due):
            return False
        self._saves = True
        return True

    def capture(self, model: Model, directory: str | None) -> dict[str, Any]:
        if self.leads:
            name = secrets.token_hex(8)
            self.channel.tell("save", name)
        else:
            name = str(self.channel.hear("save", "the name of its checkpoint"))
        inner = self.inner.capture(model, directory)
        return {"party": inner, "save": name, "feedback": self.exchange.feedback.state_dict()}

    def durable(self, state: Mapping[str, Any], directory: str | None) -> bool:
        return self.inner.durable(state["party"], directory)

    def saved(self, state: Mapping[str, Any], path: Path) -> None:
        self.inner.saved(state["party"], path)
        self._own_saves[state["save"]] = int(path.name.rsplit("-", 1)[1])
        try:
            self.channel.tell("saved", state["save"])
            self._hear_of_saves()
        except (UnavailableError, FederalError):  # the training thread meets it, too
            return

    def _hear_of_saves(self) -> None:
        while (name := self.channel.look("saved")) is not None:
            self._common = max(self._common, self._own_saves.get(name, 0))

    def newest(self, directory: CheckpointDir) -> tuple[CheckpointInfo, Any] | None:
        """The newest that both parties have."""
        own = _checkpoints(directory)
        steps = {name: info.step for name, (info, _) in own.items()}
        self.channel.tell("checkpoints", steps)
        theirs = self.channel.hear("checkpoints", "its checkpoints")
        common = [name for name in own if isinstance(theirs, dict) and name in theirs]
        directory.pinned = lambda info: info.sequence >= self._common
        self._own_saves = {name: info.sequence for name, (info, _) in own.items()}
        self._common = self._own_saves[common[-1]] if common else 0
        if common:
            info, load = own[common[-1]]
            return info, load()
        if any(steps.values()) or any(dict(theirs).values()):
            facts = [
                {f"step {step}": "there" for step in sorted(set(found.values()))} for found in (steps, dict(theirs))
            ]
            found = side_by_side(self.own, facts[0], self.peer, facts[1])
            raise FederalError(
                f"the parties have no checkpoint in common:\n{found or 'the same steps, of other runs'}\n"
                "give both the directories of the same run, or empty ones"
            )
        return None

    def rejoin(self) -> None:
        """Begin a new session with a peer that has come back; the first restore of a fit needs none."""
        self.inner.rejoin()
        if self._ready:
            self._ready = False
            return
        if self.inner.worker_num > 1:
            log.error(
                "worker %d of the %s ends with exit code %d, so that its launcher starts all of them again: workers "
                "that take their steps together cannot go back one by one",
                self.inner.worker_id,
                self.own,
                START_AGAIN,
            )
            raise SystemExit(START_AGAIN)
        self._word, self._ended, self._saves, self._wished, self.shared = None, False, False, False, False
        self._promised, self._unchecked = False, []
        if self._delay is not None:
            self._delay.drop()
        self.channel.open()
        self._agree_key()
        self.exchange.contract.repeat(self.channel)
        if self._fit_facts is not None:
            self._compare("fit", self._fit_facts)

    def restore(self, model: Model, state: Mapping[str, Any], directory: str | None) -> None:
        self.inner.restore(model, state["party"], directory)
        self.exchange.feedback.load_state_dict(cast("Mapping[str, torch.Tensor]", state["feedback"]))


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _scopes(stage: Stage) -> list[TaskScope]:
    if isinstance(stage, LoopStage):
        return [stage.scope]
    if isinstance(stage, CotrainStage):
        return [TaskScope(MODE.TRAIN, task) for task in stage.ratio]
    return []


def _checkpoints(directory: CheckpointDir) -> dict[str, tuple[CheckpointInfo, Callable[[], Any]]]:
    """Those that are whole, the newest last, by the names that both parties gave them."""
    found: dict[str, tuple[CheckpointInfo, Callable[[], Any]]] = {}
    for info in directory.list():
        try:
            _, state, tensors = load_parts(info.path)
            name = join_tree(state, tensors)["cluster"]["save"]
        except (CheckpointError, KeyError, TypeError) as error:
            warnings.warn(f"skipped a checkpoint that is not whole, or not of a federation: {error}", stacklevel=2)
            continue
        found[str(name)] = (info, lambda info=info: directory.read(info))  # type: ignore[misc] # mypy cannot infer it
    return found
