"""The split step by hand, as calls: plain gRPC, one unary call a step, mutual TLS; tensors as their bytes.

The follower calls with what it has computed; the answer is its gradient. `python bare_calls.py SHAPE leader|follower
PORT CERTIFICATES`
"""

from __future__ import annotations

import itertools
import queue
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bare_grpc
import certificates
import grpc
import split
from torch.nn import functional as F

import torch

SECONDS = 600
"""For how long a call may take: between two blocks of steps, the leader is told nothing for a while."""


def lead(shape: split.Shape, port: int, directory: Path) -> None:
    hidden: queue.SimpleQueue = queue.SimpleQueue()
    gradients: queue.SimpleQueue = queue.SimpleQueue()

    def handler(request: bytes, context: grpc.ServicerContext) -> bytes:
        hidden.put(request)
        return gradients.get()

    ca, key, certificate = certificates.read(directory, "leader")
    server = grpc.server(ThreadPoolExecutor(2), options=bare_grpc.OPTIONS)
    methods = {bare_grpc.METHOD: grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(bare_grpc.SERVICE, methods)])
    server.add_secure_port(
        f"127.0.0.1:{port}", grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    )
    server.start()
    own, head = split.half(shape, "leader"), split.head(shape)
    optimizer = split.sgd(own, head)
    batches = itertools.cycle(zip(split.features(shape, "leader"), split.labels(shape), strict=True))

    def step() -> float:
        x, y = next(batches)
        mine = own(x)
        theirs = bare_grpc.unpack(hidden.get(timeout=60), shape).requires_grad_()
        # the gradient leaves before the rest of the backward pass
        theirs.register_post_accumulate_grad_hook(lambda leaf: gradients.put(bare_grpc.pack(leaf.grad)))
        loss = F.cross_entropy(head(torch.cat([mine, theirs], 1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    split.obey(step)
    gradients.put(b"")
    server.stop(1).wait(5)


def follow(shape: split.Shape, port: int, directory: Path) -> None:
    own = split.half(shape, "follower")
    optimizer = split.sgd(own)
    ca, key, certificate = certificates.read(directory, "follower")
    secrets = grpc.ssl_channel_credentials(ca, key, certificate)
    with grpc.secure_channel(f"localhost:{port}", secrets, bare_grpc.OPTIONS) as channel:
        call = channel.unary_unary(f"/{bare_grpc.SERVICE}/{bare_grpc.METHOD}")
        for x in itertools.cycle(split.features(shape, "follower")):
            hidden = own(x)
            try:
                answer = call(bare_grpc.pack(hidden.detach()), wait_for_ready=True, timeout=SECONDS)
            except grpc.RpcError:
                return
            if not answer:
                return
            optimizer.zero_grad()
            hidden.backward(bare_grpc.unpack(answer, shape))
            optimizer.step()


if __name__ == "__main__":
    split.prepare()
    act = {"leader": lead, "follower": follow}[sys.argv[2]]
    act(split.SHAPES[sys.argv[1]], int(sys.argv[3]), Path(sys.argv[4]))
