"""The follower of the local task: it has the right halves of the images that both know, and one task, "joint"."""

from __future__ import annotations

import common
from torch import nn

import plait
from plait import efl


def input_fn(model, mode):
    return common.joint_source("right", mode)


def right_of(sample):
    return plait.layer("right", nn.Linear, 32, 64)(sample.half).relu()


def loss_fn(model, sample):
    model.send("right", right_of(sample), require_grad=True)


def eval_fn(model, sample):
    model.send("right", right_of(sample))


def main():
    model = efl.FederalModel(sample_id="id")
    model.input_fn(input_fn, "joint").loss_fn(loss_fn, "joint").eval_fn(eval_fn, "joint")
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(common.ADAM), "joint")
    model.compile()
    procedure = efl.procedure_fn.cotrain(max_iter=common.PASSES, task_select_ratio={"joint": 1.0})
    model.fit(procedure, project_name="local_task")


if __name__ == "__main__":
    main()
