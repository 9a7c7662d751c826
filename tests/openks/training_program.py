"""A process of a cluster under test: `python training_program.py JSON`. Workers leave worker-N.json in `here`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from plait import openks
from plait.errors import OutOfRangeError

ROWS = 12
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.003, eps=1e-4),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


class Net(nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=sparse)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.double()

    def forward(self, ids):
        return self.body(self.table(ids).sum(1))


def net(seed, *, sparse):
    torch.manual_seed(seed)
    return Net(sparse=sparse)


def batch(step):
    ids = torch.randint(0, 20, (ROWS, 3), generator=torch.Generator().manual_seed(step))
    return ids, (ids.double() / 3).sin().sum(1, keepdim=True).expand(-1, 3)


def loss_of(model, step, part=slice(None)):
    ids, y = batch(step)
    return functional.mse_loss(model(ids[part]), y[part])


def train(given, algorithm, model, optimizer):
    part = slice(algorithm.worker_index(), None, algorithm.worker_num())
    begin, losses = given["start"], []
    if given["kill"] is not None and any(Path(given["save"]).glob("ckpt-*")):
        begin = algorithm.load_persistables(None, given["save"])
    for step in range(begin, given["start"] + given["steps"]):
        if given["kill"] == [algorithm.worker_index(), step] and os.environ["PLAIT_RESTART"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = loss_of(model, step, part)
        optimizer.minimize(loss)
        losses.append(loss.item())
        if given["kill"] is not None and step % 10 == 9:
            algorithm.save_persistables(None, given["save"])
    return losses


def talk(algorithm):
    total = [0, 0.0]
    algorithm.all_reduce_worker([algorithm.worker_index() + 1, 0.5], total)
    algorithm.barrier_workers()
    return [total, algorithm.split_files(["a", "b", "c"])]


def one_more(algorithm, model, optimizer):
    """The first worker goes on alone: what it hears, and whether its variables stayed."""
    before = model.body[0].weight.detach().clone()
    try:
        optimizer.minimize(loss_of(model, 0))
    except OutOfRangeError as error:
        return [str(error), torch.equal(model.body[0].weight, before)]
    return ["nothing", False]


def main():
    given = json.loads(sys.argv[1])
    algorithm = openks.KSDistributedFactory.instantiation(given["flag"])
    algorithm.init(openks.PaddleCloudRoleMaker(is_collective=bool(given["flag"])))
    model = net(algorithm.worker_index(), sparse=given["flag"] == 0)
    optimizer = algorithm.distributed_optimizer(
        OPTIMIZERS[given["optimizer"]](model.parameters()), {"timeout": 20.0, **given["strategy"]}, module=model
    )
    if algorithm.is_server():
        algorithm.init_server(given["model_dir"])
        algorithm.run_server()
        return
    algorithm.init_worker()
    found = {"losses": train(given, algorithm, model, optimizer), "talk": talk(algorithm)}
    algorithm.save_persistables(None, given["save"])
    found["targets"] = algorithm.save_inference_model(None, given["save"] + "-export", ["ids"], None)
    if given["uneven"] and algorithm.is_first_worker():
        found["left"] = one_more(algorithm, model, optimizer)
    algorithm.stop_worker()
    Path(given["here"], f"worker-{algorithm.worker_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
