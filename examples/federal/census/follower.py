"""The follower of the census example: an employment office, with columns and embeddings of its own and no labels."""

from __future__ import annotations

import functools

import common
import torch

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
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.Adam, lr=1e-3)))
    model.compile()
    procedure = efl.procedure_fn.train_and_eval(max_iter=args.epochs)
    model.fit(procedure, project_name="census", checkpoint_dir=common.checkpoints("follower", args))


if __name__ == "__main__":
    main()
