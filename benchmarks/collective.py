"""Two workers on one machine, each with one thread: plait's collective beside hand-written DDP and beside no
communication at all; and how fast a mean is beside a raw socket. `python benchmarks/collective.py`

Every way of training has its own copy of the network in both processes. Blocks of steps take turns, and each is compared
with those of the same round, so that other load on the machine falls on all of them.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from plait.atomic import write_atomic
from plait.cluster.collective import Collective
from plait.cluster.roles import Role
from plait.cluster.settings import Distributed

RESULT = Path(__file__).parent / "results" / "collective.json"
WORKERS, EVERY = 2, 8
SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
NEEDED = {"plait / DDP": 0.98, "plait": 0.86, "plait, local SGD over 8": 0.95, "plait, gradients merged over 8": 0.95}
"""Of no communication, but for the first; for the picture network."""

Step = Callable[[int], None]


# ---- networks


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        changes = inputs != outputs or stride > 1
        self.short = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if changes
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.short(x) + self.main(x))


def pictures(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A ResNet-18 of 11.7 million parameters, 16 pictures of 64x64."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(channels, outputs, stride), Block(outputs, outputs, 1)]
        channels = outputs
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    torch.manual_seed(seed)
    return net, torch.randn(16, 3, 64, 64), torch.randint(0, 1000, (16,))


def small(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A perceptron of 400 thousand parameters, 128 rows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    torch.manual_seed(seed)
    return net, torch.randn(128, 256), torch.randint(0, 10, (128,))


MODELS = {"ResNet-18, 16 x 64x64": (pictures, 8), "MLP of 400k, 128 rows": (small, 80)}
"""With steps a block: a multiple of 8, so that what is sent every 8 steps is sent once or more in each."""


# ---- ways to train


def ways(net: nn.Module, x: Tensor, y: Tensor, group: Collective, local: Collective) -> dict[str, Step]:
    def prepared(wrap: Callable[[nn.Module], nn.Module] = lambda one: one) -> tuple[nn.Module, Any, list[Tensor]]:
        module = wrap(copy.deepcopy(net))
        parameters = list(module.parameters())
        return module, torch.optim.SGD(parameters, lr=1e-3), parameters

    def backward(module: nn.Module) -> None:
        F.cross_entropy(module(x), y).backward()

    def alone() -> Step:
        module, optimizer, _ = prepared()

        def step(_: int) -> None:
            optimizer.zero_grad()
            backward(module)
            optimizer.step()

        return step

    def ddp() -> Step:
        module, optimizer, _ = prepared(lambda one: DistributedDataParallel(one, gradient_as_bucket_view=True))

        def step(_: int) -> None:
            optimizer.zero_grad()
            backward(module)
            optimizer.step()

        return step

    def plait() -> Step:
        module, optimizer, parameters = prepared()

        def step(_: int) -> None:
            optimizer.zero_grad()
            backward(module)
            group.reduce_gradients(parameters)
            optimizer.step()

        return step

    def local_sgd() -> Step:
        module, optimizer, parameters = prepared()
        model: Any = SimpleNamespace(
            variables=lambda: module.state_dict(keep_vars=True), loss_metrics={}, assignments={None: {optimizer: None}}
        )

        def step(_: int) -> None:
            optimizer.zero_grad()
            backward(module)
            local.reduce_gradients(parameters)
            optimizer.step()
            local.after_step(model)

        return step

    def merged() -> Step:
        module, optimizer, parameters = prepared()

        def step(number: int) -> None:
            backward(module)
            if (number + 1) % EVERY == 0:
                torch._foreach_div_([p.grad for p in parameters], EVERY)
                group.reduce_gradients(parameters)
                optimizer.step()
                optimizer.zero_grad()

        return step

    return {
        "no communication": alone(),
        "DDP": ddp(),
        "plait": plait(),
        "plait, local SGD over 8": local_sgd(),
        "plait, gradients merged over 8": merged(),
    }


def train(model: str, rounds: int, group: Collective, local: Collective) -> list[dict[str, Any]]:
    make, steps = MODELS[model]
    net, x, y = make(group.worker_id)
    prepared = ways(net, x, y, group, local)
    speeds: dict[str, list[float]] = {name: [] for name in prepared}
    loads: dict[str, list[float]] = {name: [] for name in prepared}
    for number in range(rounds + 1):
        for name in prepared if number % 2 else reversed(prepared):
            group.barrier("block", 1.0)
            begun, used = time.perf_counter(), time.process_time()
            for one in range(steps):
                prepared[name](one)
            mine = [time.perf_counter() - begun, time.process_time() - used]
            wall, cpu = (statistics.fmean(both) for both in zip(*group.gather(mine), strict=True))
            if number:  # the first round warms up
                speeds[name].append(WORKERS * steps * len(x) / wall)
                loads[name].append(cpu / steps)
    return [row(model, name, speeds, loads) for name in prepared]


def row(model: str, name: str, speeds: dict[str, list[float]], loads: dict[str, list[float]]) -> dict[str, Any]:
    def of(figures: dict[str, list[float]], other: str) -> float:
        pairs = zip(figures[name], figures[other], strict=True)
        return round(statistics.median(one / base for one, base in pairs), 3)

    return {
        "model": model,
        "way": name,
        "samples_per_s": round(statistics.median(speeds[name]), 1),
        "of_no_communication": of(speeds, "no communication"),
        "of_ddp": of(speeds, "DDP"),
        "cpu_ms_per_step": round(statistics.median(loads[name]) * 1e3, 2),
        "cpu_of_no_communication": of(loads, "no communication"),
    }


# ---- bandwidth


def pair(rank: int, group: Collective) -> socket.socket:
    """A plain TCP connection between the two, over loopback."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            group.tell(server.getsockname()[1])
            connection, _ = server.accept()
    else:
        connection = socket.create_connection(("127.0.0.1", group.tell(None)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def push(rank: int, connection: socket.socket, data: bytearray) -> None:
    """The first sends everything, the second says that it has it."""
    if rank == 0:
        connection.sendall(data)
        connection.recv(1)
        return
    view, got = memoryview(data), 0
    while got < len(data):
        got += connection.recv_into(view[got:])
    connection.sendall(b"!")


def bandwidth(rounds: int, group: Collective) -> list[dict[str, Any]]:
    rank, rows = group.worker_id, []
    with pair(rank, group) as connection:
        for name, size in SIZES.items():
            tensor, data = torch.ones(size // 4), bytearray(size)
            tensor.grad = torch.ones(size // 4)
            acts = {
                "raw socket": lambda data=data: push(rank, connection, data),
                "gloo all_reduce": lambda tensor=tensor: dist.all_reduce(tensor),
                "plait": lambda tensor=tensor: group.reduce_gradients([tensor]),
            }
            times: dict[str, list[float]] = {one: [] for one in acts}
            repeats = max(1, min(100, (8 << 20) // size))
            for number in range(rounds + 1):
                for one, act in acts.items():
                    group.barrier("block", 1.0)
                    begun = time.perf_counter()
                    for _ in range(repeats):
                        act()
                    if number:
                        times[one].append((time.perf_counter() - begun) / repeats)
            for one, taken in times.items():
                of_socket = [raw / mine for raw, mine in zip(times["raw socket"], taken, strict=True)]
                middle = statistics.median(taken)
                rows.append(
                    {
                        "size": name,
                        "way": one,
                        "us": round(middle * 1e6, 1),
                        "gb_per_s": round(size / middle / 1e9, 3),
                        "of_raw_socket": round(statistics.median(of_socket), 3),
                    }
                )
    return rows


# ---- processes


def worker(rank: int, ports: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    roles = [Role(index=rank, workers=WORKERS, master=f"127.0.0.1:{port}") for port in ports]
    group = Collective(roles[0], Distributed(timeout=120))
    local = Collective(roles[1], Distributed(timeout=120, local_sgd=EVERY))
    policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
    found = {
        "batch_scheduling": policy is not None and policy == getattr(os, "SCHED_BATCH", None),
        "training": [row for model in MODELS for row in train(model, rounds, group, local)],
        "bandwidth": bandwidth(rounds, group),
    }
    local.close()
    group.close()
    if rank == 0:
        print(json.dumps(found))


def measure(rounds: int) -> dict[str, Any]:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (one, other)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rounds", str(rounds), "--ports", *map(str, ports), "--worker"]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=environment, text=True)
        for rank in range(WORKERS)
    ]
    try:
        outputs = [process.communicate(timeout=3600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise SystemExit("a worker failed")
    found: dict[str, Any] = json.loads(outputs[0])
    return found


def show(found: dict[str, Any]) -> None:
    console = Console(width=110)
    table = Table("network", "way", title="Two workers, one thread each")
    for heading in ("samples/s", "of none", "of DDP", "CPU ms a step", "of none"):
        table.add_column(heading, justify="right")
    for row in found["training"]:
        figures = f"{row['samples_per_s']:.0f}", f"{row['of_no_communication']:.3f}", f"{row['of_ddp']:.3f}"
        work = f"{row['cpu_ms_per_step']:.2f}", f"{row['cpu_of_no_communication']:.3f}"
        table.add_row(row["model"], row["way"], *figures, *work)
    console.print(table)
    table = Table("size", "way", title="A mean over two workers, and a one-way push over loopback")
    for heading in ("us", "GB/s", "of raw socket"):
        table.add_column(heading, justify="right")
    for row in found["bandwidth"]:
        table.add_row(
            row["size"], row["way"], f"{row['us']:.0f}", f"{row['gb_per_s']:.2f}", f"{row['of_raw_socket']:.2f}"
        )
    console.print(table)
    rows = {row["way"]: row for row in found["training"] if row["model"].startswith("ResNet")}
    for name, needed in NEEDED.items():
        got = rows["plait"]["of_ddp"] if name == "plait / DDP" else rows[name]["of_no_communication"]
        console.print(f"{name}: {got:.3f}, needed {needed}: {'reached' if got >= needed else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker, arguments.ports, arguments.rounds)
        return
    found = measure(arguments.rounds)
    show(found)
    head = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "cpus": os.cpu_count()}
    write_atomic(RESULT, json.dumps({**head, "rounds": arguments.rounds, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
