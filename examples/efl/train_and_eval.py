"""Train and evaluate in turns, keep checkpoints, measure the AUC.

Kill it and start it again with the same directory: it goes on where it was, and ends with the same numbers.

    python examples/efl/train_and_eval.py checkpoints
"""

from __future__ import annotations

import functools
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl


def input_fn(model, mode):
    """Clicks that depend on the first two of eight features; other rows for training than for evaluation."""
    training = mode is efl.MODE.TRAIN
    generator = torch.Generator().manual_seed(1 if training else 2)
    x = torch.randn(4096 if training else 1024, 8, generator=generator)
    click = (x[:, 0] + x[:, 1] + torch.randn(len(x), generator=generator) > 0).float()
    return plait.data.TensorSource({"x": x, "click": click}, batch_size=64, shuffle=training)


def logit_of(sample):
    hidden = plait.layer("hidden", nn.Linear, 8, 16)(sample.x).relu()
    return plait.layer("output", nn.Linear, 16, 1)(hidden).squeeze(1)


def loss_fn(model, sample):
    return functional.binary_cross_entropy_with_logits(logit_of(sample), sample.click)


def eval_fn(model, sample):
    model.add_metric("auc", efl.metrics.auc(sample.click, logit_of(sample).sigmoid()))


def main():
    model = efl.Model()
    model.input_fn(input_fn).loss_fn(loss_fn).eval_fn(eval_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.Adam, lr=0.01)))
    model.compile()
    procedure = efl.procedure_fn.train_and_eval(max_iter=4)  # a pass over the training data, then one over the other
    checkpoint_dir = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    model.fit(procedure, log_step=50, project_name="train_and_eval", checkpoint_dir=checkpoint_dir, save_steps=20)
    for found in model.history:
        print(f"step {found['global_step']}: auc {found['metrics']['auc']:.4f}")
    print(f"look inside with  plait inspect {checkpoint_dir}")


if __name__ == "__main__":
    main()
