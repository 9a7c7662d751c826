"""Training with parameter servers: the worker's side, as a strategy of the engine."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from plait.cluster.embedding import Gradients, SparseEmbedding
from plait.cluster.ps import saving
from plait.cluster.ps.client import Pending, Refused
from plait.cluster.ps.geo import Drift
from plait.cluster.ps.holding import Asked, Holding, RowsOfTables
from plait.cluster.ps.lookup import AheadSource, Embedding, replace_embeddings, sparse_embeddings
from plait.cluster.ps.membership import Membership
from plait.cluster.ps.server import serve
from plait.cluster.ps.wire import Message
from plait.cluster.reducing import combined
from plait.cluster.roles import Role
from plait.cluster.settings import Distributed
from plait.cluster.transforms import after_build, before_build, choose_gpu
from plait.data.parts import part_of
from plait.data.sample import Sample
from plait.data.sources import Source
from plait.engine.strategy import HOW, OneParty
from plait.engine.sync_replicas import wanted_replicas
from plait.engine.update import moved_by
from plait.errors import AbortedError, ClusterError, ConfigError, RecoverableError, UnavailableError

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["Served"]

log = logging.getLogger("plait")

MAX_JOINS = 20
"""How often a worker joins again because another was lost meanwhile."""
UNDER_WAY = 1
"""Pushes that an asynchronous worker does not wait for."""
AHEAD = 32
"""Tables whose next rows are asked for ahead; a connection takes 64 questions at a time."""
TOGETHER = 60
"""With those of the step itself."""

T = TypeVar("T")


class Served(OneParty):
    """A worker whose variables are on servers. In `sync` mode it is in step with the other workers."""

    def __init__(self, role: Role, settings: Distributed) -> None:
        self.role, self.settings = role, settings
        self.mode = "sync" if settings.mode == "auto" else settings.mode
        self.worker_id, self.worker_num = role.index, role.workers
        self.gradient_merge = settings.gradient_merge
        self.in_step = self.mode == "sync" and role.workers > 1
        self.gradients = Gradients()
        self.dropped = 0
        """This worker's gradients that came too late."""
        self._replicas = settings.replicas_to_aggregate or role.workers
        if not 1 <= self._replicas <= role.workers:
            raise ConfigError(f"replicas_to_aggregate={self._replicas}: write 1 to {role.workers}, the workers")
        self.closed = False
        self._model: Model | None = None
        self._joined: Membership | None = None
        self._held: Holding | None = None
        self._embeddings: dict[str, Embedding] = {}
        self._fields: dict[int, str | int] = {}
        """Which field of a batch has the ids of a table."""
        self._asked: dict[tuple[bool, int, int, int], Asked] = {}
        self._under_way: deque[list[Pending]] = deque()
        self._jumped = 0
        self._gathers = 0
        self._drift: Drift | None = None
        self._exchanges = 0
        self._saved: str | None = None
        """The last save of the servers that is whole: what a server that was lost begins with."""

    @property
    def members(self) -> Membership:
        if self._joined is None:
            raise ClusterError("this worker has not joined its cluster yet: compile() the model first")
        return self._joined

    @property
    def held(self) -> Holding:
        if self._held is None:
            raise ClusterError("the servers hold nothing of this worker's yet: compile() the model first")
        return self._held

    # Life

    def begin(self, model: Model) -> None:
        if self.role.is_server:
            serve(self.role, timeout=self.settings.timeout)
            raise SystemExit(0)
        if model.gradient.clip is not None:
            raise ConfigError(
                "gradient_clip with parameter servers: gradients of all workers and of all servers never meet in one "
                "place; leave it out, or train without servers"
            )
        choose_gpu(self.role)
        before_build(model, self.settings)
        self._model = model
        self._joined = Membership(self.role, self.mode, self.settings.timeout)

    def transform(self, model: Model) -> None:
        after_build(model, self.settings)
        self._embeddings = replace_embeddings(model, self) if self.mode != "geo" else sparse_embeddings(model)
        if self.mode == "geo" and any(isinstance(one, SparseEmbedding) for one in self._embeddings.values()):
            raise ConfigError("SparseEmbedding in geo mode: each worker would need all rows; use another mode")

    def prepare(self, model: Model) -> None:
        self._held = Holding(self.members, model, self._embeddings)
        self._replicas = wanted_replicas(model.optimizers(), self.worker_num) or self._replicas
        for _ in range(MAX_JOINS):
            try:
                self._join()
            except RecoverableError as error:  # another was lost in the meantime
                log.warning("%s; joining again", error)
            else:
                return
        raise ClusterError(f"worker {self.worker_id} tried {MAX_JOINS} times to join, and each time one was lost")

    def _join(self) -> None:
        """Be a worker of this generation; the chief makes the servers ready that are not."""
        self.members.join()
        if self.in_step:
            self._gathers = 0
        self._forget()
        self.gradients = Gradients()
        self._make_ready()
        self._take_chiefs()
        self._pull()

    def _make_ready(self, load: str | None = None) -> None:
        if self.worker_id == 0:
            for server in self.members.servers:
                self.held.fill(server, replicas=self._replicas, version=self._moves(), load=load)
        self.members.await_ready()

    def _take_chiefs(self) -> None:
        """What is not on servers, such as buffers, becomes the chief's."""
        served = {*self.held.variables, *self.held.weights}
        named = self._model.variables() if self._model is not None else {}
        rest = {name: value for name, value in named.items() if value not in served}
        told = self.tell(rest if self.worker_id == 0 else None)
        with torch.no_grad():
            for name, value in rest.items():
                value.copy_(told[name])

    def _forget(self) -> None:
        """What was under way belongs to servers that are gone."""
        self._asked.clear()
        self._under_way.clear()

    def _pull(self) -> None:
        self.held.pull_variables()
        if self.mode == "geo":
            self.held.pull_tables()
            self._drift = Drift(self.held.variables, self.held.weights, self.worker_num)

    def rejoin(self) -> None:
        """After an error in sync mode, everybody joins anew; else this worker waits for servers when it needs them."""
        if self.mode == "sync" and self._held is not None and not self.members.belongs():
            self._join()

    def close(self) -> None:
        if self._joined is None:
            return
        with contextlib.suppress(ClusterError, RecoverableError):
            self.settle_pushes()
        self._joined.leave()
        self._joined, self.closed = None, True

    # Rows

    def part(self, source: Source, *, training: bool) -> Source:
        own = part_of(source, self.worker_id, self.worker_num, together=training and self.in_step)
        ahead = self.mode in ("sync", "async")  # else rows would be older than the worker's own last step
        return AheadSource(own, self._announce) if training and ahead else own

    def ask(self, table: int, ids: Tensor, *, create: bool) -> None:
        """Let rows that the step will pull be on their way."""
        key = _key(table, ids, create=create)
        if key not in self._asked and len(self._asked) < TOGETHER:
            self._asked[key] = self.held.ask_rows(table, ids, self._moves(), create=create)

    def pull(self, table: int, ids: Tensor, *, create: bool) -> Tensor:
        """Rows of a table: those that were asked for ahead, if they still are what the step needs."""
        asked, version = self._asked.pop(_key(table, ids, create=create), None), self._moves()
        if create:
            self._learn(table, ids)
        if (
            asked is None
            or (self.mode == "sync" and asked.version != version)
            or not torch.equal(asked.ids, ids)  # a step may change its batch
        ):
            asked = self.held.ask_rows(table, ids, version, create=create)
        return self._patient(partial(self.held.rows, asked), partial(self._rows_again, asked, create=create))

    def _rows_again(self, asked: Asked, *, create: bool) -> Tensor:
        return self.held.rows(self.held.ask_rows(asked.table, asked.ids, asked.version, create=create))

    def _learn(self, table: int, ids: Tensor) -> None:
        """Find the field of the batch that these ids are."""
        sample = self._model._now.sample if self._model is not None else None  # noqa: SLF001 - a friend
        if table in self._fields or sample is None:
            return
        for name, value in sample.items():
            if isinstance(value, Tensor) and value.data_ptr() == ids.data_ptr() and value.numel() == ids.numel():
                self._fields[table] = name

    def _announce(self, sample: Sample) -> None:
        """The next batch is known: ask for the rows that it will need."""
        next_version = self._moves() + 1
        for key in [key for key, asked in self._asked.items() if asked.version < next_version - 1]:
            del self._asked[key]  # a batch that was never used
        for table, name in self._fields.items():
            if name in sample and len(self._asked) < AHEAD:
                ids = sample[name].reshape(-1)
                if ids.dtype is torch.int64 and ids.device.type == "cpu":
                    self._asked[_key(table, ids)] = self.held.ask_rows(table, ids.clone(), next_version)

    # A step

    def _moves(self) -> int:
        """How often the variables have moved."""
        return (self._model.global_step.value if self._model is not None else 0) // self.gradient_merge

    def mover(
        self, model: Model, task: str | None, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Callable[[], None] | None:
        del task
        if self.mode == "geo":
            return self._geo_mover(model, optimizers)
        scale = 1.0 / (self.gradient_merge * model.gradient.loss_scale)
        moved = set(moved_by(list(optimizers)))
        masks: list[bool] = []
        options = _options(optimizers)

        def move() -> None:
            variables = self.held.variables
            if not masks:  # they are known once the model is compiled
                masks.extend(variable in moved for variable in variables)
            # what another task left in a variable's gradient is not this task's
            gradients = [value.grad if mask else None for value, mask in zip(variables, masks, strict=True)]
            rows = self.gradients.take(scale, {n for n, weight in enumerate(self.held.weights) if weight in moved})
            rates = _rates(model.optimizers(), optimizers)
            if _options(optimizers) != options:
                raise ConfigError(
                    "an option of an optimizer other than its learning rate has changed (OneCycleLR cycles the "
                    "momentum): the servers have the first one; write cycle_momentum=False, or train without servers"
                )
            self._push(model, rates, gradients, rows)

        return move

    def _push(
        self, model: Model, rates: Sequence[float], gradients: Sequence[Tensor | None], rows: RowsOfTables
    ) -> None:
        head = {"g": self.members.generation, "w": self.worker_id, "s": self._moves(), "r": rates}
        pendings = self.held.push(head, gradients, rows)
        if self.mode == "async":
            self._under_way.append(pendings)
            while len(self._under_way) > UNDER_WAY:
                self._take_oldest()
            return
        answers = self._applied(pendings)
        self.held.take(answers)
        if self.mode == "sync":
            self._count(model, answers)

    def _applied(self, pendings: list[Pending]) -> list[Message]:
        """The answers to a push; none if a server was lost, and the push with it."""
        return self._patient(partial(self.members.answers, pendings), _no_answers)

    def _take_oldest(self) -> None:
        self.held.take(self._applied(self._under_way.popleft()))

    def settle_pushes(self) -> None:
        """Wait until everything that was sent is applied."""
        while self._under_way:
            self._take_oldest()

    def _count(self, model: Model, answers: Sequence[Message]) -> None:
        """A worker whose gradient came too late goes on where the others are."""
        if any(answer.head.get("late") for answer in answers):
            self.dropped += 1
            ahead = max(int(answer.head["v"]) for answer in answers) - self._moves() - 1
            if ahead > 0:
                self._jumped += ahead
                model.global_step.value += ahead * self.gradient_merge

    def jumped(self) -> int:
        steps, self._jumped = self._jumped, 0
        return steps

    def _patient(self, ask: Callable[[], T], again: Callable[[], T]) -> T:
        """The answer; where workers are not in step, a server that is lost is waited for, and `again` asked."""
        if self.mode == "sync":
            return ask()
        for _ in range(MAX_JOINS):
            try:
                return ask()
            except (UnavailableError, AbortedError) as error:
                log.warning("%s; worker %d waits for it", error, self.worker_id)
                self._revive()
                ask = again
        raise ClusterError(f"worker {self.worker_id}: servers were lost {MAX_JOINS} times in a row")

    def _revive(self) -> None:
        """A server was started again: the chief gives it what was last saved, everybody takes what the servers have."""
        for _ in range(MAX_JOINS):
            try:
                self.members.await_servers()
                self._forget()
                self._make_ready(self._saved)
                self._pull()
            except RecoverableError as error:
                log.warning("%s; worker %d waits for it", error, self.worker_id)
            else:
                return

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """The servers do it."""

    def after_step(self, model: Model) -> None:
        pass

    def leave(self, model: Model, task: str | None, *, stop: bool) -> None:
        del model, task
        self.members.ask_all("leave", w=self.worker_id, stop=stop)

    # Geo

    def _geo_mover(self, model: Model, optimizers: Sequence[torch.optim.Optimizer]) -> Callable[[], None]:
        every = self.settings.geo_steps

        def move() -> None:
            if self._drift is not None:
                self._drift.note()
            for optimizer in optimizers:
                optimizer.step()
            if (model.global_step.value + 1) % every == 0:
                self._exchange()

        return move

    def _exchange(self) -> None:
        """Send the way gone, take what the servers have made of everybody's."""
        drift = self._drift
        if drift is None:
            return
        self._exchanges += 1
        deltas, rows = drift.taken()
        head = {"g": self.members.generation, "w": self.worker_id, "s": self._exchanges, "r": []}
        answers = self._applied(self.held.push(head, deltas, rows))
        if answers:  # else a server was lost, and the variables are those that it had saved
            values = [torch.empty_like(variable) for variable in self.held.variables]
            self.held.take(answers, values)
            drift.given(values, self.held.take_rows(answers, rows))

    # Together

    def gather(self, value: Any) -> list[Any]:
        if self.worker_num == 1:
            return [value]
        self._gathers += 1
        return self.members.gather(f"gather {self._gathers}", value)

    def tell(self, value: Any) -> Any:
        return self.gather(value if self.worker_id == 0 else None)[0]

    def choose(self, value: Any) -> Any:
        return value

    def reduce(self, value: Any, how: HOW) -> Any:
        return combined(self.gather(value), how)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Also the servers take the chief's values, which a stage or a checkpoint has given it."""
        told = self.tell([tensor.detach() for tensor in tensors])
        with torch.no_grad():
            for tensor, value in zip(tensors, told, strict=True):
                tensor.copy_(value)
        if self._held is not None:
            self._patient(self._send_values, self._send_values)

    def _send_values(self) -> None:
        """Let the servers hold what the chief has."""
        self.settle_pushes()
        if self.worker_id == 0:
            for server in self.members.servers:
                self.held.put(server, version=self._moves())
        self.gather(None)
        self._pull()

    def barrier(self, name: str, interval: float) -> None:
        """Those who live are waited for however long they take; one that is lost, until it may be called missing."""
        self._gathers += 1
        lost_at: float | None = None
        while self.worker_num > 1:
            try:
                self.members.gather(f"gather {self._gathers}", None)
                break
            except Refused as error:
                if error.code == "finished" and not self.in_step:
                    break  # others were here before this worker was started again
                if error.code != "timeout":
                    raise
                log.warning("the end of stage %r: %s; still waiting", name, error)
                lost_at = None
            except AbortedError:
                lost_at = lost_at or time.monotonic()
                if self.in_step or time.monotonic() - lost_at > self.settings.timeout:
                    raise
                time.sleep(interval)
        if self.mode != "sync":  # everybody has sent what it had
            self._patient(self._pull_all, self._pull_all)

    def _pull_all(self) -> None:
        """The model's variables become what the servers have, embeddings included."""
        self._pull()
        if self.mode != "geo":
            self.held.pull_tables()

    def settle(self, model: Model) -> None:
        """What this worker has done is on the servers, and in sync mode what they have is in the model."""
        del model
        self.settle_pushes()
        self._exchange()
        if self.mode == "sync":
            self.held.pull_tables()

    # State

    def is_saver(self) -> bool:
        return self.worker_id == 0 or not self.in_step

    def whole(self) -> bool:
        """Rows whose gradients are being merged are in no checkpoint."""
        return self._model is None or self._model.global_step.value % self.gradient_merge == 0

    def full(self, tree: dict[str, Any]) -> dict[str, Any]:
        return tree

    def own(self, model: Model, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        del model
        return tree

    def capture(self, model: Model, directory: str | None) -> dict[str, Any]:
        """The chief has the servers save what they hold; they write it while training goes on."""
        state = {"gathers": self._gathers, "exchanges": self._exchanges}
        if self.worker_id != 0 or directory is None:
            return state
        self.settle_pushes()
        self._exchange()
        name = saving.name_of(model.global_step.value)
        self.save(saving.path_of(directory, name))
        if self.mode != "geo":  # there, this worker's own variables are ahead of the servers'
            self._patient(self._pull_all, self._pull_all)
        return {**state, "servers": name}

    def save(self, path: str) -> None:
        """Have every server copy what it holds, all at the same step, and write it to `path` in the background."""
        again = partial(saving.save, self.members, path)
        self._patient(again, again)

    def durable(self, state: Mapping[str, Any], directory: str | None) -> bool:
        if directory is None or "servers" not in state:
            return True
        path = saving.path_of(directory, state["servers"])
        if not saving.await_saved(self.role, path, self.settings.timeout):
            return False
        self._saved = path
        saving.prune(directory)
        return True

    def restore(self, model: Model, state: Mapping[str, Any], directory: str | None) -> None:
        """The servers take up what they saved with this checkpoint, unless they live and know better."""
        del model
        if not self.in_step:
            self._gathers = int(state.get("gathers", 0))
            self._exchanges = int(state.get("exchanges", 0))
        if "servers" in state and directory is not None:
            self._saved = saving.path_of(directory, state["servers"])
            if self.worker_id == 0:
                self._load(self._saved)
        elif self.worker_id == 0:
            log.warning("the checkpoint was made without servers: they take its variables; optimizers begin anew")
            if self.mode == "sync" or not self._trained():
                for server in self.members.servers:
                    self.held.put(server, version=self._moves())
        if self.in_step:
            self.gather(None)
        self._patient(self._pull, self._pull)

    def _trained(self) -> bool:
        """Whether the servers have made steps: they live on when a worker comes back."""
        return any(self.members.ask(server, "status").head["version"] > 0 for server in self.members.servers)

    def _load(self, path: str) -> None:
        """In sync mode all servers go back to the checkpoint; else those that have not been trained yet."""
        for server in self.members.servers:
            if self.mode == "sync" or self.members.ask(server, "status").head["version"] == 0:
                self.members.ask(server, "load", {"g": self.members.generation, "path": path})


def _no_answers() -> list[Message]:
    return []


def _options(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[Any]]:
    """What the servers were told once of each parameter group; a schedule may change the rate only."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [[group.get(name) for name in ("momentum", "betas", "weight_decay", "alpha")] for group in groups]


def _key(table: int, ids: Tensor, *, create: bool = True) -> tuple[bool, int, int, int]:
    """What tells the ids of one batch from those of another, as long as both live."""
    return create, table, ids.data_ptr(), ids.numel()


def _rates(every: Sequence[torch.optim.Optimizer], moving: Sequence[torch.optim.Optimizer]) -> list[float]:
    """The learning rate of each parameter group; schedules of those that move are asked first."""
    for optimizer in moving:
        for hook in optimizer._optimizer_step_pre_hooks.values():  # noqa: SLF001 - what step() does first
            hook(optimizer, (), {})
    return [float(group["lr"]) for optimizer in every for group in optimizer.param_groups]
