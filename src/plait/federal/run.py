"""Ways to run it: one party (`plait party`), or both on this machine (`plait federate`)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from plait.errors import ConfigError
from plait.federal.settings import ROLES, VARIABLES, Party
from plait.federal.supervise import Keeper, Member, PassingChild
from plait.launch.environment import HOST, Layout, cores, free_ports, without_roles
from plait.launch.local import check_command, make_log_dir
from plait.launch.output import last_lines
from plait.launch.processes import Processes, describe, exit_status
from plait.launch.supervise import Failure, caught_signals

__all__ = ["RESTARTS", "federate", "party"]

RESTARTS = 3
_LAST_LINES = 20
_REST_SECONDS = 5.0  # after an interruption, the terminal gets the rest of the output for so long
_PORTS = range(20000, 32000)  # below those that systems hand out: nobody gets one while a party is started again
_TRIES = 200


def party(
    command: Sequence[str],
    *,
    role: str,
    listen: str | None = None,
    peer: str | None = None,
    certs: str | os.PathLike[str] | None = None,
    job: str | None = None,
    timeout: float | None = None,
    insecure: bool = False,
    restarts: int = RESTARTS,
) -> int:
    """Run `script.py args...`, or `-m module args...`, as one party of two; its exit code, 128 + n for a signal.

    What it writes passes through. When it is killed, or ends with code 75, it is started again, up to `restarts` times.
    Signals that ask this process to end go on to it. Certificates, job and timeout may stand in the environment.
    """
    _check_least("restarts", restarts, 0)
    if not command or (command[0].startswith("-") and command[0] != "-m"):
        raise ConfigError(
            f"{command[0] if command else 'nothing'} stands where the script should: write "
            "`plait party --role leader --listen HOST:PORT script.py`, options before the script"
        )
    check_command(command)
    given = {"job": job, "certs": None if certs is None else os.fspath(certs), "timeout": timeout}
    ours = _variables(role=role, listen=listen, peer=peer, insecure=insecure or None, **given)
    environ = {"PYTHONUNBUFFERED": "1"} | _without(os.environ, "role", "listen", "peer") | ours
    with _processes() as (processes, _):
        child = PassingChild(role, 0, [sys.executable, *command], Path(os.devnull), processes._add)  # noqa: SLF001
        member = Member([child], lambda _restart: [environ], name=role)
        with caught_signals(lambda _number: None) as caught:
            Keeper([member], restarts, program="plait party", wait=processes.wait, say=_say, caught=caught).run()
    return exit_status(child.code or 0)


def federate(
    leader: str | os.PathLike[str],
    follower: str | os.PathLike[str],
    *,
    args: Sequence[str] = (),
    workers: int = 1,
    certs: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    restarts: int = RESTARTS,
    log_dir: str | os.PathLike[str] | None = None,
    out: TextIO | None = None,
) -> int:
    """Run both parties on this machine; the exit code of the first that failed, or 0.

    They meet on the loopback interface with mutual TLS; certificates for this run alone are made, unless `certs` names
    a directory of them, or `insecure` is given. Each party has so many `workers`, as with `plait launch`. A party
    that is killed is started again, up to `restarts` times; an error of one ends both. Both scripts get `args`.
    """
    _check_least("workers", workers, 1)
    _check_least("restarts", restarts, 0)
    scripts = {role: os.fspath(script) for role, script in zip(ROLES, (leader, follower), strict=True)}
    for role, script in scripts.items():
        if not Path(script).is_file():
            raise ConfigError(f"the {role}'s script {script} does not exist in {Path.cwd()}")
    if certs is not None and insecure:
        raise ConfigError(f"certs={os.fspath(certs)!r} and insecure=True: give one of them")
    logs = make_log_dir(None if log_dir is None else Path(log_dir))
    with _processes() as (processes, directory):
        ports = _free_range(workers)
        found = None if insecure else str(_make_certificates(directory) if certs is None else certs)
        plan = _Plan(workers, ports, found, os.environ)
        members = [_member(plan, role, [scripts[role], *args], processes, logs) for role in ROLES]
        return _watch(members, restarts, processes, logs, sys.stdout if out is None else out)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What both parties' environments are made of."""

    workers: int
    ports: range
    certs: str | None
    base: Mapping[str, str]

    def environments(self, role: str, restart: int) -> list[dict[str, str]]:
        """The variables of each worker of a party; its collective group meets at a new place each time."""
        listens = role == ROLES[0]
        place = {"listen" if listens else "peer": f"{HOST}:{self.ports[0]}"}
        ours = _variables(role=role, certs=self.certs, insecure=None if self.certs else True, **place)
        threads = {"OMP_NUM_THREADS": str(max(1, cores() // (2 * self.workers))), "PYTHONUNBUFFERED": "1"}
        base = threads | _without(without_roles(self.base), "role", "listen", "peer", "certs", "insecure")
        if self.workers == 1:
            return [base | {"PLAIT_RESTART": str(restart)} | ours]
        spare = [port for port in free_ports(2 * self.workers, HOST) if port not in self.ports]
        layout = Layout(workers=tuple(f"{HOST}:{port}" for port in spare[: self.workers]))
        return [layout.environment("worker", index, base, restart) | ours for index in range(self.workers)]


def _member(plan: _Plan, role: str, command: Sequence[str], processes: Processes, logs: Path) -> Member:
    names = [role] if plan.workers == 1 else [f"{role}-{index}" for index in range(plan.workers)]
    whole = [sys.executable, *command]
    children = [processes.child(role, index, whole, logs / f"{name}.log") for index, name in enumerate(names)]
    return Member(children, lambda restart: plan.environments(role, restart), name=role)


def _watch(members: Sequence[Member], restarts: int, processes: Processes, logs: Path, out: TextIO) -> int:
    """Run the parties to their end, show what they write, say who failed first; the exit code."""
    from plait.federal.view import view  # noqa: PLC0415 - `plait party` draws nothing

    for child in (child for member in members for child in member.children):
        child.log.touch()
    shown = view(members, out)
    shown.say(f"plait federate: leader and follower, logs in {logs}")
    with caught_signals(lambda number: shown.say(f"plait federate: {number.name}: ending both parties")) as caught:
        shown.start()
        try:
            keeper = Keeper(
                members, restarts, program="plait federate", wait=processes.wait, say=shown.say, caught=caught
            )
            failure = keeper.run()
            if failure is not None:
                failure = _real_one(failure, members)
                shown.say(_report(failure, several=len(members[0].children) > 1))
        finally:
            shown.stop(_REST_SECONDS if caught else None)
    if failure is not None:
        return exit_status(failure.code)
    return 128 + caught[0] if caught else 0


def _real_one(failure: Failure, members: Sequence[Member]) -> Failure:
    """A party that ended because the other has failed may be quicker to end."""
    name = failure.child.kind
    lines = last_lines(failure.child.log, failure.child.began, _LAST_LINES)
    others = [child for member in members for child in member.children if child.kind != name and child.code]
    blamed = [child for child in others if any(f"Error: the {child.kind} has ended" in line for line in lines)]
    return failure if not blamed else dataclasses.replace(failure, child=blamed[0], code=blamed[0].code or 1)


def _report(failure: Failure, *, several: bool) -> str:
    child = failure.child
    name = failure.name if several else child.kind
    lines = last_lines(child.log, child.began, _LAST_LINES)
    return "\n".join(
        [
            f"plait federate: the {name} failed first: {describe(failure.code)}. Its last lines:",
            *(f"    {line}" for line in lines),
            f"plait federate: its log: {child.log}",
        ]
    )


@contextlib.contextmanager
def _processes() -> Iterator[tuple[Processes, Path]]:
    """Processes, and a directory: neither outlives this process, however it ends."""
    directory = Path(tempfile.mkdtemp(prefix="plait-"))
    processes = Processes(directory)
    try:
        yield processes, directory
    finally:
        processes.close()
        shutil.rmtree(directory, ignore_errors=True)


def _variables(**given: object) -> dict[str, str]:
    """The environment's variables for these settings of a Party; None: not given."""
    known = {name: value for name, value in given.items() if value is not None}
    Party(**known)  # type: ignore[arg-type] # a mistake is said now, not by the script
    return {VARIABLES[name]: "1" if value is True else str(value) for name, value in known.items()}


def _without(environ: Mapping[str, str], *fields: str) -> dict[str, str]:
    """Without what was meant for another party."""
    dropped = {VARIABLES[field] for field in fields}
    return {name: value for name, value in environ.items() if name not in dropped}


def _make_certificates(directory: Path) -> Path:
    from plait.federal.certificates import init  # noqa: PLC0415 - heavy

    made = directory / "certs"
    init(made, ROLES)
    return made


def _free_range(count: int) -> range:
    """Ports in a row that nobody uses at this moment: one for each pair of workers."""
    for _ in range(_TRIES):
        first = _PORTS.start + secrets.randbelow(len(_PORTS) - count)
        wanted = range(first, first + count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in wanted:
                stack.enter_context(socket.socket()).bind((HOST, port))
            return wanted
    raise ConfigError(f"no {count} free ports in a row from {_PORTS.start} to {_PORTS.stop}: give fewer workers")


def _check_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r}: write a whole number from {least} on")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the script's own output goes to stdout
