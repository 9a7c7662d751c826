"""A parameter server against the same model trained locally in plain PyTorch: one run, one core for each process.

26 slots of 16 numbers, a vocabulary of 100,000, 13 dense features, an MLP 429-128-64-1, SGD, batches of 512. The worker
alternates blocks of local, asynchronous and synchronous steps; a server for each mode shares the other core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "parameter_server.json"
SLOTS, DIM, WORDS, DENSE, BATCH, BATCHES = 26, 16, 100_000, 13, 512, 100


def pin(core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[min(core, len(cores) - 1)]})


def role(kind: str, endpoint: str):
    from plait.cluster.roles import Role

    return Role(kind=kind, workers=1, servers=1, server_endpoints=(endpoint,), source="the benchmark")


def serve(endpoint: str) -> None:
    import torch

    from plait.cluster.ps.server import serve

    pin(0)
    torch.set_num_threads(1)
    serve(role("server", endpoint))


def cpu_seconds(pids) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def net():
    import torch

    torch.manual_seed(0)
    embedding = torch.nn.Embedding(WORDS, DIM, sparse=True)
    mlp = torch.nn.Sequential(
        torch.nn.Linear(SLOTS * DIM + DENSE, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 1),
    )
    return embedding, mlp


def loss_of(embedding, mlp, ids, dense, labels):
    import torch

    joined = torch.cat([embedding(ids).flatten(1), dense], 1)
    return torch.nn.functional.binary_cross_entropy_with_logits(mlp(joined), labels)


def data():
    import torch

    generator = torch.Generator().manual_seed(1)
    rows = BATCH * BATCHES
    return {
        "ids": torch.randint(0, WORDS, (rows, SLOTS), generator=generator),
        "dense": torch.randn(rows, DENSE, generator=generator),
        "labels": torch.rand(rows, 1, generator=generator).round(),
    }


def local(fields):
    import torch

    embedding, mlp = net()
    optimizer = torch.optim.SGD([*embedding.parameters(), *mlp.parameters()], lr=0.1)
    batches = [{name: value[n * BATCH : (n + 1) * BATCH] for name, value in fields.items()} for n in range(BATCHES)]
    done = 0

    def steps(count: int) -> None:
        nonlocal done
        for _ in range(count):
            batch = batches[done % BATCHES]
            optimizer.zero_grad()
            loss = loss_of(embedding, mlp, batch["ids"], batch["dense"], batch["labels"])
            loss.backward()
            optimizer.step()
            done += 1

    return steps


def served(fields, endpoint: str, mode: str):
    import torch

    import plait
    from plait import efl
    from plait.cluster.connect import strategy_of
    from plait.errors import OutOfRangeError

    model = efl.Model()
    model.embedding, model.mlp = net()
    model.input_fn(lambda model, mode: plait.data.TensorSource(fields, BATCH))
    model.loss_fn(lambda model, s: loss_of(model.embedding, model.mlp, s["ids"], s["dense"], s["labels"]))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda params: torch.optim.SGD(params, lr=0.1)))
    model.compile(strategy=strategy_of(role("worker", endpoint), plait.cluster.Distributed(mode=mode)))
    session, step = plait.Session(model), model.train_op()

    def steps(count: int) -> None:
        made = 0
        while made < count:
            try:
                session.run(step)
                made += 1
            except OutOfRangeError:
                pass
        model.strategy.settle_pushes()

    return steps


def work(endpoints: dict, pids: dict, rounds: int, count: int) -> dict:
    import torch

    pin(1)
    torch.set_num_threads(1)
    fields = data()
    ways = {"local": local(fields)} | {mode: served(fields, endpoints[mode], mode) for mode in endpoints}
    for steps in ways.values():
        steps(30)
    wall = {name: [] for name in ways}
    cpu = {name: [] for name in ways}
    for number in range(rounds):
        order = list(ways) if number % 2 == 0 else list(ways)[::-1]
        for name in order:
            watched = [os.getpid(), *pids.values()]
            before, begun = cpu_seconds(watched), time.perf_counter()
            ways[name](count)
            wall[name].append((time.perf_counter() - begun) / count)
            cpu[name].append((cpu_seconds(watched) - before) / count)
    return {"wall": wall, "cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="plait-") as sockets:
        os.environ["PLAIT_SOCKETS"] = sockets
        endpoints = {"async": "127.0.0.1:7001", "sync": "127.0.0.1:7002"}
        servers = {
            mode: subprocess.Popen([sys.executable, __file__, "--serve", endpoint])
            for mode, endpoint in endpoints.items()
        }
        try:
            pids = {mode: process.pid for mode, process in servers.items()}
            found = work(endpoints, pids, arguments.rounds, arguments.steps)
        finally:
            for process in servers.values():
                process.terminate()
                process.wait()
    report(found, arguments)


def report(found, arguments) -> None:
    wall, cpu = found["wall"], found["cpu"]
    rows = []
    print(f"{'':<8}{'ms a step':>11}{'examples/s':>12}{'of local':>10}{'CPU ms, all':>13}{'of local':>10}")
    for name in wall:
        speed = statistics.median(a / b for a, b in zip(wall["local"], wall[name], strict=True))
        cost = statistics.median(b / a for a, b in zip(cpu["local"], cpu[name], strict=True))
        ms, cpu_ms = statistics.median(wall[name]) * 1e3, statistics.median(cpu[name]) * 1e3
        print(f"{name:<8}{ms:>11.2f}{BATCH / ms * 1e3:>12,.0f}{speed:>10.2f}{cpu_ms:>13.2f}{cost:>10.2f}")
        rows.append({"way": name, "ms": ms, "speed_of_local": speed, "cpu_ms": cpu_ms, "cpu_of_local": cost})
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "ways": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
