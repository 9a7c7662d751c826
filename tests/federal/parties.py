"""Two parties in processes of their own: starting them, disturbing them, starting them again, and ending them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file

from plait.federal.certificates import init
from plait.federal.settings import ROLES, VARIABLES
from plait.federal.supervise import may_start_again
from plait.launch.environment import free_ports

from .proxy import Proxy

PROGRAM = Path(__file__).parent / "programs" / "party.py"
SECONDS = 120.0
"""No training of a test takes longer, unless it is told so."""
LAST = ("last", "done", "end")
"""Moments at which a party has all that it wants of the other."""


class Starter:
    """A process that has imported all that a party needs, and starts parties at once."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._buffer = b""
        self._codes: dict[int, int] = {}
        self._started: list[int] = []

    def start(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> int:
        order = {"arguments": list(arguments), "environ": dict(environ), "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        until = time.monotonic() + SECONDS
        while not self._started:
            assert time.monotonic() < until, "no process was started"
            self._read(1.0)
        return self._started.pop()

    def code(self, pid: int) -> int | None:
        """The exit code of a process, minus a signal's number; None: it runs."""
        self._read(0)
        return self._codes.get(pid)

    def close(self) -> None:
        """Whatever it has started is killed."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(10)

    def _read(self, seconds: float) -> None:
        assert self._process.stdout is not None
        while select.select([self._process.stdout], [], [], seconds)[0]:
            seconds = 0
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            assert data, "the starter has died"
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                pid, *code = map(int, line.split())
                if code:
                    self._codes[pid] = code[0]
                else:
                    self._started.append(pid)


class Two:
    """A leader and a follower that train together over mutual TLS, the follower through a proxy."""

    def __init__(self, starter: Starter, directory: Path, *options: object, timeout: float = 60.0) -> None:
        self.directory, self._starter = directory, starter
        self._options = [str(option) for option in options]
        self._timeout = timeout
        directory.mkdir(parents=True, exist_ok=True)
        self._certs = directory / "certs"
        if not self._certs.exists():
            init(self._certs)
        self._port = free_ports(1, "127.0.0.1")[0]
        self.proxy = Proxy(f"127.0.0.1:{self._port}")
        self.pids: dict[str, int] = {}
        self.restarts = dict.fromkeys(ROLES, -1)
        self._moments = dict.fromkeys(ROLES, "")

    def __enter__(self) -> Two:
        return self

    def __exit__(self, *_: object) -> None:
        for role in self.pids:
            self.signal(role, signal.SIGKILL)
        self.proxy.close()

    def start(self, *roles: str, kill_at: str = "") -> None:
        for role in roles or ROLES:
            place = {"listen": f"127.0.0.1:{self._port}"} if role == "leader" else {"peer": self.proxy.endpoint}
            given = {"role": role, "certs": str(self._certs), "timeout": str(self._timeout), **place}
            environ = {VARIABLES[name]: value for name, value in given.items()} | {"PLAIT_KILL_AT": kill_at}
            arguments = [str(self.directory), *self._options]
            self.pids[role] = self._starter.start(arguments, environ, self._file(role, "log"))
            self.restarts[role] += 1
            self._moments[role] = kill_at

    def signal(self, role: str, number: signal.Signals) -> None:
        if self.code(role) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[role], number)

    def kill(self, *roles: str) -> None:
        """Kill them with -9, and start them again."""
        for role in roles:
            self.signal(role, signal.SIGKILL)
        self.wait_for(lambda: all(self.code(role) is not None for role in roles))
        self.start(*roles)

    def stop(self, role: str, seconds: float) -> None:
        """Let a party stand still for a while."""
        self.signal(role, signal.SIGSTOP)
        time.sleep(seconds)
        self.signal(role, signal.SIGCONT)

    def code(self, role: str) -> int | None:
        return self._starter.code(self.pids[role])

    def ended(self) -> bool:
        return all(self.code(role) is not None for role in ROLES)

    def runs(self, role: str) -> int:
        """How many times a party has run its Ops, in all its lives."""
        file = self._file(role, "steps")
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def make_steps(self, count: int) -> None:
        """Wait until the leader has made so many."""
        wanted = self.runs("leader") + count
        self.wait_for(lambda: self.runs("leader") >= wanted or self.ended())

    def wait_for(self, look: Callable[[], bool], seconds: float = SECONDS) -> None:
        until = time.monotonic() + seconds
        while not look():
            assert time.monotonic() < until, f"it did not come to that in {seconds:g} s:\n{self.logs()}"
            time.sleep(0.005)

    def end(self, moments: Mapping[str, Sequence[str]] | None = None, seconds: float = SECONDS) -> None:
        """Wait until both have ended well; one that was killed is started again, with the next of its `moments`.

        As with `plait federate`, so is then the other one if it had ended, and both if one came back too late.
        """
        left = {role: list((moments or {}).get(role, ())) for role in ROLES}
        until = time.monotonic() + seconds
        while not all(self.code(role) == 0 for role in ROLES):
            assert time.monotonic() < until, f"they have not ended after {seconds:g} s:\n{self.logs()}"
            codes = {role: self.code(role) for role in ROLES}
            killed = any(code is not None and may_start_again(code) for code in codes.values())
            late = 1 in codes.values() and self._was_late()
            assert killed or late or set(codes.values()) <= {None, 0}, f"{codes}:\n{self.logs()}"
            if killed and any(code and self._moments[role] in LAST for role, code in codes.items()):
                self._settle()
                codes = {role: self.code(role) for role in ROLES}
            if killed or (late and self.ended()):
                for role in [role for role, code in codes.items() if code is not None]:
                    self.start(role, kill_at=left[role].pop(0) if left[role] and codes[role] else "")
            time.sleep(0.005)
        assert not any(left.values()), f"these moments never came: {left}"

    def _settle(self) -> None:
        """A party that has all ends soon after the other one was killed."""
        until = time.monotonic() + 0.3
        while time.monotonic() < until and not self.ended():
            time.sleep(0.005)

    def _was_late(self) -> bool:
        """A party has ended because the other one had ended well before it came back."""
        return any("has ended: start it again, too" in self.log(role)[-200:] for role in ROLES)

    def outcome(self) -> dict[str, object]:
        """What both have come to, to the last bit, by names."""
        found: dict[str, object] = {}
        for role in ROLES:
            facts = json.loads(self._file(role, "json").read_text())
            found |= {f"{role} {name}": value for name, value in facts.items()}
            tensors = load_file(self._file(role, "safetensors"))
            found |= {f"{role} {name}": value.numpy().tobytes().hex() for name, value in tensors.items()}
        return found

    def _file(self, role: str, kind: str) -> Path:
        return self.directory / f"{role}.{kind}"

    def logs(self, lines: int = 40) -> str:
        logs = {role: self.log(role).splitlines()[-lines:] for role in ROLES}
        return "\n".join(f"---- {role}\n" + "\n".join(last) for role, last in logs.items())

    def log(self, role: str) -> str:
        file = self._file(role, "log")
        return file.read_text(errors="replace") if file.exists() else ""


def at_random(two: Two, times: int, draws: random.Random) -> Iterator[None]:
    """Comes back at random moments: after some steps, or while the parties find each other again."""
    for number in range(times):
        if number and draws.random() < 0.3:
            time.sleep(draws.uniform(0.0, 0.5))
        else:
            two.make_steps(draws.randint(1, 20))
            time.sleep(draws.uniform(0.0, 0.05))
        assert not two.ended(), f"the run was over after {number} faults:\n{two.logs()}"
        yield
