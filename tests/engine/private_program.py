"""A worker that trains privately: `private_program.py OUT NOISE ROWS MODE [CHECKPOINTS STEPS]`."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import efl
from plait.data import TensorSource

JOINED, CLIP = 16, 0.5
"""Rows of all workers' batches together; the limit."""


def net_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 3))


def make(workers: int, noise: float, rows: int, *, constant: bool = False) -> efl.Model:
    """`constant`: losses that move nothing, at a rate of 1: what moves is the noise alone."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    model = efl.Model()
    model.net = net_of()
    source = TensorSource({"x": x, "y": y}, JOINED // workers, shuffle=True, seed=5, num_epochs=2)
    model.input_fn(lambda model, mode: source)

    def losses(model: efl.Model, sample: plait.data.Sample) -> torch.Tensor:
        found = F.cross_entropy(model.net(sample["x"]), sample["y"], reduction="none")
        return found * 0 if constant else found

    model.loss_fn(losses)
    factory = functools.partial(torch.optim.SGD, lr=1.0 if constant else 0.5)
    opt = efl.privacy.make_private(factory, CLIP, noise, seed=9, accountant="rdp")
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(opt))
    return model


def main(out: str, noise: str, rows: str, mode: str, checkpoints: str = "", steps: str = "") -> None:
    role = plait.cluster.find_role()
    model = make(role.workers, float(noise), int(rows), constant=bool(steps) and not checkpoints)
    model.compile(strategy=plait.cluster.Distributed(mode=mode))
    limit = int(steps) if steps else None
    model.fit(efl.procedure_fn.train(limit), checkpoint_dir=checkpoints or None)
    found = {
        "weights": [value.detach().flatten().tolist() for value in model.net.parameters()],
        "epsilon": model.privacy.epsilon(exact=True),
        "step": model.private_state.step,
    }
    Path(out, f"{role.index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
