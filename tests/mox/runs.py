"""Small runs of `mox.run` and the same by hand, for the tests beside this file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import mox
from plait.engine.build import current_model

TRAIN, EVAL, PREDICT, EXPORT = (getattr(mox.ModeKeys, name) for name in ("TRAIN", "EVAL", "PREDICT", "EXPORT"))
X = torch.linspace(-1, 1, 40).reshape(20, 2)
Y = (torch.arange(20) % 3).float()
SAMPLES = [(X[i], Y[i]) for i in range(20)]
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)]
SGD = mox.get_optimizer_fn("sgd", learning_rate=0.1)


def model_fn(inputs, mode, **kwargs):
    x, y = inputs
    out = plait.layer("fc", nn.Linear, 2, 1)(x).squeeze(1)
    loss = F.mse_loss(out, y)
    return mox.ModelSpec(loss=loss, log_info={"loss": loss, "bias": out.mean()}, output_info={"out": out, "y": y})


def run(mode=TRAIN, data=SAMPLES, model_fn=model_fn, **settings):
    """`mox.run` with the usual settings; returns the model."""
    settings = {"input_fn": lambda mode: data, "batch_size": 4, "optimizer_fn": SGD, **settings}
    mox.run(model_fn=model_fn, run_mode=mode, **settings)
    return current_model()


def weights(model):
    return {name: value.detach().clone() for name, value in model.variables().items()}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("step: ")]


def by_hand(steps, *, change=lambda parameters: None, scale=1.0, lr=0.1):
    """The same training without plait; starts from the same variables."""
    net = nn.Linear(2, 1)
    net.load_state_dict({name.removeprefix("fc/"): value for name, value in fresh().items()})
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for step in range(steps):
        x, y = BATCHES[step % 5]
        optimizer.zero_grad()
        loss = F.mse_loss(net(x).squeeze(1), y)
        (loss * scale).backward()
        for parameter in net.parameters():
            parameter.grad /= scale
        change(list(net.parameters()))
        optimizer.step()
    return {f"fc/{name}": value.detach() for name, value in net.named_parameters()}


def fresh():
    """The variables before the first step."""
    model = plait.Model()
    with model.scope():
        plait.layer("fc", nn.Linear, 2, 1)
    return weights(model)
