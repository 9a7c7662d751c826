"""The follower of the two levels: it has the right halves, sends twice and receives once in a step, of either task."""

from __future__ import annotations

import functools

import common
import torch
from torch import nn

import plait
from plait import efl


def input_fn(task, model, mode):
    return common.source("right", mode, task)


def exchange(model, sample, require_grad):
    with plait.variable_scope("level1", reuse=plait.AUTO_REUSE):
        edges = plait.layer("edges", nn.Linear, 32, 48)(sample.half).relu()
    model.send("right edges", edges, require_grad=require_grad)
    both = torch.cat([model.recv("left edges", require_grad=require_grad), edges], dim=1)
    with plait.variable_scope("level2", reuse=plait.AUTO_REUSE):
        shapes = plait.layer("shapes", nn.Linear, 96, 32)(both).relu()
    model.send("right shapes", shapes, require_grad=require_grad)


def loss_fn(model, sample):
    exchange(model, sample, require_grad=True)


def eval_fn(model, sample):
    exchange(model, sample, require_grad=False)


def main():
    model = efl.FederalModel(sample_id="id")
    for task in common.TASKS:  # the leader draws each step's task, and says which
        model.input_fn(functools.partial(input_fn, task), task)
        model.loss_fn(loss_fn, task).eval_fn(eval_fn, task)
        optimizers = {"level1": common.ADAM, "level2": common.SLOWER}
        model.optimizer_fn(efl.optimizer_fn.scope_optimizer(optimizers), task)
    model.compile()
    model.fit(common.PROCEDURE, project_name="hierarchical")


if __name__ == "__main__":
    main()
