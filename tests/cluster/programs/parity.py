"""Trains four tasks, each 200 steps: SGD and Adam, float64 and float32. `parity.py OUT MODE`."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from torch import nn

import plait
from plait import efl
from plait.engine.stage import train_loop

STEPS, ROWS, JOINED = 200, 640, 32
TASKS = {
    f"{name}_{str(dtype).removeprefix('torch.')}": (optimizer, dtype)
    for dtype in (torch.float64, torch.float32)
    for name, optimizer in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam))
}


class Net(nn.Module):
    """Large enough that a variable is cut between servers; the embedding is sparse where its optimizer can be."""

    def __init__(self, dtype: torch.dtype, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4, sparse=sparse, dtype=dtype)
        self.hidden = nn.Linear(20, 900, dtype=dtype)
        self.out = nn.Linear(900, 1, dtype=dtype)

    def forward(self, words: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.words(words).flatten(1), x], 1)
        return self.out(torch.tanh(self.hidden(joined)))[:, 0]


def make(workers: int) -> efl.Model:
    model = efl.Model()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)
    words = torch.randint(0, 50, (ROWS, 3), generator=generator)
    y = x.sum(1) + words.sum(1) * 0.1
    for task, (optimizer, dtype) in TASKS.items():
        torch.manual_seed(0)
        net = Net(dtype, sparse=optimizer is torch.optim.SGD)
        setattr(model, task, net)
        fields = {"x": x.to(dtype), "words": words, "y": y.to(dtype)}
        source = plait.data.TensorSource(fields, JOINED // workers, shuffle=True)
        model.input_fn(lambda model, mode, source=source: source, task=task)
        model.loss_fn(lambda model, s, net=net: ((net(s["words"], s["x"]) - s["y"]) ** 2).mean(), task=task)
        factory = lambda params, optimizer=optimizer: optimizer(params, lr=0.005)
        model.optimizer_fn(efl.optimizer_fn.scope_optimizer({task: factory}), task=task)
    return model


def main(out: str, mode: str) -> None:
    role = plait.cluster.find_role()
    model = make(role.workers)
    model.compile(strategy=plait.cluster.Distributed(mode=mode))

    def procedure(model: efl.Model) -> None:
        for task in TASKS:
            model.run_stage(task, train_loop(model, task, step=STEPS, across_passes=True))

    model.fit(procedure, log_step=1000)
    if role.is_chief:
        save_file({name: value.detach().clone() for name, value in model.variables().items()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
