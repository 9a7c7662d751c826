"""What one organisation with all of the census's columns would reach: the same network unsplit, in plain PyTorch.

    python examples/federal/census/centralised.py

It starts with the weights that the two parties start with, and sees the same rows in the same order.
"""

from __future__ import annotations

import time

import common
import table
import torch
from torch import nn
from torch.nn import functional

from plait import efl
from plait.rng import derive_seed, isolated_rng

PARTIES = ("leader", "follower")


def made(seed, name, kind, *sizes):
    """A layer with the first weights that `plait.layer` gives the one of this name."""
    with isolated_rng(derive_seed(seed, name)):
        return kind(*sizes)


class Tower(nn.Module):
    def __init__(self, party, args):
        super().__init__()
        values, width = table.sizes(party, args.data)
        self.embedding = made(args.seed, f"{party}/embedding", nn.Embedding, values, 8)
        self.first = made(args.seed, f"{party}/first", nn.Linear, width, 128)
        self.second = made(args.seed, f"{party}/second", nn.Linear, 128, 64)

    def forward(self, batch):
        hidden = torch.cat([self.embedding(batch["codes"]).flatten(1), batch["numbers"]], dim=1)
        return self.second(self.first(hidden).relu()).relu()


class Network(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.leader = Tower("leader", args)
        self.follower = Tower("follower", args)
        self.joint = made(args.seed, "top/joint", nn.Linear, 128, 64)
        self.output = made(args.seed, "top/output", nn.Linear, 64, 1)

    def forward(self, ours, theirs):
        hidden = torch.cat([self.leader(ours), self.follower(theirs)], dim=1)
        return self.output(self.joint(hidden).relu()).squeeze(1)


def batches(sources, epoch):
    return zip(*(source.batches(epoch, 0) for source in sources), strict=True)


@torch.no_grad()
def test_auc(network, sources):
    found = [(ours["income"], network(ours, theirs)) for ours, theirs in batches(sources, 0)]
    labels, logits = (torch.cat(parts) for parts in zip(*found, strict=True))
    auc = efl.metrics.auc(labels, logits, exact=True).create()
    auc.update(labels, logits)
    return float(auc.result())


def main():
    args = common.arguments(__doc__.partition("\n")[0])
    train, test = ([common.source(party, args, mode) for party in PARTIES] for mode in (efl.MODE.TRAIN, efl.MODE.EVAL))
    network = Network(args)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    began = time.perf_counter()
    for epoch in range(args.epochs):
        for ours, theirs in batches(train, epoch):
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(network(ours, theirs), ours["income"]).backward()
            optimizer.step()
        print(f"pass {epoch + 1}: test auc {test_auc(network, test):.4f}", flush=True)
    print(f"centralised, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
