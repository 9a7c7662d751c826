"""Handwritten digits, by halves, with differential privacy in both parties; the leader has left halves and labels.

    plait federate examples/federal/private_digits/leader.py examples/federal/private_digits/follower.py

The loss is one number a picture. Each picture's gradient is clipped, and the sum of a batch gets noise, in each party;
the gradients that go back to the follower are clipped and noised row by row.
"""

from __future__ import annotations

import functools

import common
import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl


def input_fn(args, model, mode):
    return common.source("left", args, mode)


def logits_of(model, sample, require_grad):
    left = plait.layer("left", nn.Linear, 392, common.WIDTH)(sample.half).tanh()
    right = model.recv("right", require_grad=require_grad)
    return plait.layer("output", nn.Linear, 2 * common.WIDTH, 10)(torch.cat([left, right], dim=1))


def loss_fn(model, sample):
    return functional.cross_entropy(logits_of(model, sample, require_grad=True), sample.digit, reduction="none")


def eval_fn(model, sample):
    logits = logits_of(model, sample, require_grad=False)
    model.add_metric("accuracy", efl.metrics.accuracy(sample.digit, logits))


def main():
    args = common.arguments(__doc__.partition("\n")[0])
    model = efl.FederalModel(sample_id="id", seed=args.seed)
    model.input_fn(functools.partial(input_fn, args)).loss_fn(loss_fn).eval_fn(eval_fn)
    model.optimizer_fn(common.optimizer(args))
    common.train(args, model)
    print(f"accuracy on pictures held out: {model.history[-1]['metrics']['accuracy']:.4f}")
    common.say_epsilons(model, "the follower")


if __name__ == "__main__":
    main()
