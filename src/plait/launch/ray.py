"""A cluster on Ray's nodes: Ray places the processes, each runs the script as `plait launch` would."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from plait.errors import ClusterError, ConfigError
from plait.launch.environment import Layout, free_ports, without_roles
from plait.launch.local import check_command, check_counts, groups_of, make_log_dir, watch
from plait.launch.processes import LocalChild, Processes, write_note

__all__ = ["run"]

_ROOM_SECONDS = 120.0  # to find room on the nodes
_ANSWER_SECONDS = 60.0  # for an actor to start and to answer
_CLOSE_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_CHUNK = 1 << 20


def run(
    command: Sequence[str],
    *,
    workers: int,
    servers: int = 0,
    max_restarts: int = 3,
    log_dir: str | Path | None = None,
    cpus: float = 1,
    gpus: float = 0,
    out: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """As `plait.launch.run`, on the nodes of the Ray cluster that this process belongs to.

    Each process gets `cpus`, each worker `gpus`. The script has to be on every node, at the same path. Variables of
    the processes are those of their nodes and `environ`. `ray.init` is called here if nobody has.
    """
    check_counts(workers, servers, max_restarts)
    check_command(command)
    given = {name: os.environ[name] for name in ("PLAIT_SECRET",) if name in os.environ} | dict(environ or {})
    given.setdefault("OMP_NUM_THREADS", str(max(1, int(cpus))))
    logs = make_log_dir(log_dir)
    ray = _ray()
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False)
    try:
        needs = [{"CPU": cpus} | ({"GPU": gpus} if gpus else {})] * workers + [{"CPU": cpus}] * servers
        nodes = _Nodes(ray, needs)
        try:
            names = [("worker", index) for index in range(workers)] + [("server", index) for index in range(servers)]
            children = [
                nodes.child(kind, index, command, logs / f"{kind}-{index}.log", bundle)
                for bundle, (kind, index) in enumerate(names)
            ]
            groups = groups_of(children[:workers], children[workers:], lambda: nodes.layout(workers), given)
            return watch(groups, max_restarts, nodes.wait, sys.stdout if out is None else out)
        finally:
            nodes.close()
    finally:
        if ours:
            ray.shutdown()


class _Nodes:
    """Room on Ray's nodes, a bundle for each process, and the processes there."""

    def __init__(self, ray: Any, needs: Sequence[dict[str, float]]) -> None:
        self.ray, self._needs = ray, needs
        self._children: list[_RemoteChild] = []
        self._group = ray.util.placement_group(list(needs), strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=_ROOM_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            ray.util.remove_placement_group(self._group)
            raise ClusterError(
                f"Ray had no room for {len(needs)} processes within {_ROOM_SECONDS:g} s: they need {needs}, the nodes"
                f" have {ray.cluster_resources()}; ask for less, or start more nodes"
            ) from error

    def child(self, kind: str, index: int, command: Sequence[str], log: Path, bundle: int) -> _RemoteChild:
        child = _RemoteChild(self, kind, index, command, log, bundle)
        self._children.append(child)
        return child

    def actor(self, bundle: int) -> Any:
        """A new actor, which answers several calls at once: a look takes a while, a signal should not wait for it."""
        need = self._needs[bundle]
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = {"num_cpus": need["CPU"], "num_gpus": need.get("GPU", 0), "max_concurrency": 3}
        return self.ray.remote(_Host).options(scheduling_strategy=place, **options).remote()

    def answer(self, reference: Any, who: str) -> Any:
        try:
            return self.ray.get(reference, timeout=_ANSWER_SECONDS)
        except self.ray.exceptions.GetTimeoutError as error:
            raise ClusterError(f"Ray's actor of {who} did not answer within {_ANSWER_SECONDS:g} s") from error

    def layout(self, workers: int) -> Layout:
        """An endpoint for each process, on the node where Ray has put it."""
        endpoints: list[str] = []
        while len(set(endpoints)) < len(self._children):  # two actors of one node may have found the same port
            references = [child.endpoint() for child in self._children]
            endpoints = [
                self.answer(reference, f"{child.kind} {child.index}")
                for child, reference in zip(self._children, references, strict=True)
            ]
        return Layout(workers=tuple(endpoints[:workers]), servers=tuple(endpoints[workers:]))

    def wait(self, seconds: float) -> None:
        """Until one has written something or ended, or the time is over."""
        looks = {child.look: child for child in self._children if child.look is not None}
        if not looks:
            time.sleep(seconds)
            return
        ready, _ = self.ray.wait(list(looks), num_returns=1, timeout=seconds)
        for look in ready:
            looks[look].take_note()

    def close(self) -> None:
        """Ray kills an actor with all its processes; what they have left on their nodes, they remove before."""
        actors = [child.actor for child in self._children if child.actor is not None]
        closed = [actor.close.remote() for actor in actors]
        if closed:
            self.ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_SECONDS)
        for actor in actors:
            self.ray.kill(actor)
        self.ray.util.remove_placement_group(self._group)


