"""The split step as a Flower app: the server is the leader, one client the follower. `flower.py` runs it.

One message a step: it takes the last step's gradient to the follower and brings the next output of its half back. A
client's process lives for one message, so that the follower keeps its weights in Flower's state and runs its forward
pass anew before its backward pass.
"""

from __future__ import annotations

import itertools
import time

import split
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch.nn import functional as F

client = ClientApp()
server = ServerApp()


@client.query()
def follow(message: Message, context: Context) -> Message:
    split.prepare()
    shape = split.SHAPES[context.run_config["shape"]]
    own, rows = split.half(shape, "follower"), split.features(shape, "follower")
    number = message.content["step"]["number"]
    if "own" in context.state:
        own.load_state_dict(context.state["own"].to_torch_state_dict())
    if number:
        gradient = torch.from_numpy(message.content["gradient"]["of"].numpy())
        optimizer = split.sgd(own)
        own(rows[(number - 1) % len(rows)]).backward(gradient)
        optimizer.step()
    context.state["own"] = ArrayRecord(own.state_dict())
    with torch.no_grad():
        hidden = own(rows[number % len(rows)])
    content = RecordDict({"hidden": ArrayRecord({"of": Array(hidden.numpy())})})
    return Message(content, reply_to=message)


@server.main()
def lead(grid: Grid, context: Context) -> None:
    split.prepare()
    shape, steps = split.SHAPES[context.run_config["shape"]], int(context.run_config["steps"])
    own, head = split.half(shape, "leader"), split.head(shape)
    optimizer = split.sgd(own, head)
    batches = itertools.cycle(zip(split.features(shape, "leader"), split.labels(shape), strict=True))
    numbers, gradient = itertools.count(), None
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)

    def step() -> float:
        nonlocal gradient
        content = RecordDict({"step": ConfigRecord({"number": next(numbers)})})
        if gradient is not None:
            content["gradient"] = ArrayRecord({"of": Array(gradient.numpy())})
        (reply,) = grid.send_and_receive([Message(content, nodes[0], "query")])
        x, y = next(batches)
        theirs = torch.from_numpy(reply.content["hidden"]["of"].numpy().copy()).requires_grad_()
        loss = F.cross_entropy(head(torch.cat([own(x), theirs], 1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gradient = theirs.grad
        return loss.item()

    step()
    split.save(context.run_config["result"], split.timed(step, steps))
