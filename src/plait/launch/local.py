"""A cluster on this machine: workers and servers are processes of one script."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TextIO

from plait.errors import ConfigError
from plait.launch.environment import HOST, Layout, free_ports
from plait.launch.output import Echo, last_lines
from plait.launch.processes import Child, LocalChild, Processes, describe, exit_status
from plait.launch.supervise import Failure, Group, Supervisor, caught_signals

__all__ = ["check_command", "check_counts", "groups_of", "make_log_dir", "run", "watch"]

_LAST_LINES = 20
_REST_SECONDS = 5.0  # after an interruption, the terminal gets the rest of the output for so long


def run(
    command: Sequence[str],
    *,
    workers: int,
    servers: int = 0,
    max_restarts: int = 3,
    log_dir: str | Path | None = None,
    port: int | None = None,
    out: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run `script.py args...`, or `-m module args...`, as a cluster; the exit code of the first that failed, or 0.

    Without servers the workers are a collective group, which is started again as a whole. With servers each process
    is started again by itself. `port` is the first of as many ports as there are servers (or workers, without
    servers); otherwise free ones are found. Interrupted by a signal it ends all processes and returns 128 + n.
    """
    check_counts(workers, servers, max_restarts, port)
    check_command(command)
    base = os.environ if environ is None else environ
    logs = make_log_dir(log_dir)
    sockets = Path(tempfile.mkdtemp(prefix="plait-"))
    processes = Processes(sockets)

    def children(kind: str, count: int) -> list[LocalChild]:
        whole = [sys.executable, *command]
        return [processes.child(kind, index, whole, logs / f"{kind}-{index}.log") for index in range(count)]

    try:
        layout = functools.partial(_layout, workers, servers, port, str(sockets))
        groups = groups_of(children("worker", workers), children("server", servers), layout, base)
        return watch(groups, max_restarts, processes.wait, sys.stdout if out is None else out)
    finally:
        processes.close()
        shutil.rmtree(sockets, ignore_errors=True)


def groups_of(
    workers: Sequence[Child], servers: Sequence[Child], layout: Callable[[], Layout], base: Mapping[str, str]
) -> list[Group]:
    """One group without servers, which meets at a new place each time; with servers each stands for itself."""
    if not servers:

        def environments(restart: int) -> list[dict[str, str]]:
            fresh = layout()
            return [fresh.environment(child.kind, child.index, base, restart) for child in workers]

        return [Group(workers, environments)]
    fixed = layout()

    def alone(child: Child) -> Group:
        return Group([child], lambda restart: [fixed.environment(child.kind, child.index, base, restart)])

    return [alone(child) for child in [*workers, *servers]]


def watch(groups: Sequence[Group], max_restarts: int, wait: Callable[[float], None], out: TextIO) -> int:
    """Run groups to their end, show what they write, say who failed; the exit code. `wait`: as for a Supervisor."""
    children = [child for group in groups for child in group.children]
    for child in children:
        child.log.touch()
    echo = Echo({f"{child.kind} {child.index}": child.log for child in children}, out)
    echo.say(
        f"plait launch: {len(children)} process{'es' if len(children) > 1 else ''}, logs in {children[0].log.parent}"
    )
    with caught_signals(lambda number: echo.say(f"plait launch: {number.name}: ending all processes")) as caught:
        echo.start()
        try:
            failure = Supervisor(groups, max_restarts, wait=wait, say=echo.say, stopped=lambda: len(caught)).run()
            if failure is not None:
                echo.say(_report(failure))
        finally:
            echo.stop(_REST_SECONDS if caught else None)
    if failure is not None:
        return exit_status(failure.code)
    return 128 + caught[0] if caught else 0


def check_counts(workers: int, servers: int, max_restarts: int, port: int | None = None) -> None:
    for name, value, least in (("workers", workers, 1), ("servers", servers, 0), ("max_restarts", max_restarts, 0)):
        if value < least:
            raise ConfigError(f"{name}={value}: write a whole number from {least} on")
    last = 65536 - (servers or workers)
    if port is not None and not 1 <= port <= last:
        raise ConfigError(f"port={port}: write a number from 1 to {last}; each process gets the next one")


def check_command(command: Sequence[str]) -> None:
    """What does not exist is said once, here, not by every process."""
    if not command:
        raise ConfigError("no script: write `plait launch --workers 2 script.py`, or `-m module`")
    if command[0] == "-m":
        module = command[1] if len(command) > 1 else ""
        if PathFinder.find_spec(module.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            raise ConfigError(f"-m {module}: no such module in {Path.cwd()} or among the installed ones")
    elif command[0].startswith("-"):
        raise ConfigError(f"{command[0]}: not an option of plait launch; options stand before the script")
    elif not Path(command[0]).exists():
        raise ConfigError(f"the script {command[0]} does not exist in {Path.cwd()}")


def make_log_dir(log_dir: str | Path | None) -> Path:
    default = Path("plait-logs", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    made = default if log_dir is None else Path(log_dir)
    try:
        made.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"log_dir={str(made)!r} cannot be made: {error.strerror}; name another directory") from error
    return made


def _layout(workers: int, servers: int, port: int | None, sockets: str) -> Layout:
    given = [] if port is None else list(range(port, port + (servers or workers)))
    ports = (given + free_ports(workers + servers, HOST))[: workers + servers]
    endpoints = [f"{HOST}:{number}" for number in ports]
    return Layout(servers=tuple(endpoints[:servers]), workers=tuple(endpoints[servers:]), sockets=sockets)


def _report(failure: Failure) -> str:
    child = failure.child
    lines = last_lines(child.log, child.began, _LAST_LINES)
    return "\n".join(
        [
            f"plait launch: {failure.name} failed first: {describe(failure.code)}. Its last lines:",
            *(f"    {line}" for line in lines),
            f"plait launch: its log: {child.log}",
        ]
    )
