"""Two levels, two tasks, tensors both ways: each party's second level looks at both parties' first.

    plait federate examples/federal/hierarchical/leader.py examples/federal/hierarchical/follower.py

In a step, tensors travel three times, and their gradients the same way back:

    level 1    left half -> left edges           right half -> right edges           each sends its edges
    level 2    both edges -> left shapes         both edges -> right shapes          the follower sends its shapes
    head       both shapes -> answer, loss

Each level has an optimizer of its own, which both tasks share; each task's head has another.
"""

from __future__ import annotations

import functools

import common
import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl


def input_fn(task, model, mode):
    return common.source("left", mode, task)


def logits_of(task, model, sample, require_grad):
    with plait.variable_scope("level1", reuse=plait.AUTO_REUSE):  # both tasks use it, either may be the first
        edges = plait.layer("edges", nn.Linear, 32, 48)(sample.half).relu()
    model.send("left edges", edges, require_grad=require_grad)
    both = torch.cat([edges, model.recv("right edges", require_grad=require_grad)], dim=1)
    with plait.variable_scope("level2", reuse=plait.AUTO_REUSE):
        shapes = plait.layer("shapes", nn.Linear, 96, 32)(both).relu()
    both = torch.cat([shapes, model.recv("right shapes", require_grad=require_grad)], dim=1)
    with plait.variable_scope(task):
        return plait.layer("head", nn.Linear, 64, common.TASKS[task])(both)


def loss_fn(task, model, sample):
    return functional.cross_entropy(logits_of(task, model, sample, require_grad=True), sample.label)


def eval_fn(task, model, sample):
    logits = logits_of(task, model, sample, require_grad=False)
    model.add_metric("accuracy", efl.metrics.accuracy(sample.label, logits))


def main():
    model = efl.FederalModel(sample_id="id")
    head = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for task in common.TASKS:
        model.input_fn(functools.partial(input_fn, task), task)
        model.loss_fn(functools.partial(loss_fn, task), task)
        model.eval_fn(functools.partial(eval_fn, task), task)
        optimizers = {"level1": common.ADAM, "level2": common.SLOWER, task: head}
        model.optimizer_fn(efl.optimizer_fn.scope_optimizer(optimizers), task)
    model.compile()
    model.fit(common.PROCEDURE, project_name="hierarchical")
    for found in model.history[-len(common.TASKS) :]:
        print(f"{found['task']}: accuracy {found['metrics']['accuracy']:.4f}")


if __name__ == "__main__":
    main()
