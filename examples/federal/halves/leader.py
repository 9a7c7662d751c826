"""One model over halves of images: the leader has the left ones and the labels, the follower has the right ones.

plait federate examples/federal/halves/leader.py examples/federal/halves/follower.py
"""

from __future__ import annotations

import common
import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl


def input_fn(model, mode):
    return common.source("left", mode)


def logits_of(model, sample, require_grad):
    left = plait.layer("left", nn.Linear, 32, 64)(sample.half).relu()
    right = model.recv("right", require_grad=require_grad)  # what the follower sends under this name
    hidden = plait.layer("hidden", nn.Linear, 128, 64)(torch.cat([left, right], dim=1)).relu()
    return plait.layer("output", nn.Linear, 64, 10)(hidden)


def loss_fn(model, sample):
    """`require_grad`: the backward pass sends the gradient of what was received to where it came from."""
    return functional.cross_entropy(logits_of(model, sample, require_grad=True), sample.digit)


def eval_fn(model, sample):
    logits = logits_of(model, sample, require_grad=False)
    model.add_metric("accuracy", efl.metrics.accuracy(sample.digit, logits))


def main():
    model = efl.FederalModel(sample_id="id")  # both parties must have the same image at the same place in a batch
    model.input_fn(input_fn).loss_fn(loss_fn).eval_fn(eval_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(common.ADAM))
    model.compile()
    model.fit(common.PROCEDURE, project_name="halves")
    print(f"accuracy on images held out: {model.history[-1]['metrics']['accuracy']:.4f}")


if __name__ == "__main__":
    main()
