"""A parameter server: what it does with each message, in each mode of training."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from plait.cluster.ps.coordinator import Coordinator
from plait.cluster.ps.service import Request, Service
from plait.cluster.ps.shard import Push, Shard
from plait.cluster.ps.spec import ModelSpec
from plait.cluster.roles import Role
from plait.cluster.settings import SERVED
from plait.engine.report import show_log
from plait.errors import ClusterError, PlaitError

__all__ = ["Server", "Serving", "serve", "start"]

log = logging.getLogger("plait")

GRACE = 1.0
"""Seconds between the last goodbye and the end: answers are still under way."""
SILENT_TIMES = 3
"""A server ends when it has heard of nobody for so many timeouts."""
CUT_SECONDS = 5.0
"""How long a save waits for pushes that other servers have got already; and how long a hold waits for its save."""


class _Waiting(NamedTuple):
    """A worker's push that waits for the others', or a pull that waits for a step."""

    request: Request
    push: Push
    rates: list[float]


class _Cut(NamedTuple):
    """A save that waits until this server has applied what the others have."""

    request: Request
    upto: dict[int, int]
    until: float


class Server:
    """The state of one server, and a method for each kind of message. All run in the service's thread.

    Messages about training carry the generation that their worker belongs to. In sync mode a new generation begins
    when a worker or server was lost: everybody goes back to one checkpoint, and what is left of the old one is refused.
    """

    def __init__(self, role: Role, *, limit: float = 5.0, timeout: float = 60.0) -> None:
        self.index, self.workers, self.servers = role.index, role.workers, role.servers
        self.incarnation = uuid.uuid4().hex
        self.coordinator = Coordinator(role.workers, role.servers, limit=limit)
        self.shard: Shard | None = None
        self.mode = ""
        self.generation = 0
        self.broken: str | None = None
        """Why this generation is over, if it is."""
        self.dropped = 0
        """Gradients that came too late."""
        self.last: dict[int, int] = {}
        """The last step of each worker that was applied, where each is applied by itself."""
        self.stop: Callable[[], None] = lambda: None
        self.model_dir: str | None = None
        """What training begins with, unless the chief has a checkpoint loaded."""
        self._timeout = timeout
        self._ready = False
        self._replicas = role.workers
        self._pushes: dict[int, _Waiting] = {}
        self._pulls: list[Request] = []
        self._joining: dict[int, tuple[Request, float]] = {}
        self._left: tuple[str, set[int]] | None = None
        """That a worker has left the loop, and who knows it: the others are told at their next push."""
        self._held: list[Request] | None = None
        self._held_until = 0.0
        self._cut: _Cut | None = None
        self._writing: dict[str, str | None] = {}
        """What became of each save: "" while it is written, None when it is on disk, or what went wrong."""
        self._ending: float | None = None
        self.heard = time.monotonic()
        self._handlers: Mapping[str, Callable[[Request], None]] = {
            "beat": self._beat,
            "begin": self._begin,
            "bye": self._bye,
            "dense": self._dense,
            "gather": self.coordinator.gather,
            "hold": self._hold,
            "join": self._join,
            "leave": self._leave,
            "load": self._load,
            "pull": self._pull,
            "put": self._put,
            "push": self._push,
            "ready": self._make_ready,
            "rows": self._rows,
            "save": self._save,
            "saved": self._saved,
            "status": self._status,
        }

    def handle(self, request: Request) -> None:
        handler = self._handlers.get(request.kind)
        if handler is None:
            request.refuse(f"a server does not know {request.kind!r:.40}", "unknown")
        else:
            _guarded(handler, request)

    def tick(self, now: float) -> None:
        """Deadlines, and members that are silent."""
        self.coordinator.tick(now)
        dead = [member for member in self.coordinator.dead() if member < self.workers]
        if self.index == 0 and self.mode == "sync" and dead and self.broken is None and self._ready:
            self._break(f"worker {dead[0]} is silent for more than {self.coordinator.limit:g} s")
        for worker, (request, until) in list(self._joining.items()):
            if now > until:
                del self._joining[worker]
                missing = [f"worker {n}" for n in range(self.workers) if n not in self._joining and n != worker]
                request.refuse(f"{', '.join(missing) or 'somebody'} did not join in time", "timeout")
        if self._cut is not None and now > self._cut.until:
            self._take_cut()
        if self._cut is None and self._held is not None and now > self._held_until:
            self._release()  # whoever asked for the hold is gone
        if self.coordinator.finished():
            self._ending = now + GRACE if self._ending is None else self._ending
            if now > self._ending:
                self.stop()

    # Membership

    def _beat(self, request: Request) -> None:
        worker = _whole(request, "worker", self.workers + self.servers)
        self.heard = time.monotonic()
        self.coordinator.beat(worker, str(request.head.get("incarnation")))
        notice = {"generation": self.generation, "broken": self.broken, "ready": self._ready}
        request.reply({"incarnation": self.incarnation, "notice": notice})

    def _bye(self, request: Request) -> None:
        self.coordinator.finish(_whole(request, "worker", self.workers))
        request.reply()

    def _join(self, request: Request) -> None:
        """A worker is here. In sync mode all have to be, and then a new generation begins; else it goes on as it is."""
        worker, generation = _whole(request, "worker", self.workers), _whole(request, "generation")
        if self.coordinator.finished(besides=worker):
            request.refuse("all other workers have finished", "finished")
            return
        if request.head.get("mode") != "sync":
            request.reply({"generation": max(self.generation, 1)})
            return
        if self._ready and self.broken is None:
            self._break(f"worker {worker} was started again")
        self.generation = max(self.generation, generation)
        self._joining[worker] = (request, time.monotonic() + self._timeout)
        if len(self._joining) < self.workers:
            return
        joined, self._joining = self._joining, {}
        self.generation += 1
        self.broken, self._ready = None, False
        for waiting, _ in joined.values():
            waiting.reply({"generation": self.generation})

    def _break(self, why: str) -> None:
        self.broken = why
        log.warning("server %d: %s; the workers go back to the last checkpoint", self.index, why)
        self._refuse_waiting(why)

    def _refuse_waiting(self, why: str) -> None:
        waiting = [*(one.request for one in self._pushes.values()), *self._pulls, *(self._held or [])]
        if self._cut is not None:
            waiting.append(self._cut.request)
        self._pushes, self._pulls, self._held, self._cut, self._left = {}, [], None, None, None
        for request in waiting:
            request.refuse(why, "stale")
        self.coordinator.refuse(why, "stale")

    def _status(self, request: Request) -> None:
        version = self.shard.version if self.shard is not None else 0
        request.reply(
            {
                "generation": self.generation,
                "ready": self._ready,
                "version": version,
                "dropped": self.dropped,
                "mode": self.mode,
                "incarnation": self.incarnation,
                "broken": self.broken,
            }
        )

    # What is held

    def _begin(self, request: Request) -> None:
        """The chief says what there is, how it is trained, and which values it begins with."""
        head = request.head
        generation, mode = _whole(request, "g"), head.get("mode")
        if mode not in SERVED:
            raise ClusterError(f"mode {mode!r:.40}: a server trains in {', '.join(SERVED)}")
        if generation < self.generation:
            request.refuse(f"generation {generation} is over: it is {self.generation} now", "stale")
            return
        replicas = _whole(request, "replicas", self.workers + 1)
        if replicas < 1:
            raise ClusterError(f"replicas={replicas}: a step takes the gradients of 1 to {self.workers} workers")
        shard = Shard(ModelSpec.from_json(head.get("spec")), self.index, self.servers)
        shard.set_dense(request.tensors)
        shard.version = _whole(request, "version")
        self._refuse_waiting("a new generation has begun")
        self.shard, self.mode, self.generation, self._replicas = shard, str(mode), generation, replicas
        self.broken, self._ready, self.last = None, False, {}
        request.reply()

    def _put(self, request: Request) -> None:
        """Other values for the variables, as from a checkpoint of another run."""
        shard, version = self._of(request), _whole(request, "version")
        shard.set_dense(request.tensors)
        shard.version = version
        request.reply()

    def _rows(self, request: Request) -> None:
        """Start values of a table of a known size."""
        ids, values = _tensors(request, 2)
        self._of(request).load_rows(_whole(request, "table"), ids, values)
        request.reply()

    def _load(self, request: Request) -> None:
        extras = self._of(request).load(Path(_path(request)))
        self.model_dir = None
        steps = [(int(worker), int(step)) for extra in extras for worker, step in extra.get("last", {}).items()]
        self.last = {worker: max(step for one, step in steps if one == worker) for worker, _ in steps}
        self.dropped = max(int(extra.get("dropped", 0)) for extra in extras)
        request.reply({"version": self._of(request).version})

    def _make_ready(self, request: Request) -> None:
        shard = self._of(request)
        if self.model_dir is not None:
            version = shard.version
            shard.load(Path(self.model_dir))
            shard.version = version
        self._ready = True
        request.reply()

    def _of(self, request: Request) -> Shard:
        """The shard, if the request belongs to this generation."""
        generation = request.head.get("g")
        if self.shard is None or generation != self.generation:
            raise _StaleError(f"generation {generation!r:.20} is not this server's, {self.generation}")
        return self.shard

    def _trained(self, request: Request) -> Shard:
        """The same, if training may go on."""
        if self.broken is not None:
            raise _StaleError(self.broken)
        shard = self._of(request)
        if not self._ready:
            raise _StaleError("the chief has not made this server ready")
        return shard

    # Training

    def _dense(self, request: Request) -> None:
        shard = self._trained(request)
        request.reply({"v": shard.version}, shard.dense())

    def _pull(self, request: Request) -> None:
        """Rows of a table, once the steps before have been applied."""
        shard, (ids,) = self._trained(request), _tensors(request, 1)
        if self.mode == "sync" and _whole(request, "v") > shard.version:
            self._pulls.append(request)
            return
        rows = shard.pull(_whole(request, "t"), ids, create=bool(request.head.get("c", True)))
        request.reply({"v": shard.version}, [rows])

    def _push(self, request: Request) -> None:
        shard = self._trained(request)
        worker, step = _whole(request, "w", self.workers), _whole(request, "s")
        if self._held is not None:
            self._held.append(request)
            self._take_cut_if_whole()
            return
        if self.mode == "sync":
            self._push_together(shard, request, worker, step)
            return
        push, rates = _read_push(request)
        if step > self.last.get(worker, -1):
            if self.mode == "geo":
                shard.add(push)
            else:
                shard.apply([push], rates)
            self.last[worker] = step
        rows = [shard.pull(table, ids) for table, (ids, _) in push.rows.items()] if self.mode == "geo" else []
        request.reply({"v": shard.version}, [*shard.dense(), *rows])

    def _push_together(self, shard: Shard, request: Request, worker: int, step: int) -> None:
        if self._left is not None:
            code = self._left[0]
            self._know(code, {worker})
            request.refuse("another worker has left the loop", code)
            return
        if step < shard.version:
            self.dropped += 1
            request.reply({"v": shard.version, "late": True}, shard.dense())
            return
        if step > shard.version:
            raise ClusterError(f"worker {worker} pushes step {step}, the servers are at {shard.version}")
        push, rates = _read_push(request)
        shard.check_push(push, gradients=True)
        shard.check_rates(rates)
        self._pushes[worker] = _Waiting(request, push, rates)
        if len(self._pushes) < self._replicas:
            return
        waiting, self._pushes = self._pushes, {}
        ordered = [waiting[worker] for worker in sorted(waiting)]
        shard.apply([one.push for one in ordered], ordered[0].rates, 1.0 / len(ordered))
        for one in ordered:
            one.request.reply({"v": shard.version}, shard.dense())
        pulls, self._pulls = self._pulls, []
        for pull in pulls:
            _guarded(self._pull, pull)

    def _leave(self, request: Request) -> None:
        """A worker takes no more steps: who waits for it in one is told, or will be when it comes to wait."""
        self._trained(request)
        worker, code = _whole(request, "w", self.workers), "stop" if request.head.get("stop") else "left"
        self._know(code, {worker, *self._pushes})
        waiting, self._pushes = self._pushes, {}
        for one in waiting.values():
            one.request.refuse("another worker has left the loop", code)
        pulls, self._pulls = self._pulls, []
        for pull in pulls:
            pull.refuse("another worker has left the loop", code)
        request.reply()

    def _know(self, code: str, workers: set[int]) -> None:
        """These workers know that the loop is left; when all do, the next one may begin."""
        before, known = self._left or (code, set())
        known |= workers
        self._left = ("stop" if "stop" in (before, code) else code, known) if len(known) < self.workers else None

    # Saving: `hold` on every server, then `save` up to what any of them has applied, then `saved` until it is on disk

    def _hold(self, request: Request) -> None:
        self._trained(request)
        self._held = self._held or []
        self._held_until = time.monotonic() + CUT_SECONDS
        request.reply({"last": {str(worker): step for worker, step in self.last.items()}})

    def _save(self, request: Request) -> None:
        shard, path = self._trained(request), _path(request)
        if self._held is None and self.mode != "sync":
            raise _StaleError(f"a save has to follow a hold within {CUT_SECONDS:g} s")
        if self.mode == "sync":
            self._snapshot(shard, path)
            request.reply({"v": shard.version})
            return
        upto = _steps(request)
        if self._cut is not None:
            self._cut.request.refuse("another save was asked for", "stale")
        self._cut = _Cut(request, upto, time.monotonic() + CUT_SECONDS)
        self._take_cut_if_whole()

    def _take_cut_if_whole(self) -> None:
        """Apply what was held back as far as other servers have, and if that is all, take the snapshot."""
        cut, held = self._cut, self._held
        if cut is None or held is None:
            return
        self._held = None
        later = []
        for request in held:
            if _whole(request, "s") <= cut.upto.get(_whole(request, "w"), -1):
                _guarded(self._push, request)
            else:
                later.append(request)
        self._held = later
        if all(self.last.get(worker, -1) >= step for worker, step in cut.upto.items()):
            self._take_cut()

    def _take_cut(self) -> None:
        cut, self._cut = self._cut, None
        if cut is not None and self.shard is not None:
            self._snapshot(self.shard, _path(cut.request))
            cut.request.reply({"v": self.shard.version})
        self._release()

    def _release(self) -> None:
        """Take what was held back."""
        held, self._held = self._held, None
        for request in held or []:
            _guarded(self._push, request)

    def _snapshot(self, shard: Shard, path: str) -> None:
        extra = {"last": {str(worker): step for worker, step in self.last.items()}, "dropped": self.dropped}
        write = shard.snapshot(extra)
        self._writing[path] = ""
        thread = threading.Thread(target=self._write, args=(path, write), name="plait-shard", daemon=True)
        thread.start()

    def _write(self, path: str, write: Callable[[Path], None]) -> None:
        try:
            write(Path(path))
            self._writing[path] = None
        except Exception as error:  # noqa: BLE001 - whoever asks for the save is told
            self._writing[path] = f"{type(error).__name__}: {error}"

    def _saved(self, request: Request) -> None:
        path = str(request.head.get("path"))
        state = self._writing.get(path, "")
        lost = path not in self._writing  # this server was started again since
        request.reply({"done": state is None, "error": state or None, "lost": lost})


class _StaleError(ClusterError):
    """A message of a generation that is over, or has not begun."""

    code = "stale"


def _guarded(handler: Callable[[Request], None], request: Request) -> None:
    """What is wrong with a request is said to whoever sent it, and to nobody else."""
    try:
        handler(request)
    except PlaitError as error:
        if request.answered:
            raise
        request.refuse(str(error), getattr(error, "code", "refused"))
    except Exception as error:
        if request.answered:
            raise
        log.exception("a request %r failed", request.kind)
        request.refuse(f"{type(error).__name__}: {error}", "error")


def _whole(request: Request, name: str, below: int | None = None) -> int:
    value = request.head.get(name)
    if type(value) is not int or value < 0 or (below is not None and value >= below):
        raise ClusterError(f"{request.kind!r} has {name}={value!r:.40}: send a whole number from 0 up")
    return value


def _tensors(request: Request, count: int) -> list[Tensor]:
    if len(request.tensors) != count:
        raise ClusterError(f"{request.kind!r} came with {len(request.tensors)} tensors: send {count}")
    return request.tensors


def _path(request: Request) -> str:
    path = request.head.get("path")
    if not isinstance(path, str) or not Path(path).is_absolute():
        raise ClusterError(f"{request.kind!r} has path={path!r:.200}: send an absolute one")
    return path


def _steps(request: Request) -> dict[int, int]:
    """`upto`: the last step of each worker that a save has to have; JSON's keys are texts."""
    upto = request.head.get("upto", {})
    if not isinstance(upto, dict) or not all(key.isdecimal() and type(step) is int for key, step in upto.items()):
        raise ClusterError(f"'save' has upto={upto!r:.80}: send a step for each worker")
    return {int(worker): step for worker, step in upto.items()}


