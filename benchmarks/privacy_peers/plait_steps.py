"""A plain and a private step of plait, and one of bare torch beside them; see `nets.py` for what it answers."""

from __future__ import annotations

import functools
import logging

import nets
import torch
from torch import nn
from torch.nn import functional as F

from plait import Session
from plait.efl import Model, optimizer_fn
from plait.privacy.optimizers import make_private

ENOUGH = 200_000
SGD = functools.partial(torch.optim.SGD, lr=nets.RATE)


def made(net: nn.Module, batches, factory, reduction: str, device: str = "cpu"):
    """The step is that of training, from the read to the optimizer."""
    model = Model()
    model.net = net
    model.input_fn(lambda model, mode: batches * (ENOUGH // len(batches)))
    model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample[0]), sample[1], reduction=reduction))
    model.optimizer_fn(optimizer_fn.optimizer_setter(factory))
    model.compile(session_config={"device": device})
    session, op = Session(), model.train_op()
    session.__enter__()
    return model.net, functools.partial(session.run, op)


def plain(net: nn.Module, batches, noise: float, device: str = "cpu"):
    del noise
    return made(net, batches, SGD, "mean", device)


def private(net: nn.Module, batches, noise: float, device: str = "cpu"):
    return made(net, batches, make_private(SGD, nets.CLIP, noise, samples=nets.ROWS), "none", device)


WAYS = {"torch": nets.plain, "plait": plain, "plait private": private}


def main(more=None) -> None:
    logging.getLogger("plait").setLevel(logging.ERROR)
    nets.serve({**WAYS, **(more or {})})


if __name__ == "__main__":
    main()
