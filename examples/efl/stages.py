"""A procedure of your own: stages that are functions, stages that are classes, and a model bank.

A small model is trained first. A second one takes its tower from the first one's checkpoint, and has a new head.
"""

from __future__ import annotations

import functools
import tempfile

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl


def input_fn(model, mode):
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    return efl.Sample({"x": x, "y": x.prod(dim=1, keepdim=True)})


def loss_fn(model, sample):
    with plait.variable_scope("tower"):
        hidden = plait.layer("dense", nn.Linear, 4, 32)(sample.x).tanh()
    with plait.variable_scope("head"):
        return functional.mse_loss(plait.layer("dense", nn.Linear, 32, 1)(hidden), sample.y)


def compiled(seed):
    model = efl.Model(seed=seed)
    model.input_fn(input_fn).loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))
    return model.compile()


def clear_head(sess, ctx):
    """A function as a stage: it gets the session and the context. Variables that it changes are in the checkpoint."""
    with ctx.scope(), plait.variable_scope("head", reuse=True):
        nn.init.zeros_(plait.layer("dense", nn.Linear, 32, 1).weight)
    return ctx.worker_num


class Report(efl.Stage):
    """A class as a stage: `run` takes arguments, and what it returns is kept in the journal."""

    def run(self, model, title):
        loss = float(self.sess.run(model.loss()))
        print(f"{title}: loss {loss:.4f}")
        return loss


def procedure(bank_config, model):
    """Plain Python. After a restart, every stage that was done is skipped and its result returned."""
    model.run_stage("bank", efl.stage.ModelBank(is_chief=True, config=bank_config))
    print(f"tower of the second: {size_of_tower(model):.6f}")
    workers = model.run_stage("clear", clear_head)
    before = model.run_stage("before", Report(), model, title="before training")
    model.run_stage("train", efl.stage.LoopStage(model.train_op(), step=50))
    after = model.run_stage("after", Report(), model, title="after training")
    print(f"{workers} worker made the loss {after / before:.0%} of what it was")


def size_of_tower(model):
    return model.variables()["tower/dense/weight"].norm().item()


def main():
    first, second = compiled(seed=1), compiled(seed=2)
    with tempfile.TemporaryDirectory() as checkpoint_dir:
        first.fit(efl.procedure_fn.train(max_step=100), project_name="first", checkpoint_dir=checkpoint_dir)
        print(f"tower of the first: {size_of_tower(first):.6f}")
        config = {"first": {"load": ["tower/*"], "exclude": [], "path": checkpoint_dir}}
        second.fit(functools.partial(procedure, config), project_name="second")


if __name__ == "__main__":
    main()
