"""Requests to a parameter server, made by hand: nothing is sent."""

from __future__ import annotations

import torch

from plait.cluster.ps.server import Server
from plait.cluster.ps.spec import ModelSpec, OptimizerSpec, TableSpec, VariableSpec
from plait.cluster.roles import Role

DENSE = torch.tensor([1.0, 2.0, 3.0])
ROWS = torch.arange(8.0).view(4, 2)
SPEC = ModelSpec(
    optimizers=(OptimizerSpec(kind="SGD", options={"momentum": 0.0}),),
    variables=(VariableSpec(name="w", shape=(3,), dtype="float32", optimizer=0),),
    tables=(TableSpec(name="t", dim=2, dtype="float32", rows=4, optimizer=0),),
)


class Asked:
    """A request that keeps its answer."""

    def __init__(self, kind, tensors=(), **head):
        self.kind, self.head, self.tensors = kind, head, list(tensors)
        self.answered = False
        self.reply_head = self.text = self.code = None

    def reply(self, head=None, tensors=()):
        assert not self.answered, "answered twice"
        self.answered, self.reply_head, self.replied = True, head or {}, list(tensors)

    def refuse(self, text, code="refused"):
        assert not self.answered, "answered twice"
        self.answered, self.text, self.code = True, text, code


def ask(server, kind, tensors=(), **head):
    asked = Asked(kind, tensors, **head)
    server.handle(asked)
    return asked


def told(server, kind, tensors=(), **head):
    """The answer's head, of a request that is not refused."""
    asked = ask(server, kind, tensors, **head)
    assert asked.answered, f"{kind} is not answered"
    assert asked.text is None, asked.text
    return asked.reply_head


def bare(workers=2):
    """A server that knows of no model yet."""
    return Server(Role(kind="server", workers=workers, servers=1, server_endpoints=("127.0.0.1:1",)), timeout=9.0)


def begin(server, mode, generation=1, replicas=None, version=0, spec=SPEC, dense=DENSE):
    replicas = server.workers if replicas is None else replicas
    head = {"g": generation, "mode": mode, "replicas": replicas, "version": version, "spec": spec.to_json()}
    return ask(server, "begin", [dense.clone()], **head)


def made(mode="sync", workers=2, **settings):
    """A server that is ready to train."""
    server = bare(workers)
    assert begin(server, mode, **settings).text is None
    told(server, "rows", [torch.arange(4), ROWS], g=server.generation, table=0)
    told(server, "ready", g=server.generation)
    return server


def push(server, worker, step, gradient=(0.0, 0.0, 0.0), ids=(), rows=(), rate=0.1, **head):
    """Gradients of the variable, and of rows of the table."""
    tensors = [torch.tensor(gradient), torch.tensor(ids, dtype=torch.int64), torch.tensor(rows).view(len(ids), 2)]
    head = {"g": server.generation, "w": worker, "s": step, "p": [0], "r": [rate], "t": [0], **head}
    return ask(server, "push", tensors, **head)


def pull(server, ids, version=0, **head):
    return ask(server, "pull", [torch.tensor(ids)], **{"g": server.generation, "t": 0, "v": version, **head})


def dense(server):
    return server.shard.dense()[0]


def state(server):
    """All that a wrong message must not change."""
    held = [server._held, server._cut, dict(server._pushes), list(server._pulls), dict(server._joining), server._left]
    shard = None if server.shard is None else (dense(server).tolist(), server.shard.tables[0].pull(torch.arange(4)))
    facts = [server.mode, server.generation, server.broken, server.dropped, dict(server.last), server._ready]
    version = None if server.shard is None else server.shard.version
    return [*held, *facts, version, server._replicas, None if shard is None else (shard[0], shard[1].tolist())]