def _read_push(request: Request) -> tuple[Push, list[float]]:
    """The head has `p` (the variables present), `r` (rates), `t` (the tables whose ids and rows follow the flats)."""
    head, tensors = request.head, request.tensors
    present, rates, tables = head.get("p"), head.get("r"), head.get("t")
    if not (present is None or _whole_list(present)) or not _number_list(rates):
        raise ClusterError("a push has p and r: the numbers of variables, and rates")
    if not isinstance(tables, list) or not _whole_list(tables):
        raise ClusterError("a push has t: the numbers of tables")
    count = len(tensors) - 2 * len(tables)
    if count < 0 or len(set(tables)) != len(tables):
        raise ClusterError(f"a push of {len(tensors)} tensors cannot hold rows of {len(tables)} tables")
    rows = {table: (tensors[count + 2 * n], tensors[count + 2 * n + 1]) for n, table in enumerate(tables)}
    return Push(present, tensors[:count], rows), [float(rate) for rate in rates or ()]


def _whole_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _number_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) in (int, float) for item in value)


class Serving(NamedTuple):
    """A server of this process, and the loop that it runs in."""

    server: Server
    service: Service


_serving: dict[Role, Serving] = {}


def start(role: Role, *, timeout: float = 60.0) -> Serving:
    """Let this process answer as server `role.index`, from now on; once."""
    found = _serving.get(role)
    if found is None:
        server = Server(role, timeout=timeout)
        service = Service(role.server_endpoints[role.index], server.handle, tick=server.tick)
        server.stop = service.stop
        service.start()
        found = _serving[role] = Serving(server, service)
    return found


def serve(role: Role, *, timeout: float = 60.0, model_dir: str | None = None) -> None:
    """Be server `role.index` until all workers have said goodbye; ClusterError if none is heard of any more.

    With `model_dir`, training begins with what servers saved there, however many they were.
    """
    server, service = start(role, timeout=timeout)
    server.model_dir = model_dir
    show_log()
    log.info("server %d listens at %s, for %d worker(s)", role.index, service.endpoint, role.workers)
    try:
        while not service.wait(0.5):
            silent = time.monotonic() - server.heard
            if silent > SILENT_TIMES * timeout:
                raise ClusterError(f"server {role.index} has not heard of any worker for {silent:.0f} s: it ends")
    finally:
        service.stop()
        _serving.pop(role, None)
