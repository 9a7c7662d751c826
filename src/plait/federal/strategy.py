"""`Federal`: a party's own strategy, and what it agrees on with the other party."""

from __future__ import annotations

import json
import logging
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from plait.data import Sample, Stream
from plait.engine.stage import CotrainStage, LoopStage, Stage
from plait.engine.strategy import Strategy
from plait.engine.task import MODE, TaskScope
from plait.engine.update import refuse_scaler
from plait.errors import CheckpointError, ConfigError, DataError, FederalError, UnavailableError
from plait.federal.channel import Channel
from plait.federal.communicator import Communicator
from plait.federal.contract import MEETINGS, key_of
from plait.federal.delay import Delay
from plait.federal.difference import side_by_side
from plait.federal.exchange import Exchange
from plait.federal.private import PrivateParty
from plait.federal.samples import session_key
from plait.federal.settings import other
from plait.federal.steps import Following, Leading
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

WIRE_SECONDS = 5.0
"""How often, at most, a party says how much has travelled."""

log = logging.getLogger("plait")


class Federal:
    """One of two parties. Among its own workers it is what `inner` is."""

    def __init__(
        self,
        inner: Strategy,
        communicator: Communicator,
        exchange: Exchange,
        sample_id: str | None,
        alignment: str | None = None,
    ) -> None:
        self.inner = inner
        self.communicator = communicator
        self.exchange = exchange
        self.role = communicator.role
        self.peer = other(self.role)
        self.leads = self.role == "leader"
        self.shared = False
        self._stale = communicator.party.staleness
        make = Leading if self.leads else Following
        self._steps: Leading | Following = make(exchange, sample_id, self._stale)
        self._has_ids = sample_id is not None
        self._alignment = alignment
        """The digest of the rows that `plait psi` has aligned, if it has."""
        self._delay: Delay | None = None
        self._private = PrivateParty(exchange)
        self._said_bytes = time.monotonic()
        self._ahead = False
        """The follower may be told of steps ahead, in this stage."""
        self._trains = False
        self._steps_made = 0
        """Training steps of both, where steps decide when to save."""
        if isinstance(self._steps, Leading):
            self._steps.promises = inner.worker_num == 1
        self._ready = False
        """A session in which nothing was restored yet."""
        self._fit_facts: dict[str, Any] | None = None
        self._fits = 0
        """How many procedures this process has begun."""
        self._own_saves: dict[str, int] = {}
        """The sequence numbers of this party's checkpoints, by the names that both gave them."""
        self._common = 0
        """The sequence number of the newest one that the peer has, too."""

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
        refuse_scaler(model, "two parties")
        party = self.communicator.party
        facts = {
            "protocol": PROTOCOL,
            "job": party.job,
            "worker": self.inner.worker_id,
            "workers": self.inner.worker_num,
            "wire_dtype": party.wire_dtype,
            "staleness": party.staleness,
            "loss_scale": model.gradient.loss_scale,
            "gradient_clip": None if model.gradient.clip is None else [model.gradient.clip, model.gradient.clip_type],
            "gradient_merge": self.inner.gradient_merge,
            "sample ids": self._has_ids,
            **({} if self._alignment is None else {"aligned rows": self._alignment}),
        }
        channel = self.communicator.connect(self.inner.worker_id, facts)
        self.exchange.use(channel)
        log.info(
            "the %s %s %s, and waits for the %s, for up to %g s",
            self.role,
            "listens at" if party.listen is not None else "dials",
            self.communicator.endpoint,
            self.peer,
            party.timeout,
        )
        self.exchange.contract.meet = self._open
        self._again_and_again(self._open)

    def _open(self) -> None:
        """Begin a session, with a key of its own, and turns from 0: the peer may be a new process."""
        self.channel.open()
        self.exchange.turn = 0
        own = secrets.token_hex(16)
        self.channel.tell("key", own)
        self._steps.key = session_key(own, str(self.channel.hear("key")))

    def prepare(self, model: Model) -> None:
        self.inner.prepare(model)
        self.exchange.built()
        self._private.prepare(model)
        if not self._stale:
            return
        if model.private_tasks and not self.leads:
            raise ConfigError(
                "staleness=1 with a private optimizer at the follower: its layers are noted for a step at a time, and "
                "two would be under way; leave one of them out"
            )
        if self.inner.gradient_merge > 1:
            raise ConfigError("staleness=1 does not go with gradient_merge: leave one of them out")
        self.exchange.contract.check_one_way("leader")
        if not self.leads:
            self._delay = Delay(model)
            self._delay.wrap()

    def begin_fit(self, facts: dict[str, Any]) -> None:
        """Both parties have to run the same procedure."""
        self._fit_facts = facts
        self._steps.saving = bool(facts["checkpoint_dir"])
        self._ready = True
        self._fits += 1
        try:
            self._compare("fit", facts)
        except UnavailableError as error:
            if self._fits > 1:
                self.start_again(str(error))
            self._again_and_again(self._meet_again)

    def _again_and_again(self, meet: Callable[[], None]) -> None:
        """Until the peer has not been started anew while they met."""
        for tries in range(1, MEETINGS + 1):
            try:
                meet()
            except UnavailableError as error:
                if tries == MEETINGS:
                    raise
                log.warning("%s; it is met again", error)
            else:
                return

    def _meet_again(self) -> None:
        """Begin a session with a peer that builds anew, or has come back to its last checkpoint, too."""
        self._open()
        self.exchange.contract.repeat(self.channel)
        if self._fit_facts is not None:
            self._compare("fit", self._fit_facts)

    def _compare(self, topic: str, own: Mapping[str, Any]) -> None:
        self._steps.meet(topic)
        self.channel.tell(topic, dict(own))
        theirs = self.channel.hear(topic, f"its {topic}")
        found = side_by_side(self.role, _as_json(own), self.peer, theirs if isinstance(theirs, dict) else {})
        if found is not None:
            raise FederalError(f"the two parties do not do the same:\n{found}")

    def close(self) -> None:
        self.communicator.close()
        self.inner.close()

    def begun(self, wait: Callable[[], object]) -> None:
        """No step is made before both have a checkpoint to come back to."""
        wait()
        self.channel.tell("begun", True)
        self.channel.hear("begun", "its first checkpoint")

    def finish(self) -> None:
        self.inner.finish()
        self._steps.meet("done")
        self.channel.tell("done", True)
        self.channel.hear("done", "its end")
        self._log_bytes(0.0)
        while self.channel.look("stop"):  # a wish that came too late is none for the next procedure
            pass

    def _log_bytes(self, seconds: float) -> None:
        """Say how much has travelled, unless it was said less than so many seconds ago."""
        now, channel = time.monotonic(), self.channel
        if now - self._said_bytes >= seconds:
            self._said_bytes = now
            sent, received = channel.sent_bytes / 1e6, channel.received_bytes / 1e6
            log.info("on the wire: %.1f MB sent, %.1f MB received", sent, received)

    # ---- a step

    def reader(self, stream: Stream, scope: TaskScope) -> Callable[[], Sample]:
        key, read, steps = key_of(scope), self.inner.reader(stream, scope), self._steps
        shared: bool | None = None

        def read_together() -> Sample:
            nonlocal shared
            if shared is None and not self.exchange.building:
                shared = self.exchange.contract.shared(key)
            return steps.read(stream, read, key) if shared else read()

        return read_together

    def has_loss(self, scope: TaskScope) -> bool:
        return key_of(scope) not in self.exchange.lossless

    def received(self) -> Sequence[torch.Tensor]:
        self._private.look()
        return self.exchange.leaves()

    def returned_noise(self, scope: TaskScope) -> float | None:
        return self._private.returned_noise(scope)

    def choose(self, value: Any) -> Any:
        return self._steps.choose(value) if self.follows else self.inner.choose(value)

    # ---- loops and stages

    def begin_stage(self, name: str, stage: Stage) -> None:
        self.inner.begin_stage(name, stage)
        self.shared = any(self.exchange.contract.shared(key_of(scope)) for scope in _scopes(stage))
        self._steps.begin_stage(stage)
        self._ahead = isinstance(stage, LoopStage)
        self._trains = isinstance(stage, LoopStage) and stage.scope.mode is MODE.TRAIN
        if self.shared:
            facts: dict[str, Any] = {"stage": name, "kind": type(stage).__name__}
            if isinstance(stage, LoopStage):
                facts |= {"of": key_of(stage.scope), "steps": stage.step, "seconds": stage.seconds}
            if isinstance(stage, CotrainStage):
                keys = [key_of(TaskScope(MODE.TRAIN, task)) for task in stage.ratio]
                facts["of"] = sorted(key for key in keys if self.exchange.contract.shared(key))
            self._compare("stage", facts)

    def stopper(self, session: MonitoredSession) -> Callable[[], bool]:
        return self._steps.stopper(session) if self.shared else self.inner.stopper(session)

    def end_loop(self) -> None:
        self.inner.end_loop()
        if self.shared:
            self._steps.end_loop()
            self._log_bytes(WIRE_SECONDS)

    def settle(self, model: Model) -> None:
        if self._delay is not None:
            self._delay.drain()
        self.inner.settle(model)

    def lead(self, value: Any) -> Any:
        self._steps.meet("lead")
        if self.leads:
            self.channel.tell("lead", value)
            return value
        return self.channel.hear("lead", "its decision")

    # ---- checkpoints

    def is_due(self, due: Callable[..., bool]) -> bool:
        if not self.shared:
            return False
        # A follower that may be ahead does not wait for words: steps decide, in both.
        is_due = self._is_save_step() if self._stale and self._ahead else self._steps.is_due(due)
        if is_due and self._delay is not None:
            self._delay.drain()
        return bool(is_due)

    def _is_save_step(self) -> bool:
        """By a count that both parties have, and that a resumed run goes on with."""
        every = (self._fit_facts or {}).get("save_steps")
        if not self._trains:
            return False
        self._steps_made += 1
        return every is not None and self._steps_made % every == 0

    def capture(self, model: Model, directory: str | None) -> dict[str, Any]:
        turn = str(self.exchange.turn)
        if self.leads:
            name = f"{turn}-{secrets.token_hex(8)}"
            self.channel.tell("save", name)
        else:
            name = str(self.channel.hear("save", "the name of its checkpoint"))
            if name.partition("-")[0] != turn:
                raise FederalError(
                    f"the follower saves after turn {turn}, the leader did after {name.partition('-')[0]}"
                )
        inner, feedback = self.inner.capture(model, directory), self.exchange.feedback.state_dict()
        everybodys = self.inner.gather(feedback) if self.inner.in_step else [feedback]
        state = {"party": inner, "save": name, "feedback": everybodys, "steps": self._steps_made}
        return state if self._alignment is None else state | {"aligned": self._alignment}

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
        self._steps.meet("checkpoints")
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
            found = side_by_side(self.role, facts[0], self.peer, facts[1])
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
        if self.inner.worker_num > 1 or self._fits > 1:
            self.start_again(f"the {self.peer} has started anew")
        self.shared = False
        self._steps.reset()
        self._steps_made = 0
        if self._delay is not None:
            self._delay.drop()
        self._meet_again()

    def start_again(self, why: str) -> NoReturn:
        """End this process, and say nothing to the other party: it waits.

        Workers that take their steps together cannot go back one by one; and a program that has come to its second
        `fit` cannot go back to its first, where a peer is that has just been started.
        """
        log.error(
            "%s: the %s ends with exit code %d, which asks its launcher to start it again, from its last checkpoint",
            why,
            self.role if self.inner.worker_num == 1 else f"{self.role}'s worker {self.inner.worker_id}",
            START_AGAIN,
        )
        self.communicator.vanish()
        raise SystemExit(START_AGAIN)

    def restore(self, model: Model, state: Mapping[str, Any], directory: str | None) -> None:
        if state.get("aligned") != self._alignment:
            raise DataError(
                f"the checkpoint was made with aligned rows {_short(state.get('aligned'))}, and this run has "
                f"{_short(self._alignment)}: give FederalModel(aligned=...) the directory that it had"
            )
        self.inner.restore(model, state["party"], directory)
        self._steps_made = int(state.get("steps", 0))
        everybodys = state["feedback"]
        own = everybodys[self.inner.worker_id] if len(everybodys) == self.inner.worker_num else {}
        self.exchange.feedback.load_state_dict(cast("Mapping[str, torch.Tensor]", own))


def _short(digest: str | None) -> str:
    return "of no alignment" if digest is None else digest[:12]


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
