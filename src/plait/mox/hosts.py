"""From the flags of a run to its place in a cluster."""

from __future__ import annotations

from plait.cluster.connect import strategy_of
from plait.cluster.roles import Role, find_role
from plait.cluster.settings import Distributed
from plait.engine.strategy import Local, Strategy
from plait.errors import ConfigError
from plait.mox.flags import get_flag
from plait.mox.spec import ModeKeys

__all__ = ["role_of_flags", "strategy_for"]


def role_of_flags() -> Role | None:
    """The role that job_name, task_index, worker_hosts and ps_hosts give; None if no hosts are named."""
    workers, servers = _hosts("worker_hosts"), _hosts("ps_hosts")
    if not workers and not servers:
        return None
    job, index = get_flag("job_name"), get_flag("task_index")
    if job not in ("worker", "ps"):
        raise ConfigError(f"job_name={job!r}: write 'worker' or 'ps'")
    if servers and not workers:
        raise ConfigError("ps_hosts without worker_hosts: name the workers, too")
    count = len(workers if job == "worker" else servers)
    if not 0 <= index < count:
        raise ConfigError(f"task_index={index}: there are {count} of job {job!r}, counted from 0")
    return Role(
        kind="server" if job == "ps" else "worker",
        index=index,
        workers=len(workers),
        servers=len(servers),
        worker_endpoints=workers,
        server_endpoints=servers,
        master=workers[0] if len(workers) > 1 else None,
        source="the flags worker_hosts and ps_hosts",
    )


def _hosts(flag: str) -> tuple[str, ...]:
    return tuple(host.strip() for host in get_flag(flag).split(",") if host.strip())


def strategy_for(run_mode: str) -> Strategy | None:
    """The strategy of this process; None if it has no part in this run.

    Servers take part in training only: afterwards the first worker has all variables, and evaluates or predicts alone.
    """
    role = role_of_flags() or find_role()
    synchronous = get_flag("sync_replicas")
    if role.servers and run_mode != ModeKeys.TRAIN:
        return Local() if role.is_chief else None
    if not role.servers and not synchronous and not role.alone:
        raise ConfigError(
            "sync_replicas=false needs servers: name ps_hosts, or start some with `plait launch --servers`"
        )
    mode = "auto" if not role.servers else "sync" if synchronous else "async"
    return strategy_of(role, Distributed(mode=mode))
