"""Roles: which process of a cluster this one is, as the environment tells it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plait.errors import ConfigError

__all__ = ["Role", "find_role", "paddle_role", "split_files"]

_PORTS = 65535
_SLURM_PORTS = range(10_000, 30_000)
"""Where a Slurm step meets if it names no port: below those that systems hand out by themselves."""
_SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"
_TRAINERS = "PADDLE_TRAINER_ENDPOINTS"
_TF_KINDS = ("chief", "master", "worker", "ps", "evaluator")


@dataclass(frozen=True, kw_only=True)
class Role:
    """What one process is in its cluster, and where the others are."""

    kind: Literal["worker", "server"] = "worker"
    index: int = 0
    """The process's number among those of its kind."""
    workers: int = 1
    servers: int = 0
    worker_endpoints: tuple[str, ...] = ()
    """"host:port" of every worker; empty where nobody says it."""
    server_endpoints: tuple[str, ...] = ()
    """"host:port" of every server."""
    master: str | None = None
    """"host:port" where workers without servers meet."""
    local_index: int = 0
    """The process's number on its host, which chooses its GPU."""
    source: str = "one process"
    """Where the role was found, for messages."""
    restart: int = 0
    """How often the launcher has started this process, or its group, again."""

    def __post_init__(self) -> None:
        if self.kind not in ("worker", "server"):
            raise ConfigError(f"kind={self.kind!r}: write 'worker' or 'server'")
        for name, least in (("index", 0), ("workers", 1), ("servers", 0), ("local_index", 0), ("restart", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r}: write a whole number from {least} on")
        several = f"{self.kind}s"
        _check_below("index", self.index, several, getattr(self, several))
        for name in ("worker_endpoints", "server_endpoints"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                raise ConfigError(f"{name}={value!r}: write a tuple of 'host:port'")
            for endpoint in value:
                _check_endpoint(name, endpoint)
        _check_unique("worker_endpoints and server_endpoints", (*self.worker_endpoints, *self.server_endpoints))
        if self.worker_endpoints:
            _check_count("worker_endpoints", self.worker_endpoints, "workers", self.workers)
        _check_count("server_endpoints", self.server_endpoints, "servers", self.servers)
        if self.master is not None:
            _check_endpoint("master", self.master)

    @property
    def is_worker(self) -> bool:
        return self.kind == "worker"

    @property
    def is_server(self) -> bool:
        return self.kind == "server"

    @property
    def is_chief(self) -> bool:
        """Worker 0, who does what is done once."""
        return self.is_worker and self.index == 0

    @property
    def is_collective(self) -> bool:
        """Whether the workers train without servers."""
        return self.servers == 0

    @property
    def alone(self) -> bool:
        return self.workers == 1 and self.servers == 0


def find_role(environ: Mapping[str, str] | None = None) -> Role:
    """The role that the environment gives: the first of these conventions whose variables are set.

    plait launch's `PLAIT_ROLE`, `TF_CONFIG`, Paddle's, torchrun's, Slurm's (in a step of `srun`), Open MPI's; one
    process without any. An empty variable counts as not set.

    >>> find_role({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}).master
    'a:29500'
    """
    environ = os.environ if environ is None else environ
    found = (find(environ) for find in (_plait_role, _tf_role, paddle_role, _torchrun_role, _slurm_role, _mpi_role))
    return next((role for role in found if role is not None), Role(restart=_restart(environ)))


def split_files(files: list[str], index: int, count: int) -> list[str]:
    """Worker `index`'s block of the files: contiguous, in order, the first `len(files) % count` one longer.

    >>> split_files(["a", "b", "c", "d", "e"], 1, 2)
    ['d', 'e']
    """
    if not isinstance(files, list):
        raise ConfigError(f"files is a {type(files).__name__}: write a list of names")
    if count < 1:
        raise ConfigError(f"count={count!r}: write how many workers there are, from 1 on")
    _check_below("index", index, "count", count)
    size, longer = divmod(len(files), count)
    begin = index * size + min(index, longer)
    return files[begin : begin + size + (index < longer)]


def _plait_role(environ: Mapping[str, str]) -> Role | None:
    kind = _text(environ, "PLAIT_ROLE")
    if kind is None:
        return None
    if kind not in ("worker", "server"):
        raise ConfigError(f"PLAIT_ROLE={kind!r}: write worker or server")
    workers = _number(environ, "PLAIT_WORKERS", "how many workers there are", least=1)
    servers = _number(environ, "PLAIT_SERVERS", "how many servers there are", default=0)
    server_endpoints = _endpoints(environ, "PLAIT_SERVER_ENDPOINTS")
    worker_endpoints = _endpoints(environ, "PLAIT_WORKER_ENDPOINTS")
    _check_count("PLAIT_SERVER_ENDPOINTS", server_endpoints, "PLAIT_SERVERS", servers)
    if worker_endpoints:
        _check_count("PLAIT_WORKER_ENDPOINTS", worker_endpoints, "PLAIT_WORKERS", workers)
    index = _number(environ, "PLAIT_INDEX", f"this {kind}'s number")
    several, count = ("PLAIT_WORKERS", workers) if kind == "worker" else ("PLAIT_SERVERS", servers)
    _check_below("PLAIT_INDEX", index, several, count)
    master = _text(environ, "PLAIT_MASTER")
    if master is not None:
        _check_endpoint("PLAIT_MASTER", master)
    elif workers > 1 and not servers:
        raise ConfigError("PLAIT_MASTER is not set: write host:port, where the workers meet")
    # One machine is what `plait launch` starts processes on, so a worker's number is its number there, too.
    place = _place_on_host(worker_endpoints, index) if worker_endpoints else index
    return Role(
        kind="worker" if kind == "worker" else "server",
        index=index,
        workers=workers,
        servers=servers,
        worker_endpoints=worker_endpoints,
        server_endpoints=server_endpoints,
        master=master,
        local_index=_number(environ, "LOCAL_RANK", default=place if kind == "worker" else 0),
        source="plait launch's variables",
        restart=_restart(environ),
    )


def _tf_role(environ: Mapping[str, str]) -> Role | None:
    text = _text(environ, "TF_CONFIG")
    if text is None:
        return None
    config = _tf_config(text)
    lists = _tf_lists(config.get("cluster") or {})
    if not lists:
        return None  # what a service of one machine sets: it says nothing about a cluster
    workers, servers = (*lists["chief"], *lists["worker"]), lists["ps"]
    _check_unique("TF_CONFIG's cluster", (*workers, *servers))
    if not workers:
        raise ConfigError("TF_CONFIG's cluster has no worker: write at least one under 'worker' or 'chief'")
    kind, number = _tf_task(config.get("task"), lists)
    index = number + (len(lists["chief"]) if kind == "worker" else 0)
    return Role(
        kind="server" if kind == "ps" else "worker",
        index=index,
        workers=len(workers),
        servers=len(servers),
        worker_endpoints=workers,
        server_endpoints=servers,
        master=None if servers else workers[0],
        local_index=0 if kind == "ps" else _number(environ, "LOCAL_RANK", default=_place_on_host(workers, index)),
        source="TF_CONFIG",
        restart=_restart(environ),
    )


def _tf_config(text: str) -> dict[str, Any]:
    wanted = '{"cluster": {"worker": ["host:port", ...], "ps": [...]}, "task": {"type": "worker", "index": 0}}'
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"TF_CONFIG={_short(text)} is not JSON ({error}): write {wanted}") from error
    if not isinstance(config, dict) or not isinstance(config.get("cluster") or {}, dict):
        raise ConfigError(f"TF_CONFIG={_short(text)} does not describe a cluster: write {wanted}")
    return config


def _tf_lists(cluster: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """The endpoints of every kind, the old word "master" read as "chief"; empty if there is no cluster."""
    for kind, endpoints in cluster.items():
        if kind not in _TF_KINDS:
            raise ConfigError(f"TF_CONFIG's cluster has {_short(kind)}: plait knows {', '.join(_TF_KINDS)}")
        if not isinstance(endpoints, list):
            raise ConfigError(f"TF_CONFIG's cluster has {kind}={_short(endpoints)}: write a list of 'host:port'")
        for endpoint in endpoints:
            _check_endpoint(f"TF_CONFIG's {kind}", endpoint)
    chief = (*cluster.get("chief", ()), *cluster.get("master", ()))
    if len(chief) > 1:
        raise ConfigError(
            f"TF_CONFIG's cluster has the chiefs {', '.join(chief)}: write one, the others under 'worker'"
        )
    if not cluster:
        return {}
    return {"chief": chief, **{kind: tuple(cluster.get(kind, ())) for kind in _TF_KINDS[2:]}}


def _tf_task(task: Any, lists: dict[str, tuple[str, ...]]) -> tuple[str, int]:
    if not isinstance(task, dict) or "type" not in task:
        raise ConfigError(f"TF_CONFIG's task is {_short(task)}: write {{'type': 'worker', 'index': 0}}")
    kind = "chief" if task["type"] == "master" else task["type"]
    if kind == "evaluator":
        raise ConfigError(
            "TF_CONFIG's task is an evaluator, plait has none: evaluate inside training, or run one process"
            " without TF_CONFIG"
        )
    if kind not in ("chief", "worker", "ps"):
        raise ConfigError(f"TF_CONFIG's task has type={_short(kind)}: write 'chief', 'worker' or 'ps'")
    if not lists[kind]:
        raise ConfigError(f"TF_CONFIG's task is a {kind}, its cluster has none: write its 'host:port' under '{kind}'")
    index = task.get("index", 0)
    if isinstance(index, bool) or not re.fullmatch(r"[0-9]{1,18}", str(index)):
        raise ConfigError(f"TF_CONFIG's task has index={_short(index)}: write a whole number from 0 on")
    _check_below("TF_CONFIG's task index", int(index), f"the length of its {kind} list", len(lists[kind]))
    return kind, int(index)


def paddle_role(environ: Mapping[str, str] | None = None, *, collective: bool | None = None) -> Role | None:
    """The role that Paddle's variables give, or None if they name no cluster.

    `collective` says which of Paddle's two kinds is meant; None: with servers if there is a list of them.
    """
    environ = os.environ if environ is None else environ
    servers, trainers = _endpoints(environ, _SERVERS), _endpoints(environ, _TRAINERS)
    if servers and not collective:
        return _paddle_served(environ, servers, trainers)
    if trainers and collective is not False:
        return _paddle_collective(environ, trainers)
    if servers:
        raise ConfigError(f"{_SERVERS} is set, {_TRAINERS} is not: set it, or write is_collective=False for servers")
    if len(trainers) > 1:
        raise ConfigError(f"{_TRAINERS} is set, {_SERVERS} is not: set it, or write is_collective=True for no servers")
    if _text(environ, "TRAINING_ROLE") == "PSERVER":
        raise ConfigError(f"TRAINING_ROLE=PSERVER, but {_SERVERS} is not set: write the servers' host:port, by comma")
    if _number(environ, "PADDLE_TRAINERS_NUM", default=1) > 1:
        count = environ["PADDLE_TRAINERS_NUM"]
        raise ConfigError(
            f"PADDLE_TRAINERS_NUM={count}, but neither {_SERVERS} nor {_TRAINERS} is set: set the first for"
            " parameter servers, the second for workers alone"
        )
    return None


def _paddle_served(environ: Mapping[str, str], servers: tuple[str, ...], trainers: tuple[str, ...]) -> Role:
    kind = _need(environ, "TRAINING_ROLE", "TRAINER or PSERVER")
    if kind not in ("TRAINER", "PSERVER"):
        raise ConfigError(f"TRAINING_ROLE={kind!r}: write TRAINER or PSERVER, plait has no other")
    workers = _number(environ, "PADDLE_TRAINERS_NUM", "how many trainers there are", least=1)
    if trainers:
        _check_count(_TRAINERS, trainers, "PADDLE_TRAINERS_NUM", workers)
    if kind == "TRAINER":
        index = _number(environ, "PADDLE_TRAINER_ID", "this trainer's number")
        _check_below("PADDLE_TRAINER_ID", index, "PADDLE_TRAINERS_NUM", workers)
    else:
        ip = _need(environ, "POD_IP", "this server's address")
        endpoint = f"{ip}:{_need(environ, 'PADDLE_PORT', 'the port of this server')}"
        if endpoint not in servers:
            raise ConfigError(
                f"POD_IP:PADDLE_PORT={endpoint} is not in {_SERVERS}={','.join(servers)}: write one of them"
            )
        index = servers.index(endpoint)
    return Role(
        kind="worker" if kind == "TRAINER" else "server",
        index=index,
        workers=workers,
        servers=len(servers),
        worker_endpoints=trainers,
        server_endpoints=servers,
        local_index=_paddle_local(environ, trainers, index) if kind == "TRAINER" else 0,
        source="Paddle's variables",
        restart=_restart(environ),
    )


def _paddle_collective(environ: Mapping[str, str], trainers: tuple[str, ...]) -> Role:
    for name in ("TRAINING_ROLE", "PADDLE_TRAINING_ROLE"):
        kind = _text(environ, name)
        if kind not in (None, "TRAINER"):
            raise ConfigError(f"{name}={kind!r} without servers: write TRAINER, or set {_SERVERS}")
    own = _text(environ, "PADDLE_CURRENT_ENDPOINT")
    if own is not None and own not in trainers:
        raise ConfigError(
            f"PADDLE_CURRENT_ENDPOINT={own!r} is not in {_TRAINERS}={','.join(trainers)}: write one of them"
        )
    place = trainers.index(own) if own else 0 if len(trainers) == 1 else None
    index = _number(environ, "PADDLE_TRAINER_ID", "this trainer's number", default=place)
    _check_below("PADDLE_TRAINER_ID", index, f"the length of {_TRAINERS}", len(trainers))
    if own is not None and trainers[index] != own:
        raise ConfigError(
            f"PADDLE_TRAINER_ID={index} is {trainers[index]} in {_TRAINERS}, but PADDLE_CURRENT_ENDPOINT={own}:"
            " write the same trainer in both"
        )
    return Role(
        index=index,
        workers=len(trainers),
        worker_endpoints=trainers,
        master=trainers[0],
        local_index=_paddle_local(environ, trainers, index),
        source="Paddle's variables",
        restart=_restart(environ),
    )


def _paddle_local(environ: Mapping[str, str], trainers: tuple[str, ...], index: int) -> int:
    """The GPU that Paddle's launcher has chosen, if it is one; else the trainer's number on its host."""
    gpus = _text(environ, "FLAGS_selected_gpus") or ""
    if "," not in gpus and gpus:
        return _number(environ, "FLAGS_selected_gpus")
    return _number(environ, "PADDLE_RANK_IN_NODE", default=_place_on_host(trainers, index))


def _torchrun_role(environ: Mapping[str, str]) -> Role | None:
    if _text(environ, "RANK") is None and _text(environ, "WORLD_SIZE") is None:
        return None
    return _ranked(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", _master(environ), "torchrun's variables")


def _slurm_role(environ: Mapping[str, str]) -> Role | None:
    # In a shell of `salloc`, SLURM_NTASKS is the whole allocation's; SLURM_STEP_NUM_TASKS is always the step's own.
    count = "SLURM_STEP_NUM_TASKS" if _text(environ, "SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if _text(environ, "SLURM_STEP_ID") is None or _number(environ, count, default=1) == 1:
        return None
    return _ranked(environ, "SLURM_PROCID", count, "SLURM_LOCALID", _slurm_master(environ), "Slurm's variables")


def _slurm_master(environ: Mapping[str, str]) -> str:
    host = _text(environ, "MASTER_ADDR")
    if host is None:
        name = "SLURM_STEP_NODELIST" if _text(environ, "SLURM_STEP_NODELIST") else "SLURM_NODELIST"
        host = _first_host(name, _need(environ, name, "the step's hosts"))
    if _text(environ, "MASTER_PORT"):
        return _join(host, _number(environ, "MASTER_PORT"))
    job = _number(environ, "SLURM_JOB_ID", "the job's number, or a MASTER_PORT")
    step = _number(environ, "SLURM_STEP_ID")
    return _join(host, _SLURM_PORTS[(job + 7919 * step) % len(_SLURM_PORTS)])


def _first_host(name: str, hosts: str) -> str:
    """The first of Slurm's hosts, written as in `gpu[01-04,7],big2`: gpu01."""
    first = re.match(r"(?:[^,\[\]]|\[[0-9][^\[\]]*\])+", hosts)
    if first is None or hosts[first.end() : first.end() + 1] not in ("", ","):
        raise ConfigError(f"{name}={_short(hosts)} is not a list of hosts: write it as in node[1-4],gpu7")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0])


def _mpi_role(environ: Mapping[str, str]) -> Role | None:
    rank, size = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    if _text(environ, rank) is None and _text(environ, size) is None:
        return None
    local = "OMPI_COMM_WORLD_LOCAL_RANK"
    return _ranked(environ, rank, size, local, _master(environ), "Open MPI's variables")


def _ranked(environ: Mapping[str, str], rank: str, size: str, local: str, master: str | None, source: str) -> Role:
    """Workers that are told a number each, and one place to meet."""
    workers = _number(environ, size, "how many workers there are", least=1)
    index = _number(environ, rank, "this worker's number")
    _check_below(rank, index, size, workers)
    if workers > 1 and master is None:
        missing = "MASTER_ADDR" if _text(environ, "MASTER_ADDR") is None else "MASTER_PORT"
        raise ConfigError(
            f"{size}={workers}, but {missing} is not set: write MASTER_ADDR and MASTER_PORT, where the workers meet,"
            " the same for all"
        )
    return Role(
        index=index,
        workers=workers,
        master=master,
        local_index=_number(environ, local, default=0),
        source=source,
        restart=_restart(environ),
    )


def _master(environ: Mapping[str, str]) -> str | None:
    host = _text(environ, "MASTER_ADDR")
    if host is None or _text(environ, "MASTER_PORT") is None:
        return None
    return _join(host, _number(environ, "MASTER_PORT"))


def _join(host: str, port: int) -> str:
    endpoint = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    _check_endpoint("MASTER_ADDR:MASTER_PORT", endpoint)
    return endpoint


def _restart(environ: Mapping[str, str]) -> int:
    name = "PLAIT_RESTART" if _text(environ, "PLAIT_RESTART") else "TORCHELASTIC_RESTART_COUNT"
    return _number(environ, name, default=0)


def _place_on_host(endpoints: tuple[str, ...], index: int) -> int:
    """How many workers before this one have the same host."""
    hosts = [endpoint.rpartition(":")[0] for endpoint in endpoints[: index + 1]]
    return hosts[:-1].count(hosts[-1]) if hosts else 0


def _text(environ: Mapping[str, str], name: str) -> str | None:
    return environ.get(name, "").strip() or None


def _need(environ: Mapping[str, str], name: str, meaning: str) -> str:
    text = _text(environ, name)
    if text is None:
        raise ConfigError(f"{name} is not set: write {meaning}")
    return text


def _number(
    environ: Mapping[str, str], name: str, meaning: str = "", *, least: int = 0, default: int | None = None
) -> int:
    if default is not None and _text(environ, name) is None:
        return default
    text = _need(environ, name, meaning)
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        raise ConfigError(f"{name}={_short(text)}: write a whole number from {least} on")
    return int(text)


def _endpoints(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = _text(environ, name)
    endpoints = tuple(part.strip() for part in text.split(",")) if text else ()
    for endpoint in endpoints:
        _check_endpoint(name, endpoint)
    _check_unique(name, endpoints)
    return endpoints


def _check_endpoint(name: str, endpoint: object) -> None:
    host, _, port = endpoint.rpartition(":") if isinstance(endpoint, str) else ("", "", "")
    plain = re.fullmatch(r"[^\s:,/\[\]]+|\[[0-9A-Fa-f:.]+(?:%\w+)?\]", host)
    if plain is None or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= _PORTS:
        raise ConfigError(f"{name}: {_short(endpoint)} is no endpoint: write host:port, with a port from 1 to {_PORTS}")


def _check_unique(name: str, endpoints: Sequence[str]) -> None:
    seen: set[str] = set()
    for endpoint in endpoints:
        if endpoint in seen:
            raise ConfigError(f"{name}: {endpoint} stands there twice: write another port for each process")
        seen.add(endpoint)


def _check_count(name: str, endpoints: tuple[str, ...], counted: str, count: int) -> None:
    if len(endpoints) != count:
        raise ConfigError(f"{name} has {len(endpoints)} endpoints, {counted}={count}: write one for each")


def _check_below(name: str, value: int, counted: str, count: int) -> None:
    if not 0 <= value < count:
        wanted = (
            f"a number from 0 to {count - 1}" if count > 1 else "0" if count else f"how many there are in {counted}"
        )
        raise ConfigError(f"{name}={value} with {counted}={count}: write {wanted}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
