"""The follower of the private census: embeddings of its own that no single person moves by much, and no labels."""

from __future__ import annotations

import functools

import common

from plait import efl


def input_fn(args, model, mode):
    return common.source("follower", args, mode)


def loss_fn(args, model, sample):
    model.send("hidden", common.tower("follower", args, sample), require_grad=True)


def eval_fn(args, model, sample):
    model.send("hidden", common.tower("follower", args, sample))


def main():
    args = common.arguments(__doc__.partition("\n")[0])
    model = efl.FederalModel(seed=args.seed, sample_id="id")
    model.input_fn(functools.partial(input_fn, args))
    model.loss_fn(functools.partial(loss_fn, args))
    model.eval_fn(functools.partial(eval_fn, args))
    common.train(args, model)
    common.say_epsilons(model, "the leader, who is sent numbers made of each person's columns")


if __name__ == "__main__":
    main()
