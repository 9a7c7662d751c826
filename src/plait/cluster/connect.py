"""From a role and settings to what a process needs: a strategy for the engine, a control for role makers."""

from __future__ import annotations

import atexit
import dataclasses
import sys
from types import TracebackType
from typing import Any, NoReturn

from plait.cluster.control import Control
from plait.cluster.roles import Role, find_role
from plait.cluster.settings import COLLECTIVE, Distributed
from plait.engine.strategy import Strategy
from plait.errors import ConfigError

__all__ = ["Among", "connected", "control_of", "from_environment", "strategy_of"]

_open: dict[Role, tuple[Distributed, Strategy]] = {}
"""What this process has joined."""
_controls: dict[Role, Control] = {}


def from_environment(replicas_to_aggregate: int | None = None) -> Strategy:
    """What a model gets that was given no strategy: the cluster that the environment describes, or one process."""
    role = find_role()
    return strategy_of(role, Distributed(replicas_to_aggregate=None if role.alone else replicas_to_aggregate))


def connected(settings: Distributed) -> Strategy:
    """The strategy of this process in the cluster that the environment describes."""
    return strategy_of(find_role(), settings)


def strategy_of(role: Role, settings: Distributed) -> Strategy:
    """The strategy of a process with this role. A process is in one cluster, once."""
    if role.alone:
        from plait.cluster.alone import Alone  # noqa: PLC0415 - as below

        return Alone(settings)
    served = role.servers > 0
    if served and settings.mode == COLLECTIVE:
        raise ConfigError(f"mode='collective', but there are {role.servers} servers ({role.source}): start none")
    if not served and settings.mode not in ("auto", COLLECTIVE):
        raise ConfigError(
            f"mode={settings.mode!r} needs servers, and there are none ({role.source}): `plait launch --servers 1`"
        )
    if served and settings.mode == "auto":
        settings = dataclasses.replace(settings, mode="sync")  # which refuses what is for workers without servers
    if role in _open and _open[role][0] == settings and not served and not _open[role][1].closed:
        return _open[role][1]
    if role in _open and served:
        raise ConfigError(
            "this process has a model on the servers already: they hold one for each run; train the other in a script "
            "of its own"
        )
    if role in _open:
        _open.pop(role)[1].close()
        _controls.pop(role, None)
    strategy = _made(role, settings)
    _open[role] = (settings, strategy)
    _end_with_process()
    return strategy


def _made(role: Role, settings: Distributed) -> Strategy:
    if role.servers > 0:
        from plait.cluster.ps.strategy import Served  # noqa: PLC0415 - brings ZeroMQ

        return Served(role, settings)
    from plait.cluster.collective import Collective  # noqa: PLC0415 - brings torch.distributed

    return Collective(role, settings)


def control_of(role: Role) -> Control:
    """How role makers of this process talk to those of the others; one for a process."""
    found = _controls.get(role)
    if found is None:
        found = _controls[role] = _served_control(role) if role.servers else Among(_joined(role))
        _end_with_process()
    return found


def _joined(role: Role) -> Strategy:
    """What this process has joined already, with whatever settings, is not left for a few words."""
    return _open[role][1] if role in _open and not _open[role][1].closed else strategy_of(role, Distributed())


def _served_control(role: Role) -> Control:
    from plait.cluster.ps import server  # noqa: PLC0415 - brings ZeroMQ
    from plait.cluster.ps.client import Connection  # noqa: PLC0415 - same
    from plait.cluster.ps.coordinator import ServedControl  # noqa: PLC0415 - same

    if role.is_server:
        server.start(role)
    own = f"{role.kind} {role.index}"
    connection = Connection(role.server_endpoints[0], name="server 0", own=own)
    return ServedControl(connection, role.index + (role.workers if role.is_server else 0), role.workers)


class Among:
    """The control of workers without servers."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def gather(self, name: str, value: Any, *, everyone: bool = False) -> list[Any]:
        del name, everyone  # there are workers only
        return self._strategy.gather(value)

    def close(self) -> None:
        self._strategy.close()


def _say_goodbye(role: Role) -> None:
    """A worker that has only spoken to others, and trained nothing, has finished."""
    from plait.cluster.ps.client import Connection, say_goodbye  # noqa: PLC0415 - brings ZeroMQ

    say_goodbye([Connection(endpoint) for endpoint in role.server_endpoints], role.index)


_ends: list[bool] = []


def _end_with_process() -> None:
    """Say goodbye when the process ends well; one that fails is missed, and may be started again."""
    if _ends:
        return
    _ends.append(True)
    failed: list[bool] = []
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        failed.append(True)
        return before(kind, error, trace)

    def leave() -> None:
        if failed:
            return
        for _, strategy in _open.values():
            strategy.close()
        for role in set(_controls) - set(_open):
            if role.servers and role.is_worker:
                _say_goodbye(role)

    leaves = sys.exit

    def exit_and_note(status: Any = None, /) -> NoReturn:
        if status not in (None, 0):
            failed.append(True)
        leaves(status)

    sys.excepthook = note
    sys.exit = exit_and_note
    atexit.register(leave)
