"""What every way to train has in common: networks, batches, one plain step, and blocks of steps that are asked for.

A script serves lines of JSON: {"net": ..., "way": ..., "steps": n} is answered with the CPU and wall seconds of a step,
{"net": ..., "way": ..., "update": FILE} with the weights after one step without noise, in FILE.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, CLIP, NOISE, RATE = 256, 1.0, 1.0, 0.05
ROWS = 60_000
NETS = {"mlp": "MLP 784-256-256-10", "cnn": "CNN of two convolutions"}

Step = Callable[[], object]
Make = Callable[[nn.Module, list[tuple[Tensor, Tensor]], float], tuple[nn.Module, Step]]
"""Of a network, batches and the noise multiplier: the network that moves, and what makes one step."""


def make_net(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "mlp":
            return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        return nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )


def make_batches(name: str, count: int = 8, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    seed = torch.Generator().manual_seed(1)
    shape = (784,) if name == "mlp" else (1, 28, 28)
    return [
        (
            torch.rand(BATCH, *shape, generator=seed).to(device),
            torch.randint(10, (BATCH,), generator=seed).to(device),
        )
        for _ in range(count)
    ]


def plain(net: nn.Module, batches: list[tuple[Tensor, Tensor]], noise: float) -> tuple[nn.Module, Step]:
    del noise
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    turn = turns(batches)

    def step() -> None:
        x, y = turn()
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return net, step


def turns(batches: list[Any]) -> Callable[[], Any]:
    number = -1

    def turn() -> Any:
        nonlocal number
        number = (number + 1) % len(batches)
        return batches[number]

    return turn


def weights(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().cpu() for parameter in net.parameters()])


def serve(ways: dict[str, Make]) -> None:
    torch.set_num_threads(1)
    made: dict[tuple[str, str], Step] = {}
    print(json.dumps({"ready": list(ways)}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        key = asked["net"], asked["way"]
        if "update" in asked:
            net, step = ways[key[1]](make_net(key[0]), make_batches(key[0]), 0.0)
            step()
            torch.save(weights(net), asked["update"])
            answer: dict[str, Any] = {}
        else:
            if key not in made:
                made[key] = ways[key[1]](make_net(key[0]), make_batches(key[0]), NOISE)[1]
                for _ in range(3):
                    made[key]()
            step = made[key]
            for _ in range(max(1, asked["steps"] // 10)):  # what ran before has left its memory behind
                step()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(asked["steps"]):
                step()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            answer = {"cpu": cpu / asked["steps"], "wall": wall / asked["steps"]}
        print(json.dumps(answer), flush=True)
