"""Workers without servers: each computes on batches of its own, and all take the step of the mean gradient.

    python examples/openks/collective.py [DIR]
    plait launch --workers 2 examples/openks/collective.py [DIR]

With DIR, the first worker leaves the trained network there, for `torch.export.load`.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

from plait import openks

STEPS, BATCH = 300, 128


def batches(worker):
    """Points of 32 numbers; the class is whether the first two have the same sign."""
    generator = torch.Generator().manual_seed(worker)
    while True:
        x = torch.randn(BATCH, 32, generator=generator)
        yield x, (x[:, 0] * x[:, 1] > 0).long()


def network():
    return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2))


def main():
    algorithm = openks.KSDistributedFactory.instantiation(1)
    algorithm.init(openks.PaddleCloudRoleMaker(is_collective=True))
    model = network()  # every worker draws its own start: the first one's counts
    adam = torch.optim.Adam(model.parameters(), lr=0.005)
    optimizer = algorithm.distributed_optimizer(adam, module=model)  # here the workers meet

    data = batches(algorithm.worker_index())
    for step in range(STEPS):
        x, y = next(data)
        cost = functional.cross_entropy(model(x), y)
        optimizer.minimize(cost)
        if step % 100 == 0:
            print(f"worker_index: {algorithm.worker_index()}, step: {step}, cost: {cost.item():.4f}", flush=True)

    if algorithm.is_first_worker():
        x, y = next(batches(worker=1000))
        print(f"{(model(x).argmax(1) == y).float().mean():.3f} of {BATCH} new points are right")
        if sys.argv[1:]:
            algorithm.save_inference_model(None, sys.argv[1], ["input"], None)
    algorithm.stop_worker()


if __name__ == "__main__":
    main()
