"""From a role and settings to what a process needs: a strategy for the engine, a control for role makers."""

from __future__ import annotations

import atexit
import sys
from types import TracebackType
from typing import Any

from plait.cluster.control import Control
from plait.cluster.roles import Role, find_role
from plait.cluster.settings import COLLECTIVE, Distributed
from plait.engine.strategy import Local, Strategy
from plait.errors import ConfigError

__all__ = ["connected", "control_of", "from_environment", "strategy_of"]

_open: dict[Role, Strategy] = {}


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
        return Local(settings.gradient_merge)
    served = role.servers > 0
    if served and settings.mode == COLLECTIVE:
        raise ConfigError(f"mode='collective', but there are {role.servers} servers ({role.source}): start none")
    if not served and settings.mode not in ("auto", COLLECTIVE):
        raise ConfigError(f"mode={settings.mode!r} needs servers, and {role.source} names none: start some")
    if role in _open:
        _open.pop(role).close()
    strategy = _made(role, settings)
    _open[role] = strategy
    _end_with_process()
    return strategy


def _made(role: Role, settings: Distributed) -> Strategy:
    if role.servers > 0:
        from plait.cluster.ps.strategy import Served  # noqa: PLC0415 - brings ZeroMQ

        return Served(role, settings)
    from plait.cluster.collective import Collective  # noqa: PLC0415 - brings torch.distributed

    return Collective(role, settings)


def control_of(role: Role) -> Control:
    """How role makers of this process talk to those of the others."""
    raise NotImplementedError


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
        for strategy in _open.values():
            if not failed:
                strategy.close()

    sys.excepthook = note
    atexit.register(leave)
