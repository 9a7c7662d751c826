"""The split step that every way of this folder makes: its sizes, networks and data, and how a way is told to run steps.

Imports nothing but torch, so that it runs in the peers' environments too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

BATCHES = 20
RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Shape:
    """Each party: inputs -> width and a ReLU. The leader joins both: 2 x width (-> hidden, ReLU) -> 10 logits."""

    batch: int
    inputs: int
    width: int
    hidden: int = 0


SHAPES = {"peers": Shape(256, 392, 128), "issue": Shape(1024, 392, 256, 64), "tiny": Shape(16, 32, 16)}
"""What the peers are compared with; what samples/s are counted with; tensors of 1 KB."""


def half(shape: Shape, role: str) -> nn.Module:
    torch.manual_seed({"leader": 1, "follower": 2}[role])
    return nn.Sequential(nn.Linear(shape.inputs, shape.width), nn.ReLU())


def head(shape: Shape) -> nn.Module:
    torch.manual_seed(3)
    if not shape.hidden:
        return nn.Linear(2 * shape.width, 10)
    return nn.Sequential(nn.Linear(2 * shape.width, shape.hidden), nn.ReLU(), nn.Linear(shape.hidden, 10))


def features(shape: Shape, role: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed({"leader": 11, "follower": 12}[role])
    return [torch.randn(shape.batch, shape.inputs, generator=generator) for _ in range(BATCHES)]


def labels(shape: Shape) -> list[Tensor]:
    generator = torch.Generator().manual_seed(13)
    return [torch.randint(0, 10, (shape.batch,), generator=generator) for _ in range(BATCHES)]


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for module in modules for one in module.parameters()], lr=RATE)


def prepare() -> None:
    """One thread, on the core that PLAIT_BENCH_CORE names, if any."""
    torch.set_num_threads(1)
    if core := os.environ.get("PLAIT_BENCH_CORE"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(core)]})


class Clock:
    """The seconds of each step since the last reset, and those of this process's CPU."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.taken: list[float] = []
        self.used = time.process_time()
        self.before = time.perf_counter()

    def tick(self) -> int:
        now = time.perf_counter()
        self.taken.append(now - self.before)
        self.before = now
        return len(self.taken)

    def figures(self, loss: float) -> str:
        return json.dumps({"seconds": self.taken, "cpu": time.process_time() - self.used, "loss": loss})


def timed(step: Callable[[], float], count: int) -> str:
    clock = Clock()
    for _ in range(count):
        loss = step()
        clock.tick()
    return clock.figures(loss)


def obey(step: Callable[[], float]) -> None:
    """Say that this is ready; for each line of standard input run so many steps and say how long they took."""
    print("ready", flush=True)
    for line in sys.stdin:
        step()  # what the other party has done ahead during the pause is not counted
        print(timed(step, int(line)), flush=True)


def save(path: str, figures: str) -> None:
    """At once and whole: somebody waits for this file."""
    new = Path(path).with_suffix(".new")
    new.write_text(figures)
    new.replace(path)
