"""Wide and deep, split by columns: a tax office has the labels, and trains with an employment office.

    plait federate examples/train/wide_and_deep/leader.py examples/train/wide_and_deep/follower.py

Each party has the embeddings, crosses and weights of its own columns; 65 numbers a person travel. The model and its
training are those of `alone.py`.
"""

from __future__ import annotations

import functools
import time

import common
import torch
from torch.nn import functional

import plait
from plait import efl


def input_fn(args, party, model, mode):
    training = mode is efl.MODE.TRAIN
    part = "train" if training else "test"
    tensors = {name: torch.from_numpy(column) for name, column in common.features(party, args, part).items()}
    if party == "leader":
        tensors["income"] = torch.from_numpy(common.income(args, part))
    tensors["id"] = torch.arange(len(next(iter(tensors.values()))))
    return plait.data.TensorSource(tensors, common.BATCH, shuffle=training, seed=args.seed, drop_remainder=training)


def logit_of(args, model, sample, require_grad):
    ours = common.part_of("leader", args.data, dict(sample.items()))
    return common.logit_of(ours, model.recv("part", require_grad=require_grad))


def loss_fn(args, model, sample):
    logit = logit_of(args, model, sample, require_grad=True)
    return functional.binary_cross_entropy_with_logits(logit, sample.income)


def eval_fn(args, model, sample):
    logit = logit_of(args, model, sample, require_grad=False)
    model.add_metric("auc", efl.metrics.auc(sample.income, logit, exact=True))


def main():
    args = common.arguments(__doc__.partition("\n")[0])
    model = efl.FederalModel(seed=args.seed, sample_id="id")
    model.input_fn(functools.partial(input_fn, args, "leader"))
    model.loss_fn(functools.partial(loss_fn, args))
    model.eval_fn(functools.partial(eval_fn, args))
    model.optimizer_fn(efl.optimizer_fn.scope_optimizer(common.optimizers("leader", "top")))
    model.compile()
    began = time.perf_counter()
    where = f"{args.model_dir}/leader" if args.model_dir else None
    model.fit(efl.procedure_fn.train_and_eval(max_iter=args.epochs), project_name="census", checkpoint_dir=where)
    for number, found in enumerate(model.history, start=1):
        print(f"pass {number}: test auc {found['metrics']['auc']:.4f}")
    print(f"two parties, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
