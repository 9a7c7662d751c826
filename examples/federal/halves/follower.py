"""The follower of the halves: it has the right half of each image, no label, and so no loss of its own."""

from __future__ import annotations

import common
from torch import nn

import plait
from plait import efl


def input_fn(model, mode):
    return common.source("right", mode)


def right_of(sample):
    return plait.layer("right", nn.Linear, 32, 64)(sample.half).relu()


def loss_fn(model, sample):
    """The gradient of what is sent comes back from the leader; that is all that moves this party's variables."""
    model.send("right", right_of(sample), require_grad=True)


def eval_fn(model, sample):
    model.send("right", right_of(sample))


def main():
    model = efl.FederalModel(sample_id="id")
    model.input_fn(input_fn).loss_fn(loss_fn).eval_fn(eval_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(common.ADAM))
    model.compile()
    model.fit(common.PROCEDURE, project_name="halves")


if __name__ == "__main__":
    main()
