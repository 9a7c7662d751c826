"""The follower of the private digits: right halves, no labels; what comes back is clipped and noised once more."""

from __future__ import annotations

import functools

import common
from torch import nn

import plait
from plait import efl


def input_fn(args, model, mode):
    return common.source("right", args, mode)


def right_of(sample):
    return plait.layer("right", nn.Linear, 392, common.WIDTH)(sample.half).tanh()


def loss_fn(model, sample):
    model.send("right", right_of(sample), require_grad=True)


def eval_fn(model, sample):
    model.send("right", right_of(sample))


def main():
    args = common.arguments(__doc__.partition("\n")[0])
    model = efl.FederalModel(sample_id="id", seed=args.seed)
    model.input_fn(functools.partial(input_fn, args)).loss_fn(loss_fn).eval_fn(eval_fn)
    model.optimizer_fn(common.optimizer(args))
    common.train(args, model)
    common.say_epsilons(model, "the leader, who is sent numbers made of each picture")


if __name__ == "__main__":
    main()
