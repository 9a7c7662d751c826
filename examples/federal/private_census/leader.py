"""The census example with differential privacy in both parties, embeddings and all.

plait federate examples/federal/private_census/leader.py examples/federal/private_census/follower.py
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
    return common.source("leader", args, mode)


def logit_of(args, model, sample, require_grad):
    ours = common.tower("leader", args, sample)
    theirs = model.recv("hidden", require_grad=require_grad)
    with plait.variable_scope("top"):
        return plait.layer("output", nn.Linear, 2 * common.WIDTH, 1)(torch.cat([ours, theirs], dim=1)).squeeze(1)


def loss_fn(args, model, sample):
    logit = logit_of(args, model, sample, require_grad=True)
    return functional.binary_cross_entropy_with_logits(logit, sample.income, reduction="none")


def eval_fn(args, model, sample):
    logit = logit_of(args, model, sample, require_grad=False)
    model.add_metric("auc", efl.metrics.auc(sample.income, logit, exact=True))


def main():
    args = common.arguments(__doc__.partition("\n")[0])
    model = efl.FederalModel(seed=args.seed, sample_id="id")
    model.input_fn(functools.partial(input_fn, args))
    model.loss_fn(functools.partial(loss_fn, args))
    model.eval_fn(functools.partial(eval_fn, args))
    common.train(args, model)
    for number, found in enumerate(model.history, start=1):
        print(f"pass {number}: test auc {found['metrics']['auc']:.4f}")
    common.say_epsilons(model, "the follower")


if __name__ == "__main__":
    main()
