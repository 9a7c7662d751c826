"""Training with parameter servers: the worker's side, as a strategy of the engine."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from plait.cluster.alone import prune_shares
from plait.cluster.embedding import Gradients, SparseEmbedding
from plait.cluster.ps import rules
from plait.cluster.ps.client import Connection, Heartbeat, Pending, Refused, wait_all
from plait.cluster.ps.coordinator import ServedControl
from plait.cluster.ps.geo import Drift
from plait.cluster.ps.lookup import AheadSource, Embedding, described, replace_embeddings, sparse_embeddings
from plait.cluster.ps.placement import Part, Placement
from plait.cluster.ps.server import serve
from plait.cluster.ps.spec import ModelSpec, OptimizerSpec, VariableSpec
from plait.cluster.ps.wire import Message
from plait.cluster.reducing import combined
from plait.cluster.roles import Role
from plait.cluster.settings import Distributed
from plait.data.parts import PartSource
from plait.data.sample import Sample
from plait.data.sources import Source
from plait.engine.strategy import HOW
from plait.engine.sync_replicas import wanted_replicas
from plait.engine.update import LeftError, moved_by
from plait.errors import AbortedError, CheckpointError, ClusterError, ConfigError, UnavailableError

if TYPE_CHECKING:
    from plait.engine.model import Model

__all__ = ["Served"]

log = logging.getLogger("plait")

ROWS_AT_ONCE = 1 << 16
"""Rows of a table in one message."""
LIMIT = 5.0
"""Seconds of silence after which a process is taken for dead."""
MAX_JOINS = 20
UNDER_WAY = 1
"""Pushes that an asynchronous worker does not wait for."""


class _Asked(NamedTuple):
    """Rows that are on their way."""

    ids: Tensor
    version: int
    parts: list[Part]
    pendings: list[Pending]


class Served:
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
        self.generation = 0
        self._replicas = settings.replicas_to_aggregate or role.workers
        if not 1 <= self._replicas <= role.workers:
            raise ConfigError(
                f"replicas_to_aggregate={self._replicas}: write 1 to {role.workers}, the workers there are"
            )
        self._incarnation = uuid.uuid4().hex
        self._connections: list[Connection] = []
        self._heartbeat: Heartbeat | None = None
        self._control: ServedControl | None = None
        self._model: Model | None = None
        self._spec = ModelSpec()
        self._placement = Placement(self._spec, 1)
        self._variables: list[Tensor] = []
        self._embeddings: dict[str, Embedding] = {}
        self._weights: list[Tensor] = []
        """The embeddings of this worker; their values count only before the first step."""
        self._fields: dict[int, str | int] = {}
        """Which field of a batch has the ids of a table."""
        self._asked: dict[int, _Asked] = {}
        self._under_way: deque[list[Pending]] = deque()
        self._jumped = 0
        self._gathers = 0
        self._drift: Drift | None = None
        self._exchanges = 0
        self._loaded: str | None = None

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
        self._model = model
        timeout = self.settings.timeout
        self._connections = [
            Connection(endpoint, name=f"server {number}", own=f"worker {self.worker_id}", timeout=timeout)
            for number, endpoint in enumerate(self.role.server_endpoints)
        ]
        head = {"worker": self.worker_id, "incarnation": self._incarnation}
        self._heartbeat = Heartbeat(self.role.server_endpoints, head, limit=LIMIT)
        self._heartbeat.start()

    def transform(self, model: Model) -> None:
        self._embeddings = replace_embeddings(model, self) if self.mode != "geo" else sparse_embeddings(model)
        self._weights = [module.weight for module in self._embeddings.values()]
        if self.mode == "geo" and any(isinstance(one, SparseEmbedding) for one in self._embeddings.values()):
            raise ConfigError("SparseEmbedding in geo mode: each worker would need all rows; use another mode")

    def prepare(self, model: Model) -> None:
        self._describe(model)
        self._replicas = wanted_replicas(model.optimizers(), self.worker_num) or self._replicas
        for _ in range(MAX_JOINS):
            try:
                self._join()
            except (AbortedError, UnavailableError) as error:  # another was lost in the meantime
                log.warning("%s; joining again", error)
            else:
                return
        raise ClusterError(f"worker {self.worker_id} tried {MAX_JOINS} times to join, and each time one was lost")

    def close(self) -> None:
        """Say goodbye to every server; they end when everybody has."""
        if self._heartbeat is None:
            return
        with contextlib.suppress(ClusterError, UnavailableError):
            self.settle_pushes()
        heartbeat, self._heartbeat = self._heartbeat, None
        pendings = [one.send("bye", {"worker": self.worker_id}) for one in self._connections]
        for pending in pendings:
            with contextlib.suppress(ClusterError):
                pending.wait(2.0)
        heartbeat.stop()
        for connection in self._connections:
            connection.close()

    def _describe(self, model: Model) -> None:
        """Which optimizer moves which variable, as the servers are told."""
        numbers: dict[Tensor, int] = {}
        optimizers: list[OptimizerSpec] = []
        for optimizer in model.optimizers():
            for spec, group in zip(rules.describe(optimizer), optimizer.param_groups, strict=True):
                for variable in group["params"]:
                    if variable in numbers:
                        name = next(n for n, value in model.variables().items() if value is variable)
                        raise ConfigError(
                            f"variable {name!r} is moved by two optimizers; a server keeps one for each: give the "
                            "tasks the same optimizer object"
                        )
                    numbers[variable] = len(optimizers)
                optimizers.append(spec)
        apart = set(self._weights)
        named = {name: value for name, value in model.variables().items() if value in numbers and value not in apart}
        self._variables = list(named.values())
        variables = tuple(
            VariableSpec(name=name, shape=tuple(value.shape), dtype=_dtype(value), optimizer=numbers[value])
            for name, value in named.items()
        )
        tables = tuple(described(path, module, numbers.get(module.weight)) for path, module in self._embeddings.items())
        self._spec = ModelSpec(optimizers=tuple(optimizers), variables=variables, tables=tables)
        self._placement = Placement(self._spec, len(self._connections))

    # Membership

    def _join(self) -> None:
        """Be a worker of this generation; the chief makes the servers ready that are not."""
        self._await_servers()
        head = {
            "worker": self.worker_id,
            "incarnation": self._incarnation,
            "generation": self.generation,
            "mode": self.mode,
        }
        answer = self._joined(head)
        self.generation = int(answer.head["generation"])
        if self.in_step:
            self._gathers = 0
        self._asked.clear()
        self._under_way.clear()
        self.gradients = Gradients()
        self._control = ServedControl(
            self._connections[0],
            self.worker_id,
            self.worker_num,
            timeout=self.settings.timeout,
            check=self._check_alive if self.mode == "sync" else None,
            incarnation=f"{self._incarnation}-{self.generation}",
        )
        if self.worker_id == 0:
            for server in range(len(self._connections)):
                self._make_ready(server)
        self._await_ready()
        if self.in_step:
            self._take_chiefs()
        self._pull_dense()

    def _joined(self, head: dict[str, Any]) -> Message:
        try:
            pending = self._connections[0].send("join", head)
            return pending.wait(self.settings.timeout + LIMIT, self._heartbeat.check if self._heartbeat else None)
        except Refused as error:
            if error.code != "finished":
                raise
            log.warning("worker %d was started again after all others had finished: nothing is left", self.worker_id)
            self.close()
            raise SystemExit(0) from None

    def _make_ready(self, server: int, load: str | None = None) -> None:
        """Begin a server that has not begun in this generation: with the chief's values, or what it last saved."""
        status = self._ask_one(server, "status").head
        if status["ready"] and status["generation"] == self.generation and status["mode"] == self.mode:
            return
        _, flats = self._placement.pack(server, self._variables)
        head = {
            "g": self.generation,
            "spec": self._spec.to_json(),
            "mode": self.mode,
            "replicas": self._replicas,
            "version": self._moves(),
        }
        self._ask_one(server, "begin", head, flats)
        if load is not None:
            self._ask_one(server, "load", {"g": self.generation, "path": load})
        else:
            self._send_rows(server)
        self._ask_one(server, "ready", {"g": self.generation})

    def _ask_one(
        self, server: int, kind: str, head: dict[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> Message:
        return self._answers([self._connections[server].send(kind, head, tensors)])[0]

    def _send_rows(self, server: int) -> None:
        count = len(self._connections)
        for number, weight in enumerate(self._weights):
            values = weight.detach().cpu()
            for ids in _blocks(torch.arange(len(values))[server::count]):
                head = {"g": self.generation, "table": number}
                self._ask_one(server, "rows", head, [ids, values.index_select(0, ids)])

    def _await_ready(self) -> None:
        """Until the chief has made every server ready."""
        until = time.monotonic() + self.settings.timeout
        for server, connection in enumerate(self._connections):
            while True:
                status = self._ask_one(server, "status").head
                if status["ready"] and status["generation"] == self.generation:
                    break
                if time.monotonic() > until:
                    raise ClusterError(
                        f"worker {self.worker_id} waited {self.settings.timeout:g} s for the chief (worker 0) to make "
                        f"{connection.where} ready"
                    )
                time.sleep(0.05)

    def _take_chiefs(self) -> None:
        """What is not on servers, such as buffers, becomes the chief's."""
        if self._model is None:
            return
        served = {*self._variables, *self._weights}
        rest = {name: value for name, value in self._model.variables().items() if value not in served}
        told = self.tell(rest if self.worker_id == 0 else None)
        with torch.no_grad():
            for name, value in rest.items():
                value.copy_(told[name])

    def _check_alive(self) -> None:
        """Raise if a server is lost, or this generation is over."""
        if self._heartbeat is None:
            return
        self._heartbeat.check()
        notice = self._heartbeat.notices.get(0) or {}
        if self.mode == "sync" and notice.get("generation") == self.generation and notice.get("broken"):
            raise AbortedError(str(notice["broken"]))

    def _answers(self, pendings: Sequence[Pending]) -> list[Message]:
        """The servers' answers; what is wrong with the cluster becomes an error that a run can recover from."""
        try:
            return wait_all(pendings, self.settings.timeout, self._check_alive)
        except Refused as error:
            if error.code in ("left", "stop"):
                raise LeftError(stop=error.code == "stop") from None
            if error.code in ("stale", "dead", "finished"):
                raise AbortedError(str(error)) from error
            raise

    def rejoin(self) -> None:
        """After an error: in sync mode everybody joins anew; else this worker waits until the servers are back."""
        if self.mode != "sync" or self._model is None:
            return
        try:
            answers = [self._ask_one(server, "status").head for server in range(len(self._connections))]
        except (ClusterError, UnavailableError, AbortedError):
            answers = []
        ours = [one["ready"] and one["generation"] == self.generation and not one["broken"] for one in answers]
        if not ours or not all(ours):
            self._join()

    def _await_servers(self) -> None:
        """Until every server answers again."""
        until = time.monotonic() + self.settings.timeout
        for server, connection in enumerate(self._connections):
            connection.reset()
            while True:
                pending = connection.send("status")
                if pending.ready(1.0):
                    if self._heartbeat is not None:
                        self._heartbeat.expect(server, str(pending.result().head["incarnation"]))
                    break
                connection.forget(pending)
                if time.monotonic() > until:
                    raise ClusterError(
                        f"worker {self.worker_id} waited {self.settings.timeout:g} s for {connection.where} to be back"
                    )

    # Data

    def part(self, source: Source, *, training: bool) -> Source:
        own: Source = source
        if self.worker_num > 1:
            own = PartSource(source, self.worker_id, self.worker_num, together=training and self.in_step)
        return AheadSource(own, self._announce) if training and self.mode != "geo" else own

    # Rows

    def pull(self, table: int, ids: Tensor, *, create: bool) -> Tensor:
        """Rows of a table: those that were asked for ahead, if they still are what the step needs."""
        asked = self._asked.pop(table, None)
        version = self._moves()
        if create:
            self._learn(table, ids)
        fits = asked is not None and create and _same(asked.ids, ids)
        if asked is None or not fits or (self.mode == "sync" and asked.version != version):
            asked = self._ask(table, ids, version, create=create)
        return self._rows_of(table, asked)

    def _ask(self, table: int, ids: Tensor, version: int, *, create: bool = True) -> _Asked:
        parts = self._placement.partition(table, ids)
        head = {"g": self.generation, "t": table, "v": version, "c": create}
        pendings = [
            connection.send("pull", head, [part.ids]) for connection, part in zip(self._connections, parts, strict=True)
        ]
        return _Asked(ids, version, parts, pendings)

    def _rows_of(self, table: int, asked: _Asked) -> Tensor:
        answers = self._patient(lambda: self._answers(asked.pendings), lambda: self._ask_again(table, asked))
        if asked.parts[0].positions is None:
            return answers[0].tensors[0]
        spec = self._spec.tables[table]
        rows = torch.empty(len(asked.ids), spec.dim, dtype=answers[0].tensors[0].dtype)
        for part, answer in zip(asked.parts, answers, strict=True):
            if part.positions is not None:
                rows.index_copy_(0, part.positions, answer.tensors[0])
        return rows

    def _ask_again(self, table: int, asked: _Asked) -> list[Message]:
        return self._answers(self._ask(table, asked.ids, asked.version).pendings)

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
        for table, name in self._fields.items():
            if name in sample and table not in self._asked:
                ids = sample[name].reshape(-1)
                if ids.dtype is torch.int64 and ids.device.type == "cpu":
                    self._asked[table] = self._ask(table, ids, self._moves() + 1)

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

        def move() -> None:
            if not masks:  # the variables are known once the model is compiled
                masks.extend(variable in moved for variable in self._variables)
            # what another task left in a variable's gradient is not this task's
            gradients = [v.grad if mask else None for v, mask in zip(self._variables, masks, strict=True)]
            self._push(model, optimizers, gradients, scale)

        return move

    def _push(
        self,
        model: Model,
        optimizers: Sequence[torch.optim.Optimizer],
        gradients: Sequence[Tensor | None],
        scale: float,
    ) -> None:
        rates = _rates(model.optimizers(), optimizers)
        head = {"g": self.generation, "w": self.worker_id, "s": self._moves(), "r": rates}
        pendings = self._send_push(head, gradients, self.gradients.take(scale))
        if self.mode == "async":
            self._under_way.append(pendings)
            while len(self._under_way) > UNDER_WAY:
                self._take_oldest()
            return
        answers = self._patient(lambda: self._answers(pendings), list)
        self._unpack(answers)
        if self.mode == "sync" and answers:
            self._count(model, answers)

    def _send_push(
        self, head: dict[str, Any], tensors: Sequence[Tensor | None], rows: Mapping[int, tuple[Tensor, Tensor]]
    ) -> list[Pending]:
        shares = {table: self._placement.partition(table, ids) for table, (ids, _) in rows.items()}
        pendings = []
        for server, connection in enumerate(self._connections):
            present, flats = self._placement.pack(server, tensors)
            sent = list(flats)
            for table, (_, values) in rows.items():
                part = shares[table][server]
                sent += [part.ids, values if part.positions is None else values.index_select(0, part.positions)]
            pendings.append(connection.send("push", {**head, "p": present, "t": list(rows)}, sent))
        return pendings

    def _take_oldest(self) -> None:
        pendings = self._under_way.popleft()
        self._unpack(self._patient(lambda: self._answers(pendings), list))

    def _unpack(self, answers: Sequence[Message]) -> None:
        for server, answer in enumerate(answers):
            self._placement.unpack(server, answer.tensors, self._variables)

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

    def _patient(self, ask: Callable[[], list[Message]], again: Callable[[], list[Message]]) -> list[Message]:
        """The answers; where workers are not in step, a server that is lost is waited for, and `again` asked."""
        if self.mode == "sync":
            return ask()
        for _ in range(10):
            try:
                return ask()
            except (UnavailableError, AbortedError):
                self._await_servers()
                self._revive()
                ask = again
        raise ClusterError(f"worker {self.worker_id}: the servers were lost ten times in a row")

    def _revive(self) -> None:
        """A server was started again: the chief gives it what it last saved, everybody takes its values."""
        self._under_way.clear()
        self._asked.clear()
        if self.worker_id == 0:
            for server in range(len(self._connections)):
                self._make_ready(server, self._loaded)
        self._await_ready()
        self._pull_dense()

    def _pull_dense(self) -> None:
        pendings = [one.send("dense", {"g": self.generation}) for one in self._connections]
        self._unpack(self._answers(pendings))
        if self.mode == "geo":
            self._pull_tables()
            self._drift = Drift(self._variables, self._weights, self.worker_num)

    def _pull_tables(self) -> None:
        """Let this worker's own embeddings be what the servers have."""
        with torch.no_grad():
            for table, weight in enumerate(self._weights):
                for ids in _blocks(torch.arange(len(weight))):
                    weight[ids] = self._rows_of(table, self._ask(table, ids, 0))

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
        head = {"g": self.generation, "w": self.worker_id, "s": self._exchanges, "r": []}
        pendings = self._send_push(head, deltas, rows)
        answers = self._patient(lambda: self._answers(pendings), list)
        if not answers:  # a server was lost, and the variables are those that it had saved
            return
        values = [torch.empty_like(variable) for variable in self._variables]
        found = {table: torch.empty_like(delta) for table, (_, delta) in rows.items()}
        for server, answer in enumerate(answers):
            count = len(answer.tensors) - len(rows)
            self._placement.unpack(server, answer.tensors[:count], values)
            for (table, (ids, _)), got in zip(rows.items(), answer.tensors[count:], strict=True):
                positions = self._placement.partition(table, ids)[server].positions
                if positions is None:
                    found[table] = got
                else:
                    found[table].index_copy_(0, positions, got)
        drift.given(values, {table: (ids, found[table]) for table, (ids, _) in rows.items()})

    def settle_pushes(self) -> None:
        """Wait until everything that was sent is applied."""
        while self._under_way:
            self._take_oldest()

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """The servers do it."""

    def after_step(self, model: Model) -> None:
        pass

    def leave(self, model: Model, task: str | None, *, stop: bool) -> None:
        del model, task
        pendings = [one.send("leave", {"g": self.generation, "stop": stop}) for one in self._connections]
        self._answers(pendings)

    # Together

    def gather(self, value: Any) -> list[Any]:
        if self.worker_num == 1 or self._control is None:
            return [value]
        self._gathers += 1
        try:
            return self._control.gather(f"gather {self._gathers}", value, keep=self.mode != "sync")
        except Refused as error:
            if error.code in ("stale", "dead"):
                raise AbortedError(str(error)) from error
            raise

    def tell(self, value: Any) -> Any:
        return self.gather(value if self.worker_id == 0 else None)[0]

    def choose(self, value: Any) -> Any:
        return value

    def reduce(self, value: Any, how: HOW) -> Any:
        return combined(self.gather(value), how)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        told = self.tell([tensor.detach() for tensor in tensors])
        with torch.no_grad():
            for tensor, value in zip(tensors, told, strict=True):
                tensor.copy_(value)

    def barrier(self, name: str, interval: float) -> None:
        del interval, name
        self.settle_pushes()
        try:
            self.gather(None)
        except Refused as error:
            if error.code != "finished" or self.in_step:  # others were here before this worker was started again
                raise

    def settle(self, model: Model) -> None:
        del model
        self.settle_pushes()
        self._exchange()
        self._pull_tables()

    # State

    def is_saver(self) -> bool:
        return self.worker_id == 0 or not self.in_step

    def whole(self) -> bool:
        return True

    def capture(self, model: Model, directory: str | None) -> dict[str, Any]:
        """The chief has the servers save what they hold; they write it while training goes on."""
        if self.worker_id != 0 or directory is None:
            return {"gathers": self._gathers}
        self.settle_pushes()
        step = model.global_step.value
        name = f"servers-{step:012d}-{uuid.uuid4().hex[:8]}"
        path = str(Path(directory).absolute() / name)
        self._patient(lambda: self._save(path), lambda: self._save(path))
        self._pull_tables()
        return {"servers": name, "gathers": self._gathers}

    def _save(self, path: str) -> list[Message]:
        upto: dict[str, int] = {}
        if self.mode != "sync":
            held = self._answers([one.send("hold", {"g": self.generation}) for one in self._connections])
            for answer in held:
                for worker, step in answer.head["last"].items():
                    upto[worker] = max(step, upto.get(worker, -1))
        head = {"g": self.generation, "path": path, "upto": upto}
        return self._answers([one.send("save", head) for one in self._connections])

    def full(self, tree: dict[str, Any]) -> dict[str, Any]:
        return tree

    def own(self, model: Model, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        del model
        return tree

    def durable(self, state: Mapping[str, Any], directory: str | None) -> None:
        name = state.get("servers")
        if name is None or directory is None:
            return
        where = Path(directory).absolute()
        connections = [
            Connection(endpoint, name=f"server {number}", own="the saving thread", timeout=self.settings.timeout)
            for number, endpoint in enumerate(self.role.server_endpoints)
        ]
        try:
            for connection in connections:
                _await_saved(connection, str(where / name), 10 * self.settings.timeout)
        finally:
            for connection in connections:
                connection.close()
        self._loaded = str(where / name)
        prune_shares(where)

    def restore(self, model: Model, state: Mapping[str, Any], directory: str | None) -> None:
        """The servers take up what they saved with this checkpoint, unless they live and know better."""
        name = state.get("servers")
        if not self.in_step:
            self._gathers = int(state.get("gathers", 0))
        if name is not None and directory is not None:
            self._loaded = str(Path(directory).absolute() / name)
        if self.worker_id == 0 and self.mode == "sync":
            for server in range(len(self._connections)):
                if name is not None:
                    self._ask_one(server, "load", {"g": self.generation, "path": self._loaded})
        elif self.worker_id == 0:
            self._restore_apart(model)
        if self.in_step:
            self.gather(None)
        self._pull_dense()

    def _restore_apart(self, model: Model) -> None:
        """Servers that were begun by this very process have start values only: they load; others live on."""
        del model
        if self._loaded is None:
            return
        for server in range(len(self._connections)):
            if self._ask_one(server, "status").head["version"] == 0:
                self._ask_one(server, "load", {"g": self.generation, "path": self._loaded})


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _blocks(ids: Tensor) -> Sequence[Tensor]:
    """In portions that one message may hold."""
    if not len(ids):
        return []
    return ids.tensor_split(max(1, -(-len(ids) // ROWS_AT_ONCE)))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _rates(every: Sequence[torch.optim.Optimizer], moving: Sequence[torch.optim.Optimizer]) -> list[float]:
    """The learning rate of each parameter group; schedules of those that move are asked first."""
    for optimizer in moving:
        for hook in optimizer._optimizer_step_pre_hooks.values():  # noqa: SLF001 - what step() does first
            hook(optimizer, (), {})
    return [float(group["lr"]) for optimizer in every for group in optimizer.param_groups]


def _await_saved(connection: Connection, path: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        answer = connection.request("saved", {"path": path}).head
        if answer["done"]:
            return
        if answer["error"]:
            raise CheckpointError(f"{connection.where} could not save its share in {path}: {answer['error']}")
        time.sleep(0.02)
    raise CheckpointError(f"{connection.where} has not saved its share in {path} after {seconds:g} s")
