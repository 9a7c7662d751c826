"""What returned gradients tell the follower of labels, and what is left of it when they are protected.

    python examples/federal/private_census/labels.py

Both parties of the census run in this process, each in a thread. No differential privacy here: only the gradients that
go back are changed. Printed: the AUC of the task, and the AUCs of guessing labels from returned rows.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import threading

import common
import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl
from plait.privacy.labels import direction_attack, marvell, max_norm, norm_attack


def as_they_are(rows, labels):
    return rows


def alike_in_norm(rows, labels):
    return max_norm(rows)


DEFENCES = {"none": as_they_are, "max_norm": alike_in_norm, "marvell": marvell}


def input_fn(party, args, model, mode):
    training = mode is efl.MODE.TRAIN
    rows = common.table.load(party, args.data)["train" if training else "test"]
    tensors = {name: torch.from_numpy(column[: args.rows]) for name, column in rows.items()}
    tensors["codes"] = tensors["codes"].long()
    return plait.data.TensorSource(tensors, 512, shuffle=training, seed=args.seed)


def tower(party, args, sample):
    values, width = common.table.sizes(party, args.data)
    with plait.variable_scope(party):
        embedded = plait.layer("embedding", nn.Embedding, values, 8)(sample.codes).flatten(1)
        hidden = torch.cat([embedded, sample.numbers], dim=1)
        hidden = plait.layer("first", nn.Linear, width, 128)(hidden).relu()
        return plait.layer("second", nn.Linear, 128, 64)(hidden).relu()


def logit_of(args, sample, theirs):
    with plait.variable_scope("top"):
        joint = torch.cat([tower("leader", args, sample), theirs], dim=1)
        joint = plait.layer("joint", nn.Linear, 128, 64)(joint).relu()
        return plait.layer("output", nn.Linear, 64, 1)(joint).squeeze(1)


def leader_loss(args, defence, attacks, model, sample):
    def protect(rows):
        made = defence(rows, sample.income)
        attacks.append((norm_attack(made, sample.income), direction_attack(made, sample.income)))
        return made

    theirs = model.recv("hidden", require_grad=True, protect=protect)
    return functional.binary_cross_entropy_with_logits(logit_of(args, sample, theirs), sample.income)


def leader_eval(args, model, sample):
    logit = logit_of(args, sample, model.recv("hidden"))
    model.add_metric("auc", efl.metrics.auc(sample.income, logit, exact=True))


def follower_loss(args, model, sample):
    model.send("hidden", tower("follower", args, sample), require_grad=True)


def follower_eval(args, model, sample):
    model.send("hidden", tower("follower", args, sample))


def fit(party, args, communicator, loss, evaluate):
    model = efl.FederalModel(communicator=communicator, seed=args.seed, sample_id="id")
    model.input_fn(functools.partial(input_fn, party, args))
    model.loss_fn(loss)
    model.eval_fn(functools.partial(evaluate, args))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.Adam, lr=1e-3)))
    model.compile()
    model.fit(efl.procedure_fn.train_and_eval(max_iter=args.epochs), project_name="labels", log_step=10**9)
    model.close()
    return model


def trained(args, defence):
    """The task's AUC on the test rows, and the means of both attacks' over all steps."""
    leader, follower = efl.Communicator.pair()
    attacks = []
    other = threading.Thread(
        target=fit, args=("follower", args, follower, functools.partial(follower_loss, args), follower_eval)
    )
    other.start()
    model = fit("leader", args, leader, functools.partial(leader_loss, args, defence, attacks), leader_eval)
    other.join()
    return model.history[-1]["metrics"]["auc"], *(statistics.mean(one) for one in zip(*attacks, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="~/.cache/plait/census", help="where the downloaded table is kept")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, help="use only so many, to try it out")
    args = parser.parse_args()
    for name, defence in DEFENCES.items():
        runs = [trained(argparse.Namespace(**vars(args), seed=seed), defence) for seed in range(args.seeds)]
        auc, norm, direction = (statistics.mean(one) for one in zip(*runs, strict=True))
        print(f"{name}: task auc {auc:.4f}, attack by norm {norm:.3f}, by direction {direction:.3f}", flush=True)


if __name__ == "__main__":
    main()
