"""What both parties, and the centralised program, do alike: their command line, their batches, their tower."""

from __future__ import annotations

import argparse

import table
import torch
from torch import nn

import plait
from plait import efl

BATCH = 512


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", default="~/.cache/plait/census", help="where the downloaded table is kept")
    parser.add_argument("--checkpoints", help="a directory; without it, a party that was killed starts from nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of the rows")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rows", type=int, help="use only so many, to try it out")
    return parser.parse_args()


def source(party, args, mode):
    """A party's batches. Both are given the same seed, so both read the same people in the same order."""
    training = mode is efl.MODE.TRAIN
    rows = table.load(party, args.data)["train" if training else "test"]
    tensors = {name: torch.from_numpy(column[: args.rows]) for name, column in rows.items()}
    tensors["codes"] = tensors["codes"].long()
    return plait.data.TensorSource(tensors, BATCH, shuffle=training, seed=args.seed)


def tower(party, args, sample):
    """Embeddings of the categories beside the numbers, and two layers: what the party makes of its columns."""
    values, width = table.sizes(party, args.data)
    with plait.variable_scope(party):
        embedded = plait.layer("embedding", nn.Embedding, values, 8)(sample.codes).flatten(1)
        hidden = torch.cat([embedded, sample.numbers], dim=1)
        hidden = plait.layer("first", nn.Linear, width, 128)(hidden).relu()
        return plait.layer("second", nn.Linear, 128, 64)(hidden).relu()


def checkpoints(party, args):
    return f"{args.checkpoints}/{party}" if args.checkpoints else None