class _RemoteChild:
    """A process on one of Ray's nodes; what it writes is copied into a log here."""

    def __init__(self, nodes: _Nodes, kind: str, index: int, command: Sequence[str], log: Path, bundle: int) -> None:
        self.kind, self.index, self.log = kind, index, log
        self.began = 0
        self.code: int | None = 0
        self.ended = 0.0
        self.look: Any = None
        """The answer that we wait for, while it runs."""
        self.actor: Any = None
        self._nodes, self._command, self._bundle = nodes, list(command), bundle

    def endpoint(self) -> Any:
        """The future host:port of a process that is not there yet."""
        if self.actor is None:
            self.actor = self._nodes.actor(self._bundle)
        return self.actor.endpoint.remote()

    def start(self, environ: Mapping[str, str], note: str = "") -> None:
        self.began = write_note(self.log, note)
        variables = dict(environ)
        who = f"{self.kind} {self.index}"
        if self.actor is None:  # it was lost
            self._check_place(self._nodes.answer(self.endpoint(), who), variables, who)
        self._nodes.answer(self.actor.start.remote(self.kind, self.index, self._command, variables), who)
        self.code = None
        self.look = self.actor.look.remote(_LOOK_SECONDS)

    def take_note(self) -> None:
        """Keep what it has written; whether it has ended."""
        try:
            data, code, age = self._nodes.ray.get(self.look)
        except self._nodes.ray.exceptions.RayActorError:  # its actor or its node was lost
            data, code, age = b"", -signal.SIGKILL, 0.0
            self.actor = None
        with self.log.open("ab") as file:
            file.write(data)
        self.code, self.ended = code, time.monotonic() - age
        self.look = None if self.actor is None or code is not None else self.actor.look.remote(_LOOK_SECONDS)

    def tell(self, number: signal.Signals) -> None:
        if self.look is not None and self.actor is not None:
            self.actor.tell.remote(int(number))

    def _check_place(self, endpoint: str, variables: Mapping[str, str], who: str) -> None:
        """The others know where a server was: a new one somewhere else would wait for them in vain."""
        host, before = endpoint.rpartition(":")[0], variables["POD_IP"]
        if self.kind == "server" and host != before:
            raise ClusterError(f"{who} was on {before}, which is lost, and Ray has put it on {host}: launch again")


class _Host:
    """Runs one process on its node; an actor of Ray's. Its own end is that of the process, too."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="plait-"))
        self._processes = Processes(self._folder)
        self._child: LocalChild | None = None
        self._shown = 0

    def endpoint(self) -> str:
        host = importlib.import_module("ray").util.get_node_ip_address()
        return f"{host}:{free_ports(1)[0]}"

    def start(self, kind: str, index: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        if self._child is None:
            whole = [sys.executable, *command]
            self._child = self._processes.child(kind, index, whole, self._folder / "log")
        if os.environ.get("CUDA_VISIBLE_DEVICES"):  # Ray shows each process its own devices, counted from 0
            environ = {**environ, "LOCAL_RANK": "0"}
        self._child.start(without_roles(os.environ) | dict(environ))

    def look(self, seconds: float) -> tuple[bytes, int | None, float]:
        """What is new in its output, its code once all of that is told, and how long ago it ended."""
        if self._child is None:
            raise RuntimeError("looked at before it was started")
        if self._child.code is None:
            self._processes.wait(seconds)
        code, age = self._child.code, time.monotonic() - self._child.ended
        with self._child.log.open("rb") as file:
            file.seek(self._shown)
            data = file.read(_CHUNK)
        self._shown += len(data)
        return data, code if len(data) < _CHUNK else None, age

    def close(self) -> None:
        self._processes.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def tell(self, number: int) -> None:
        if self._child is not None:
            self._child.tell(signal.Signals(number))


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError("Ray is not installed: pip install 'plait[ray]'") from error
