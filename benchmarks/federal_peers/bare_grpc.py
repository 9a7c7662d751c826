"""The split step by hand: plain gRPC, one stream both ways, mutual TLS; tensors as their bytes and nothing around them.

The follower dials and its stream is one call. `python bare_grpc.py SHAPE leader|follower PORT CERTIFICATES`
"""

from __future__ import annotations

import itertools
import queue
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import certificates
import grpc
import split
import torch
from torch import Tensor
from torch.nn import functional as F

SERVICE, METHOD = "split", "exchange"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def pack(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def unpack(data: bytes, shape: split.Shape) -> Tensor:
    return torch.frombuffer(data, dtype=torch.float32).view(shape.batch, shape.width)


def serve(handler, port: int, directory: Path) -> grpc.Server:
    ca, key, certificate = certificates.read(directory, "leader")
    server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
    methods = {METHOD: grpc.stream_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
    secrets = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    server.add_secure_port(f"127.0.0.1:{port}", secrets)
    server.start()
    return server


def dial(requests, port: int, directory: Path):
    ca, key, certificate = certificates.read(directory, "follower")
    channel = grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(ca, key, certificate), OPTIONS)
    return channel, channel.stream_stream(f"/{SERVICE}/{METHOD}")(requests, wait_for_ready=True, timeout=3600)


def lead(shape: split.Shape, port: int, directory: Path) -> None:
    streams: queue.SimpleQueue = queue.SimpleQueue()
    outgoing: queue.SimpleQueue = queue.SimpleQueue()

    def handler(requests, context):
        streams.put(requests)
        return iter(outgoing.get, None)

    server = serve(handler, port, directory)
    own, head = split.half(shape, "leader"), split.head(shape)
    optimizer = split.sgd(own, head)
    batches = itertools.cycle(zip(split.features(shape, "leader"), split.labels(shape), strict=True))
    incoming = streams.get(timeout=60)

    def step() -> float:
        x, y = next(batches)
        mine = own(x)
        theirs = unpack(next(incoming), shape).requires_grad_()
        # the gradient leaves before the rest of the backward pass
        theirs.register_post_accumulate_grad_hook(lambda leaf: outgoing.put(pack(leaf.grad)))
        loss = F.cross_entropy(head(torch.cat([mine, theirs], 1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    split.obey(step)
    outgoing.put(None)
    server.stop(1).wait(5)


def follow(shape: split.Shape, port: int, directory: Path) -> None:
    outgoing: queue.SimpleQueue = queue.SimpleQueue()
    own = split.half(shape, "follower")
    optimizer = split.sgd(own)
    channel, incoming = dial(iter(outgoing.get, None), port, directory)
    for x in itertools.cycle(split.features(shape, "follower")):
        hidden = own(x)
        outgoing.put(pack(hidden.detach()))
        try:
            gradient = unpack(next(incoming), shape)
        except (StopIteration, grpc.RpcError):
            break
        optimizer.zero_grad()
        hidden.backward(gradient)
        optimizer.step()
    outgoing.put(None)
    channel.close()


if __name__ == "__main__":
    split.prepare()
    act = {"leader": lead, "follower": follow}[sys.argv[2]]
    act(split.SHAPES[sys.argv[1]], int(sys.argv[3]), Path(sys.argv[4]))
