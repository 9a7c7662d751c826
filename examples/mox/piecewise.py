"""A learning rate written as a string: it rises in a straight line, then by equal factors, holds, and falls.

python examples/mox/piecewise.py --optimizer momentum
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import mox
from plait.mox import learning_rate_scheduler

NUM_SAMPLES, BATCH_SIZE = 640, 32
LR_STG = "5:0.1->0.4,10:0.4=>0.8,15:0.8,20:0.08"

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="sgd")
parser.add_argument("--momentum", type=float, default=0.9)
flags, _ = parser.parse_known_args()  # the others are plait's, such as --gradient_clip 1.0


def input_fn(mode, **kwargs):
    """Ready batches: `auto_batch=False`."""
    x = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    y = (x.square().sum(dim=1, keepdim=True) > 7).float()
    return plait.data.TensorSource((x, y), batch_size=BATCH_SIZE, shuffle=True)


def model_fn(inputs, mode, **kwargs):
    x, y = inputs
    hidden = plait.layer("hidden", nn.Linear, 8, 32)(x).tanh()
    loss = functional.binary_cross_entropy_with_logits(plait.layer("output", nn.Linear, 32, 1)(hidden), y)
    return mox.ModelSpec(loss=loss, log_info={"loss": loss})


def optimizer_fn():
    num_workers = len(mox.get_flag("worker_hosts").split(","))
    global_batch_size = BATCH_SIZE * num_workers if mox.get_flag("sync_replicas") else BATCH_SIZE
    lr = learning_rate_scheduler.piecewise_lr(LR_STG, num_samples=NUM_SAMPLES, global_batch_size=global_batch_size)
    if flags.optimizer == "sgd":
        opt = mox.get_optimizer_fn("sgd", learning_rate=lr)()
    elif flags.optimizer == "momentum":
        opt = mox.get_optimizer_fn("momentum", learning_rate=lr, momentum=flags.momentum)()
    elif flags.optimizer == "adam":
        opt = mox.get_optimizer_fn("adam", learning_rate=lr)()
    else:
        raise ValueError(f"Unsupported optimizer name: {flags.optimizer}")
    return opt


def main():
    schedule = learning_rate_scheduler.piecewise_lr(LR_STG, NUM_SAMPLES, BATCH_SIZE)
    for epoch in (0, 2.5, 5, 7.5, 10, 12.5, 15, 20):
        print(f"epoch {epoch:>4}: {schedule(int(epoch * NUM_SAMPLES / BATCH_SIZE)):.4f}")
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        optimizer_fn=optimizer_fn,
        run_mode=mox.ModeKeys.TRAIN,
        batch_size=BATCH_SIZE,
        auto_batch=False,
        max_number_of_steps=20 * NUM_SAMPLES // BATCH_SIZE,
        log_every_n_steps=100,
    )


if __name__ == "__main__":
    main()
