"""What both parties do alike: their command line, what they draw for a batch, their tower, and their privacy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import plait
from plait import efl

sys.path.append(str(Path(__file__).parents[1] / "census"))
import table  # of the example without privacy: the same columns of the same people

BATCH = 4000
"""Expected, of 199,523: each person is in a batch, or not, by itself. Noise weighs less in larger ones."""
WIDTH = 16
"""Numbers that the follower sends for a person."""


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", default="~/.cache/plait/census", help="where the downloaded table is kept")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--noise", type=float, default=1.0, help="noise multiplier; 0 trains without privacy")
    parser.add_argument("--clip", type=float, default=2.0, help="the most that one person's gradient may count")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; to publish, a secret of your own")
    parser.add_argument("--rows", type=int, help="use only so many, to try it out")
    return parser.parse_args()


def source(party, args, mode):
    """A party's batches. Both are given the same seed, so both draw the same people."""
    training = mode is efl.MODE.TRAIN
    rows = table.load(party, args.data)["train" if training else "test"]
    tensors = {name: torch.from_numpy(column[: args.rows]) for name, column in rows.items()}
    tensors["codes"] = tensors["codes"].long()
    if training:
        return plait.data.PoissonSource(tensors, min(BATCH, len(tensors["id"]) // 10), seed=args.seed)
    return plait.data.TensorSource(tensors, 4000)


def tower(party, args, sample):
    """Embeddings of the categories beside the numbers, and one layer: what the party makes of its columns."""
    values, width = table.sizes(party, args.data)
    with plait.variable_scope(party):
        embedded = plait.layer("embedding", nn.Embedding, values, 8)(sample.codes).flatten(1)
        hidden = torch.cat([embedded, sample.numbers], dim=1)
        return plait.layer("hidden", nn.Linear, width, WIDTH)(hidden).tanh()


def train(args, model):
    private = efl.privacy.DPAdam(args.rate, args.clip, args.noise, delta=1e-6)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(private))
    model.compile()
    model.fit(efl.procedure_fn.train_and_eval(max_iter=args.epochs), project_name="private census")


def say_epsilons(model, peer):
    ledger = model.privacy
    outsider, other = ledger.epsilon(exact=True), ledger.peer_epsilon()
    print(f"the {model.federal_role}'s people: epsilon {outsider:.2f} against outsiders, {other:.2f} against {peer}")
