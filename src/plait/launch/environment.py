"""What each process of a cluster finds in its environment, and the free ports named there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Mapping

__all__ = ["HOST", "Layout", "cores", "free_ports", "without_roles"]

HOST = "127.0.0.1"

_FOREIGN_PREFIXES = ("OMPI_", "PADDLE_", "PET_", "PMI_", "SLURM_", "TORCHELASTIC_")
_FOREIGN = {
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("POD_IP", "RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TF_CONFIG", "TRAINING_ROLE", "WORLD_SIZE"),
    *("PLAIT_INDEX", "PLAIT_MASTER", "PLAIT_RESTART", "PLAIT_ROLE", "PLAIT_SERVERS"),
    *("PLAIT_SERVER_ENDPOINTS", "PLAIT_SOCKETS", "PLAIT_WORKERS", "PLAIT_WORKER_ENDPOINTS"),
}
"""What another launcher, or this one, may have set for the process that launches: never meant for its children."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the processes of one cluster are; a collective group gets a new one at each attempt."""

    workers: tuple[str, ...]
    """An endpoint, host:port, for each; a collective group meets at the first."""
    servers: tuple[str, ...] = ()
    sockets: str | None = None
    """A directory for Unix sockets, when all are on one machine."""

    def environment(self, kind: str, index: int, base: Mapping[str, str], restart: int = 0) -> dict[str, str]:
        """All variables of one process: those of `base` that are not another launcher's, and its role."""
        threads = max(1, cores() // max(1, self._beside(kind, index)))
        defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        return defaults | without_roles(base) | self._ours(kind, index, restart) | self._others(kind, index, restart)

    def _ours(self, kind: str, index: int, restart: int) -> dict[str, str]:
        found = {
            "PLAIT_ROLE": kind,
            "PLAIT_INDEX": str(index),
            "PLAIT_WORKERS": str(len(self.workers)),
            "PLAIT_SERVERS": str(len(self.servers)),
            "PLAIT_WORKER_ENDPOINTS": ",".join(self.workers),
            "PLAIT_RESTART": str(restart),
        }
        if self.servers:
            found["PLAIT_SERVER_ENDPOINTS"] = ",".join(self.servers)
        else:
            found["PLAIT_MASTER"] = self.workers[0]
        if self.sockets is not None:
            found["PLAIT_SOCKETS"] = self.sockets
        return found

    def _others(self, kind: str, index: int, restart: int) -> dict[str, str]:
        """The same facts for scripts that were written for Paddle's launcher, or for torchrun."""
        host, _, port = getattr(self, f"{kind}s")[index].rpartition(":")
        found = {
            "TRAINING_ROLE": "PSERVER" if kind == "server" else "TRAINER",
            "PADDLE_TRAINERS_NUM": str(len(self.workers)),
            "POD_IP": host,
            "PADDLE_PORT": port,
        }
        if kind == "worker":
            found["PADDLE_TRAINER_ID"] = str(index)
        if self.servers:
            return found | {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(self.servers)}
        address, _, master_port = self.workers[0].rpartition(":")
        return found | {
            "PADDLE_TRAINER_ENDPOINTS": ",".join(self.workers),
            "PADDLE_CURRENT_ENDPOINT": self.workers[index],
            "RANK": str(index),
            "WORLD_SIZE": str(len(self.workers)),
            "LOCAL_RANK": str(self._local_index(kind, index)),
            "LOCAL_WORLD_SIZE": str(self._beside(kind, index)),
            "MASTER_ADDR": address,
            "MASTER_PORT": master_port,
            "TORCHELASTIC_RESTART_COUNT": str(restart),
        }

    def _local_index(self, kind: str, index: int) -> int:
        """How many of its kind stand before it on its machine."""
        endpoints: tuple[str, ...] = getattr(self, f"{kind}s")
        return sum(_host(other) == _host(endpoints[index]) for other in endpoints[:index])

    def _beside(self, kind: str, index: int) -> int:
        """How many processes its machine has, itself among them."""
        own = _host(getattr(self, f"{kind}s")[index])
        return sum(_host(other) == own for other in self.workers + self.servers)


def without_roles(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that give no process its role: what children may inherit."""
    foreign = (name for name in environ if name in _FOREIGN or name.startswith(_FOREIGN_PREFIXES))
    return {name: environ[name] for name in environ.keys() - set(foreign)}


def free_ports(count: int, host: str = "") -> list[int]:
    """Ports that nobody uses at this moment, each once."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in held]


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]
