"""A tax office knows who earns over 50,000 dollars; an employment office knows how people work. They train one model.

    plait federate examples/federal/census/leader.py examples/federal/census/follower.py

Each party embeds its own categories and reads its own numbers. The follower sends 64 numbers a person, and gets their
gradients; neither columns nor labels leave their party. `centralised.py` says what all columns in one place reach.
"""

from __future__ import annotations

import functools
import time

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
        joint = plait.layer("joint", nn.Linear, 128, 64)(torch.cat([ours, theirs], dim=1)).relu()
        return plait.layer("output", nn.Linear, 64, 1)(joint).squeeze(1)


def loss_fn(args, model, sample):
    logit = logit_of(args, model, sample, require_grad=True)
    return functional.binary_cross_entropy_with_logits(logit, sample.income)


def eval_fn(args, model, sample):
    logit = logit_of(args, model, sample, require_grad=False)
    model.add_metric("auc", efl.metrics.auc(sample.income, logit, exact=True))


def main():
    args = common.arguments(__doc__.partition("\n")[0])
    model = efl.FederalModel(seed=args.seed, sample_id="id")
    model.input_fn(functools.partial(input_fn, args))
    model.loss_fn(functools.partial(loss_fn, args))
    model.eval_fn(functools.partial(eval_fn, args))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.Adam, lr=1e-3)))
    model.compile()
    began = time.perf_counter()
    procedure = efl.procedure_fn.train_and_eval(max_iter=args.epochs)
    model.fit(procedure, project_name="census", checkpoint_dir=common.checkpoints("leader", args))
    for number, found in enumerate(model.history, start=1):
        print(f"pass {number}: test auc {found['metrics']['auc']:.4f}")
    print(f"two parties, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
