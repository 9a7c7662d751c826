"""Parameter servers: rows of embeddings and all other variables are on servers, which workers send gradients to.

    python examples/openks/parameter_server.py [DIR]
    plait launch --workers 2 --servers 1 examples/openks/parameter_server.py [DIR]

With DIR, variables and optimizer state are saved there; a server may begin with them: `init_server(DIR)`.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

from plait import openks

FILES = [f"day-{number}" for number in range(8)]
WORDS, SLOTS = 100, 5


def read(file):
    """Twenty-five batches of ids; every id is for or against, and a line's ids vote."""
    generator = torch.Generator().manual_seed(FILES.index(file))
    for _ in range(25):
        ids = torch.randint(0, WORDS, (128, SLOTS), generator=generator)
        yield ids, ((ids % 2 * 2 - 1).sum(1) > 0).float()


class Votes(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, 8, sparse=True)  # its rows are on the servers
        nn.init.normal_(self.table.weight, std=0.1)
        self.head = nn.Linear(8, 1)

    def forward(self, ids):
        return self.head(self.table(ids).sum(1)).squeeze(1)


def train(algorithm, model, optimizer):
    step = 0
    for file in algorithm.split_files(FILES):
        for ids, label in read(file):
            cost = functional.binary_cross_entropy_with_logits(model(ids), label)
            optimizer.minimize(cost)  # gradients go to the servers, variables come back
            if step % 25 == 0:
                print(f"worker_index: {algorithm.worker_index()}, step: {step}, cost: {cost.item():.4f}", flush=True)
            step += 1


def main():
    algorithm = openks.KSDistributedFactory.instantiation(0)
    algorithm.init(openks.PaddleCloudRoleMaker())
    model = Votes()
    sgd = torch.optim.SGD(model.parameters(), lr=4.0)
    optimizer = algorithm.distributed_optimizer(sgd, openks.SyncModeConfig(), module=model)

    if algorithm.is_server():
        algorithm.init_server()
        algorithm.run_server()  # until all workers have stopped
        return
    algorithm.init_worker()  # waits for the servers and the other workers
    train(algorithm, model, optimizer)
    if algorithm.is_first_worker():
        ids, label = next(iter(read(FILES[0])))
        with torch.no_grad():
            right = ((model(ids) > 0).float() == label).float().mean()
        print(f"{right:.3f} of {len(ids)} lines are right")
        if sys.argv[1:]:
            algorithm.save_persistables(None, sys.argv[1])
    algorithm.stop_worker()


if __name__ == "__main__":
    main()
