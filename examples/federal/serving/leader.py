"""A federated model leaves the house: both parties train, and each exports its part. `ask.py` serves them together.

plait certs init certs
plait federate --certs certs examples/federal/serving/leader.py examples/federal/serving/follower.py exports
python examples/federal/serving/ask.py exports certs
"""

from __future__ import annotations

import common
import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl
from plait.export.parts import export_part


def input_fn(model, mode):
    return common.source("left", mode)


def logits_of(model, sample, require_grad=False):
    left = plait.layer("left", nn.Linear, 32, 64)(sample.half).relu()
    right = model.recv("right", require_grad=require_grad)
    hidden = plait.layer("hidden", nn.Linear, 128, 64)(torch.cat([left, right], dim=1)).relu()
    return plait.layer("output", nn.Linear, 64, 10)(hidden)


def loss_fn(model, sample):
    return functional.cross_entropy(logits_of(model, sample, require_grad=True), sample.digit)


def eval_fn(model, sample):
    model.add_metric("accuracy", efl.metrics.accuracy(sample.digit, logits_of(model, sample)))


def predict_fn(model, sample):
    """What is received is an input of this party's part, and what is returned its output."""
    return {"probability": logits_of(model, sample).softmax(1)}


def main():
    model = efl.FederalModel(sample_id="id")
    model.input_fn(input_fn).loss_fn(loss_fn).eval_fn(eval_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(common.ADAM))
    model.fit(common.PROCEDURE, project_name="serving")
    part = model.part(predict_fn, {"half": torch.zeros(2, 32)})
    labels = [str(digit) for digit in range(10)]
    export_part(part, common.EXPORTS / "leader", formats=common.FORMATS, labels=labels)
    print(f"accuracy on images held out: {model.history[-1]['metrics']['accuracy']:.4f}")


if __name__ == "__main__":
    main()
