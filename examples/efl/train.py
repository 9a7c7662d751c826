"""One task, trained: an input, a loss, an optimizer, a procedure."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl


def input_fn(model, mode):
    """Constant features: every step sees this batch. The label is the sum of the features."""
    x = torch.rand(32, 4, generator=torch.Generator().manual_seed(0))
    return efl.Sample({"x": x, "y": x.sum(dim=1, keepdim=True)})


def loss_fn(model, sample):
    prediction = plait.layer("dense", nn.Linear, 4, 1)(sample.x)
    return functional.mse_loss(prediction, sample.y)


def main():
    model = efl.Model()
    model.input_fn(input_fn)
    model.loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.2)))
    model.compile()
    model.fit(efl.procedure_fn.train(max_step=300), log_step=100, project_name="train")
    print(f"after {int(model.global_step)} steps the loss is {model.metric_values()['loss']:.4f}")


if __name__ == "__main__":
    main()
