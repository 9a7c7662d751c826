"""A cluster in one process: the server in its thread, one worker in the test's own."""

from __future__ import annotations

import contextlib
import functools

import torch

import plait
from plait import efl
from plait.cluster.ps import server
from plait.cluster.ps.strategy import Served
from plait.cluster.roles import Role
from plait.cluster.settings import Distributed
from plait.engine.stage import train_loop


@contextlib.contextmanager
def servers(count=1):
    """So many servers, and the role of the one worker."""
    services = []
    try:
        endpoints = []
        for index in range(count):
            role = Role(kind="server", index=index, workers=1, servers=count, server_endpoints=fake(count))
            started = server.Server(role)
            service = server.Service("127.0.0.1:0", started.handle, tick=started.tick)
            started.stop = service.stop
            service.start()
            services.append(service)
            endpoints.append(service.endpoint)
        yield Role(workers=1, servers=count, server_endpoints=tuple(endpoints))
    finally:
        for service in services:
            service.stop()


def fake(count):
    return tuple(f"127.0.0.1:{9000 + n}" for n in range(count))


@contextlib.contextmanager
def worker(role, **settings):
    strategy = Served(role, Distributed(timeout=10.0, **settings))
    try:
        yield strategy
    finally:
        strategy.close()


def words(rows=96):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 12, (rows, 2), generator=generator)
    return {"x": x, "ids": ids, "y": x.sum(1) + ids.sum(1) * 0.1}


def make_model(strategy, optimizer=None, *, embedding=None, batch_size=16):
    """A linear model over a few numbers and two words; compiled."""
    torch.manual_seed(0)
    model = efl.Model()
    model.words = embedding or torch.nn.Embedding(12, 3, sparse=True, dtype=torch.float64)
    model.out = torch.nn.Linear(10, 1, dtype=torch.float64)
    model.input_fn(lambda model, mode: plait.data.TensorSource(words(), batch_size, shuffle=True))

    def loss_fn(model, sample):
        joined = torch.cat([model.words(sample["ids"]).flatten(1), sample["x"]], 1)
        return ((model.out(joined)[:, 0] - sample["y"]) ** 2).mean()

    model.loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(optimizer or functools.partial(torch.optim.SGD, lr=0.05)))
    model.compile(strategy=strategy)
    return model


def train(model, steps, **fit):
    model.fit(lambda model: model.run_stage("train", train_loop(model, None, step=steps, across_passes=True)), **fit)
    return {name: value.detach().clone() for name, value in model.variables().items()}


def far(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].numel())
