"""Role makers: the document's way to ask which process of the cluster this one is, and to talk to the others."""

from __future__ import annotations

import enum
import functools
import numbers
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.cluster import roles
from plait.cluster.control import Control
from plait.errors import ConfigError

__all__ = [
    "AutoRoleMaker",
    "PaddleCloudRoleMaker",
    "Role",
    "RoleMakerBase",
    "UserDefinedCollectiveRoleMaker",
    "UserDefinedRoleMaker",
]

Number = int | float


class Role(enum.IntEnum):
    """What a process is, by Paddle's numbers."""

    WORKER = 1
    SERVER = 2


class RoleMakerBase:
    """What every role maker can do; those below differ in where the role comes from.

    The role is made by the first question, or by `generate_role`, and stays. The four methods that talk to other
    processes join the cluster when they are first called; they wait no longer than the cluster's deadline, and
    raise ClusterError, which names who did not come.
    """

    def __init__(self) -> None:
        self._role: roles.Role | None = None
        self._joined: Control | None = None

    def generate_role(self) -> None:
        """Find the role; a second call changes nothing."""
        if self._role is None:
            self._role = self._find()

    @property
    def role(self) -> roles.Role:
        """All that is known about this process and its cluster."""
        self.generate_role()
        if self._role is None:
            raise NotImplementedError(f"{type(self).__name__}.generate_role has set no role: let it set self._role")
        return self._role

    def _find(self) -> roles.Role:
        raise NotImplementedError(
            f"{type(self).__name__} does not know where roles come from: write AutoRoleMaker(),"
            " PaddleCloudRoleMaker() or UserDefinedRoleMaker(...)"
        )

    def is_worker(self) -> bool:
        return self.role.is_worker

    def is_server(self) -> bool:
        return self.role.is_server

    def is_first_worker(self) -> bool:
        return self.role.is_chief

    def worker_num(self) -> int:
        """How many workers there are; servers do not count."""
        return self.role.workers

    def server_num(self) -> int:
        return self.role.servers

    def worker_index(self) -> int:
        """The number of this process among those of its kind; so a server gets its own, as in Paddle."""
        return self.role.index

    def server_index(self) -> int:
        """The number of this process among those of its kind."""
        return self.role.index

    def get_trainer_endpoints(self) -> list[str]:
        """The workers' "host:port"; empty where nobody says it."""
        return list(self.role.worker_endpoints)

    def get_pserver_endpoints(self) -> list[str]:
        return list(self.role.server_endpoints)

    def to_string(self) -> str:
        """The role on one line."""
        kind = Role.SERVER if self.is_server() else Role.WORKER
        return (
            f"role: {kind.name}, current_id: {self.role.index}, worker_endpoints: {self.get_trainer_endpoints()},"
            f" server_endpoints: {self.get_pserver_endpoints()}"
        )

    def all_gather(self, input: Number) -> list[Number]:  # noqa: A002 - the document's name
        """Everybody's number: the workers' in their order, then the servers'. All have to call it."""
        return self._gather("all_gather", _number("all_gather", input), everyone=True)

    def all_reduce_worker(
        self,
        input: Sequence[Number] | NDArray[Any],  # noqa: A002 - the document's name
        output: list[Any] | NDArray[Any],
        mode: str = "sum",
    ) -> None:
        """Put into `output` the sum, or the smallest, or the largest, of the workers' numbers at each place.

        Whole numbers are exact, fractions are added in the order of workers: everyone gets the same bits. For a
        server nothing happens.
        """
        if self.is_server():
            return
        if mode not in _REDUCE:
            raise ConfigError(f"all_reduce_worker got mode={mode!r}: write one of {', '.join(_REDUCE)}")
        values = _values(input)
        _check_output(output, len(values))
        rows = self._gather(f"all_reduce_worker ({mode})", values)
        lengths = [len(row) for row in rows]
        if len(set(lengths)) > 1:
            raise ConfigError(f"all_reduce_worker got lists of lengths {lengths} from the workers: write equal ones")
        _write(output, [_REDUCE[mode](column) for column in zip(*rows, strict=True)])

    def barrier_worker(self) -> None:
        """Wait until all workers have come here; for a server nothing happens."""
        if self.is_worker():
            self._gather("barrier_worker", None)

    def barrier_all(self) -> None:
        """Wait until everyone has come here, workers and servers."""
        self._gather("barrier_all", None, everyone=True)

    def _gather(self, name: str, value: Any, *, everyone: bool = False) -> list[Any]:
        if self.role.workers + (self.role.servers if everyone else 0) == 1:
            return [value]
        return self._control().gather(name, value, everyone=everyone)

    def _control(self) -> Control:
        if self._joined is None:
            from plait.cluster.connect import control_of  # noqa: PLC0415 - what it needs is heavy

            self._joined = control_of(self.role)
        return self._joined


class AutoRoleMaker(RoleMakerBase):
    """Finds out by itself: plait launch's variables, TF_CONFIG, Paddle's, torchrun's, Slurm's, Open MPI's, or none."""

    def _find(self) -> roles.Role:
        return roles.find_role()


