"""Two parties, one model: plait beside the same work by hand over gRPC, beside no split at all, and beside peers.

All over loopback with mutual TLS; each party computes in one thread, and is kept on a core of its own; samples/s are also
measured with processes that go where the system sends them, as a user's do. Blocks of steps take turns, and each
is compared with those of its round, so that other load on the machine falls on all. `python benchmarks/federal.py`;
`--peers` makes environments for NVIDIA FLARE and Flower and runs them too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import torch
from rich.console import Console
from rich.table import Table

from plait.atomic import write_atomic

HERE = Path(__file__).parent
SCRIPTS = HERE / "federal_peers"
RESULT = HERE / "results" / "federal.json"
sys.path.insert(0, str(SCRIPTS))

import certificates  # noqa: E402
import split  # noqa: E402
import stream  # noqa: E402

ANSWER_SECONDS = 300
"""For how long a way may take to start, or to run a block."""
INSTALL_SECONDS = 1800
QUIET = 1.1
"""A process that is alone on its core takes at most so much of its CPU time. Otherwise others work here, too, and a
process that never waits is served last: the two parties look too good beside the unsplit model."""
CALLS = "bare gRPC, calls"
"""One unary call a step, as most people write it; "bare gRPC" is a stream each way, which is quicker."""
ENVIRONMENTS = Path(tempfile.gettempdir()) / "plait-federal-peers"
PEERS = {
    "NVIDIA FLARE": ("nvflare", "nvflare==2.9.*", "nvflare_collab.py", 300, "simulator, without TLS"),
    "Flower": ("flower", "flwr==1.41.*", "flower.py", 3, "deployment engine, plain HTTP"),
}
"""Folder, requirement, script, steps, and how it runs."""

Figures = dict[str, list[dict[str, Any]]]
"""For each way, what it answered in each round."""


# ---- ways: processes that run steps when told to


class Way:
    """The processes of one way to train; the last is the one that is told how many steps to run."""

    def __init__(self, name: str, commands: list[list[str]], log: Path, *, pinned: bool = True) -> None:
        self.name, self.log = name, log
        self.processes: list[subprocess.Popen] = []
        for core, command in zip((1, 0)[-len(commands) :], commands, strict=True):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            if pinned:
                environment["PLAIT_BENCH_CORE"] = str(core)
            with log.open("a") as errors:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    text=True,
                )
            self.processes.append(process)

    def answer(self) -> str:
        told = self.processes[-1]
        watch = threading.Timer(ANSWER_SECONDS, self.end)
        watch.start()
        line = told.stdout.readline().strip()
        watch.cancel()
        if not line:
            raise SystemExit(f"{self.name} gave no answer:\n{self.log.read_text()[-3000:]}")
        return line

    def run(self, steps: int) -> dict[str, Any]:
        told = self.processes[-1]
        told.stdin.write(f"{steps}\n")
        told.stdin.flush()
        return json.loads(self.answer())

    def close(self) -> None:
        """Ask them to end, then see to it."""
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self.processes[-1].stdin.close()
            for process in reversed(self.processes):
                process.wait(15)
        self.end()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def commands_of(name: str, shape: str, folder: Path, port: int, dialled: int) -> list[list[str]]:
    """What to start, the one that is told last; the follower dials `dialled`."""
    if name == "unsplit":
        return [[str(SCRIPTS / "unsplit.py"), shape]]
    if name.startswith("bare gRPC"):
        script, more = "bare_calls.py" if name == CALLS else "bare_grpc.py", []
    else:
        script, more = "plait_split.py", ["1" if "staleness" in name else "0"]
    ports = {"follower": dialled, "leader": port}
    return [[str(SCRIPTS / script), shape, role, str(at), str(folder), *more] for role, at in ports.items()]


@contextlib.contextmanager
def started(names: list[str], shape: str, folder: Path, *, pinned: bool = True) -> Iterator[dict[str, Way]]:
    with contextlib.ExitStack() as stack:
        ways = {}
        for name in names:
            port = free_port()
            commands = commands_of(name, shape, folder, port, port)
            ways[name] = Way(name, commands, folder / f"{name}.log", pinned=pinned)
            stack.callback(ways[name].close)
        for way in ways.values():
            way.answer()
        yield ways


def take_turns(ways: dict[str, Way], rounds: int, steps: int) -> Figures:
    found: Figures = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in ways if number % 2 else reversed(ways):
            figures = ways[name].run(steps)
            if number:  # the first round warms up
                found[name].append(figures)
    return found


# ---- what is measured


def middle(figures: Figures, name: str, of: Any, base: str | None = None) -> float:
    """The median over the rounds; against another way, of the ratios within a round."""
    if base is None:
        return statistics.median(of(one) for one in figures[name])
    return statistics.median(of(one) / of(other) for one, other in zip(figures[name], figures[base], strict=True))


def step_seconds(one: dict[str, Any]) -> float:
    return statistics.median(one["seconds"])


def mean_seconds(one: dict[str, Any]) -> float:
    return statistics.fmean(one["seconds"])


def cpu_seconds(one: dict[str, Any]) -> float:
    return one["cpu"] / len(one["seconds"])


def trained_as(figures: Figures, name: str, base: str) -> bool:
    """Whether the last losses are those of the other, to the last bit."""
    return [one["loss"] for one in figures[name]] == [one["loss"] for one in figures[base]]


def measure_steps(rounds: int, folder: Path) -> list[dict[str, Any]]:
    with started(["unsplit", "bare gRPC", CALLS, "plait"], "peers", folder) as ways:
        figures = take_turns(ways, rounds, 100)
    return [
        {
            "way": name,
            "ms": round(middle(figures, name, step_seconds) * 1e3, 3),
            "of_bare_grpc": round(middle(figures, name, step_seconds, "bare gRPC"), 3),
            "of_calls": round(middle(figures, name, step_seconds, CALLS), 3),
            "leader_cpu_ms": round(middle(figures, name, cpu_seconds) * 1e3, 3),
            "as_unsplit": trained_as(figures, name, "unsplit"),
            "note": "",
        }
        for name in figures
    ]


def measure_speed(rounds: int, folder: Path, *, pinned: bool) -> list[dict[str, Any]]:
    batch = split.SHAPES["issue"].batch
    names = ["unsplit", "bare gRPC", "plait", "plait, staleness=1"]
    with started(names, "issue", folder, pinned=pinned) as ways:
        figures = take_turns(ways, rounds, 25)
    return [
        {
            "way": name,
            "samples_per_s": round(batch / middle(figures, name, mean_seconds)),
            "of_unsplit": round(1 / middle(figures, name, mean_seconds, "unsplit"), 3),
            "wall_of_cpu": round(middle(figures, name, lambda one: mean_seconds(one) / cpu_seconds(one)), 3),
            "as_unsplit": trained_as(figures, name, "unsplit"),
        }
        for name in figures
    ]


def measure_latency(rounds: int, folder: Path) -> list[dict[str, Any]]:
    with started(["unsplit", "bare gRPC", "plait"], "tiny", folder) as ways:
        figures = take_turns(ways, rounds, 300)
    rows = []
    for name, found in figures.items():
        pairs = zip(found, figures["unsplit"], strict=True)
        added = statistics.median(step_seconds(one) - step_seconds(other) for one, other in pairs)
        rows.append(
            {
                "way": name,
                "ms": round(middle(figures, name, step_seconds) * 1e3, 3),
                "added_ms": round(added * 1e3, 3),
            }
        )
    return rows


def measure_stream(rounds: int, folder: Path) -> list[dict[str, Any]]:
    names = {"bare TLS socket": "tls", "bare gRPC": "grpc", "plait": "plait"}
    with contextlib.ExitStack() as stack:
        ways = {}
        for name, kind in names.items():
            port = str(free_port())
            commands = [[str(SCRIPTS / "stream.py"), kind, role, port, str(folder)] for role in ("leader", "follower")]
            ways[name] = Way(name, commands, folder / f"{kind}-stream.log")
            stack.callback(ways[name].close)
        for way in ways.values():
            way.answer()
        figures = take_turns(ways, rounds, 3)
    return [
        {
            "way": name,
            "gb_per_s": round(stream.COUNT * stream.BYTES / middle(figures, name, mean_seconds) / 1e9, 3),
            "of_bare_grpc": round(1 / middle(figures, name, mean_seconds, "bare gRPC"), 3),
            "of_tls_socket": round(1 / middle(figures, name, mean_seconds, "bare TLS socket"), 3),
        }
        for name in figures
    ]


# ---- bytes on the wire


class Counter:
    """A TCP proxy that counts what goes through it, both ways."""

    def __init__(self, target: int) -> None:
        self.target, self.bytes = target, 0
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.open: list[socket.socket] = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # the leader does not listen yet; the follower dials again
                    near.close()
                    continue
                self.open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self.pump, args=(one, other), daemon=True).start()

    def pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 18):
                other.sendall(data)
                self.bytes += len(data)
            other.shutdown(socket.SHUT_WR)

    def settled(self) -> int:
        """What has gone through once nothing more does: the follower is then one step ahead, each time."""
        before = -1
        while before != self.bytes:
            before = self.bytes
            time.sleep(0.5)
        return before

    def close(self) -> None:
        for one in (self.server, *self.open):
            one.close()


def measure_bytes(folder: Path, name: str = "plait", steps: int = 50) -> dict[str, Any]:
    shape = split.SHAPES["issue"]
    port = free_port()
    counter = Counter(port)
    with contextlib.closing(counter):
        way = Way(name, commands_of(name, "issue", folder, port, counter.port), folder / "bytes.log")
        try:
            way.answer()
            way.run(1)
            before = counter.settled()
            way.run(steps)
            moved = counter.settled() - before
        finally:
            way.close()
    tensors = 2 * (steps + 1) * 4 * shape.batch * shape.width  # a block runs one step more than it counts
    return {"way": name, "bytes": moved, "tensor_bytes": tensors, "ratio": round(moved / tensors, 5)}


# ---- peers, each in an environment of its own


def run_peer(name: str, environments: Path, base: float) -> dict[str, Any] | str:
    """Its row, or why there is none."""
    kind, requirement, script, steps, note = PEERS[name]
    python = environments / kind / "bin" / "python"
    if problem := install(python, requirement):
        return f"{name}: skipped, {requirement} cannot be installed ({problem})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS)}
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        command = [str(python), str(SCRIPTS / script), "peers", str(steps), folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ANSWER_SECONDS + 90 * 3)
        result = Path(folder) / "steps.json"
        if not result.exists():
            return f"{name}: skipped, it failed: {(done.stdout + done.stderr)[-500:]}"
        figures = json.loads(result.read_text())
    ms = step_seconds(figures) * 1e3
    return {"way": name, "ms": round(ms, 3), "of_bare_grpc": round(ms / base, 1), "steps": steps, "note": note}


def install(python: Path, requirement: str) -> str:
    """Make the environment unless it is there; what went wrong."""
    done = python.parent.parent / "installed"
    if done.exists():
        return ""
    shutil.rmtree(python.parent.parent, ignore_errors=True)
    version = torch.__version__.split("+")[0]
    pip = [str(python), "-m", "pip", "install", "--quiet", f"torch=={version}", requirement]
    for command in ([sys.executable, "-m", "venv", str(python.parent.parent)], pip):
        print(" ".join(command), file=sys.stderr)
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            return f"not within {INSTALL_SECONDS} s"
        except subprocess.CalledProcessError as error:
            return (error.stderr.strip().splitlines() or ["no reason given"])[-1]
    done.touch()
    return ""


# ---- showing


def table(title: str, rows: list[dict[str, Any]], columns: dict[str, str]) -> Table:
    made = Table(title=title)
    for heading in columns:
        made.add_column(heading, justify="left" if heading in ("way", "") else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(shown(row.get(key, "")) for key in columns.values()))
    return made


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def show(found: dict[str, Any]) -> None:
    console = Console(width=120)
    columns = {"way": "way", "ms": "ms", "of bare gRPC": "of_bare_grpc", "of its calls": "of_calls"}
    columns |= {"leader's CPU ms": "leader_cpu_ms"}
    columns |= {"losses as unsplit": "as_unsplit", "": "note"}
    console.print(table("A split step: batch 256, 392 -> 128 a party", found["steps"], columns))
    for line in found["skipped"]:
        console.print(line)
    columns = {"way": "way", "samples/s": "samples_per_s", "of unsplit": "of_unsplit", "as unsplit": "as_unsplit"}
    console.print(table("392-256 beside 392-256, joined into 512-64-10, batch 1024", found["speed"], columns))
    console.print(table("The same, each process kept on one core", found["speed_pinned"], columns))
    columns = {"way": "way", "ms": "ms", "added ms": "added_ms"}
    console.print(table("A step with tensors of 1 KB", found["latency"], columns))
    columns = {"way": "way", "GB/s": "gb_per_s", "of bare gRPC": "of_bare_grpc", "of TLS socket": "of_tls_socket"}
    console.print(table("Tensors of 16 MB, one way", found["stream"], columns))
    columns = {"way": "way", "bytes": "bytes", "tensors' bytes": "tensor_bytes", "ratio": "ratio"}
    console.print(table("On the wire, TLS and all, in 51 steps", found["bytes"], columns))
    for line in verdicts(found):
        console.print(line)


def verdicts(found: dict[str, Any]) -> Iterator[str]:
    parts = ("steps", "speed", "speed_pinned", "latency", "stream", "bytes")
    rows = {part: {row["way"]: row for row in found[part]} for part in parts}
    plait, stale = rows["speed"]["plait"], rows["speed"]["plait, staleness=1"]
    pinned = rows["speed_pinned"]["plait, staleness=1"]
    for what, got, needed, most in (
        ("a split step, of bare gRPC calls", rows["steps"]["plait"]["of_calls"], 1.15, True),
        ("a split step, of a bare gRPC stream", rows["steps"]["plait"]["of_bare_grpc"], 1.15, True),
        ("samples/s, of unsplit", plait["of_unsplit"], 0.85, False),
        ("samples/s with staleness=1, of unsplit", stale["of_unsplit"], 1.15, False),
        ("the same, each process kept on one core", pinned["of_unsplit"], 1.15, False),
        ("bytes on the wire, of the tensors' bytes", rows["bytes"]["plait"]["ratio"], 1.01, True),
        ("ms added to a step with tensors of 1 KB", rows["latency"]["plait"]["added_ms"], 1.5, True),
        ("GB/s at 16 MB, of bare gRPC", rows["stream"]["plait"]["of_bare_grpc"], 0.9, False),
    ):
        reached = got <= needed if most else got >= needed
        yield f"{what}: {got}, at {'most' if most else 'least'} {needed}: {'reached' if reached else 'MISSED'}"
    if (busy := rows["speed"]["unsplit"]["wall_of_cpu"]) > QUIET:
        yield f"the machine was BUSY: one process alone took {busy} of its CPU time; measure again"
    same = rows["steps"]["plait"]["as_unsplit"] and plait["as_unsplit"]
    yield f"losses of plait and of the unsplit model, bit for bit: {'the same' if same else 'DIFFERENT'}"


def measure(rounds: int, environments: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="plait-") as directory:
        folder = Path(directory)
        certificates.make(folder)
        found: dict[str, Any] = {
            "steps": measure_steps(rounds, folder),
            "skipped": [],
            "speed": measure_speed(rounds, folder, pinned=False),
            "speed_pinned": measure_speed(rounds, folder, pinned=True),
            "latency": measure_latency(rounds, folder),
            "stream": measure_stream(rounds, folder),
            "bytes": [measure_bytes(folder, name) for name in ("bare gRPC", "plait")],
        }
    if environments is not None:
        base = next(row["ms"] for row in found["steps"] if row["way"] == "bare gRPC")
        for name in PEERS:
            row = run_peer(name, environments, base)
            found["skipped" if isinstance(row, str) else "steps"].append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--peers",
        type=Path,
        nargs="?",
        const=ENVIRONMENTS,
        metavar="DIR",
        help="run FLARE and Flower too; their environments are made in DIR, and kept",
    )
    arguments = parser.parse_args()
    found = measure(arguments.rounds, arguments.peers and arguments.peers.resolve())
    show(found)
    head = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpcio": grpc.__version__,
        "cpus": os.cpu_count(),
        "rounds": arguments.rounds,
    }
    write_atomic(RESULT, json.dumps({**head, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