class PaddleCloudRoleMaker(RoleMakerBase):
    """The role that Paddle's variables give; without any of them, what `AutoRoleMaker` finds: mostly one process."""

    def __init__(self, is_collective: bool = False) -> None:
        super().__init__()
        self._is_collective = is_collective

    def _find(self) -> roles.Role:
        # plait's own launcher comes first, as everywhere: a script for Paddle runs under it unchanged.
        if not os.environ.get("PLAIT_ROLE"):
            role = roles.paddle_role(collective=self._is_collective)
            if role is not None:
                return role
        role = roles.find_role()
        if not role.alone and role.is_collective != self._is_collective:
            raise ConfigError(
                f"PaddleCloudRoleMaker(is_collective={self._is_collective}), but {role.source} name {role.workers}"
                f" workers and {role.servers} servers: write is_collective={role.is_collective}"
            )
        return role


class UserDefinedRoleMaker(RoleMakerBase):
    """One of `worker_num` workers, or one of the servers, as the arguments say."""

    def __init__(
        self,
        current_id: int = 0,
        role: Role = Role.WORKER,
        worker_num: int = 0,
        server_endpoints: list[str] | None = None,
    ) -> None:
        super().__init__()
        if role not in (Role.WORKER, Role.SERVER):
            raise ConfigError(f"role={role!r}: write Role.WORKER or Role.SERVER")
        servers = _endpoints("server_endpoints", server_endpoints)
        _check_whole("worker_num", worker_num, least=1)
        _check_id(current_id, *(("workers", worker_num) if role == Role.WORKER else ("servers", len(servers))))
        self._role = roles.Role(
            kind="worker" if role == Role.WORKER else "server",
            index=current_id,
            workers=worker_num,
            servers=len(servers),
            server_endpoints=servers,
            source="UserDefinedRoleMaker's arguments",
        )


class UserDefinedCollectiveRoleMaker(RoleMakerBase):
    """One of the workers of a group without servers, as the arguments say; they meet at the first one's endpoint."""

    def __init__(self, current_id: int = 0, worker_endpoints: list[str] | None = None) -> None:
        super().__init__()
        workers = _endpoints("worker_endpoints", worker_endpoints)
        _check_id(current_id, "workers", len(workers))
        self._role = roles.Role(
            index=current_id,
            workers=len(workers),
            worker_endpoints=workers,
            master=workers[0],
            source="UserDefinedCollectiveRoleMaker's arguments",
        )


def _endpoints(name: str, given: object) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or not given:
        raise ConfigError(f"{name}={given!r}: write a list of 'host:port', one for each")
    return tuple(given)


def _check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: write a whole number from {least} on")


def _check_id(current_id: int, counted: str, count: int) -> None:
    _check_whole("current_id", current_id, least=0)
    if current_id >= count:
        raise ConfigError(f"current_id={current_id} with {count} {counted}: write a number from 0 on, below {count}")


def _number(name: str, value: object) -> Number:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise ConfigError(f"{name} got a {type(value).__name__}: write an int or a float")


def _values(given: object) -> list[Number]:
    """The numbers of a list or a 1-D array, as Python's own, which do not overflow."""
    items = _flat("input", given)
    return [
        _number("all_reduce_worker's input", item) for item in (items if isinstance(items, list) else items.tolist())
    ]


def _flat(name: str, given: object) -> list[Any] | NDArray[Any]:
    if isinstance(given, np.ndarray):
        if given.ndim != 1 or given.dtype.kind not in "iuf":
            raise ConfigError(
                f"all_reduce_worker got as {name} an array of shape {given.shape} and type {given.dtype}: write one of"
                " one dimension, of whole numbers or fractions"
            )
    elif not isinstance(given, list):
        raise ConfigError(
            f"all_reduce_worker got as {name} a {type(given).__name__}: write a list or a numpy array of one dimension"
        )
    return given


def _check_output(output: object, length: int) -> None:
    there = len(_flat("output", output))
    if there != length:
        raise ConfigError(f"all_reduce_worker got {length} numbers and an output of {there}: write equal lengths")
    if isinstance(output, np.ndarray) and not output.flags.writeable:
        raise ConfigError("all_reduce_worker got an output that may not be written to: write output.copy()")


def _write(output: list[Any] | NDArray[Any], results: list[Number]) -> None:
    if isinstance(output, np.ndarray) and output.dtype.kind in "iu":
        bounds = np.iinfo(output.dtype)
        for value in results:
            if not isinstance(value, int) or not bounds.min <= value <= bounds.max:
                raise ConfigError(
                    f"all_reduce_worker got an output of {output.dtype}, which cannot hold the result: write an output"
                    " of float64, or of int64"
                )
    output[:] = results


def _extreme(choose: Callable[[Sequence[Number]], Number], column: Sequence[Number]) -> Number:
    """The smallest or largest; what is not a number is not hidden by where it stands."""
    return next((value for value in column if value != value), choose(column))


_REDUCE: dict[str, Callable[[Sequence[Number]], Number]] = {
    "sum": sum,
    "min": functools.partial(_extreme, min),
    "max": functools.partial(_extreme, max),
}
