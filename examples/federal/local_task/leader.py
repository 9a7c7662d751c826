"""A task that the leader has for itself: the two parties share few people, and the leader has many more.

    plait federate examples/federal/local_task/leader.py examples/federal/local_task/follower.py

Both know 200 images, the leader the left half and the follower the right one: task "joint". Of 1237 other images there
is only the leader's half: task "alone", which the follower knows nothing of. Both tasks train the leader's tower, so
that the joint model gains from images that the follower has never seen. To train without them, add `-- --without`.
"""

from __future__ import annotations

import sys

import common
import torch
from torch import nn
from torch.nn import functional

import plait
from plait import demo, efl


def joint_input(model, mode):
    return common.joint_source("left", mode)


def alone_input(model, mode):
    images, digits = demo.load()
    rows = slice(common.COMMON_IMAGES, common.TRAINING_IMAGES)
    tensors = {"half": images[rows, ..., :4].flatten(1), "digit": digits[rows]}
    return plait.data.TensorSource(tensors, batch_size=128, shuffle=True)


def tower(sample):
    with plait.variable_scope("tower", reuse=plait.AUTO_REUSE):  # both tasks use it, either may be the first
        hidden = plait.layer("first", nn.Linear, 32, 64)(sample.half).relu()
        return plait.layer("second", nn.Linear, 64, 64)(hidden).relu()


def joint_logits(model, sample, require_grad):
    both = torch.cat([tower(sample), model.recv("right", require_grad=require_grad)], dim=1)
    with plait.variable_scope("joint"):
        hidden = plait.layer("hidden", nn.Linear, 128, 64)(both).relu()
        return plait.layer("output", nn.Linear, 64, 10)(hidden)


def joint_loss(model, sample):
    return functional.cross_entropy(joint_logits(model, sample, require_grad=True), sample.digit)


def joint_eval(model, sample):
    logits = joint_logits(model, sample, require_grad=False)
    model.add_metric("accuracy", efl.metrics.accuracy(sample.digit, logits))


def alone_loss(model, sample):
    """Nothing is sent or received here: such a task is the party's own."""
    hidden = tower(sample)
    with plait.variable_scope("alone"):
        logits = plait.layer("output", nn.Linear, 64, 10)(hidden)
    return functional.cross_entropy(logits, sample.digit)


def main():
    model = efl.FederalModel(sample_id="id")
    model.input_fn(joint_input, "joint").loss_fn(joint_loss, "joint").eval_fn(joint_eval, "joint")
    ratio = {"joint": 0.4, "alone": 0.6}
    if "--without" in sys.argv[1:]:
        ratio = {"joint": 1.0}
    else:
        model.input_fn(alone_input, "alone").loss_fn(alone_loss, "alone")
    for task in ratio:
        optimizers = {"tower": common.ADAM, task: common.ADAM}
        model.optimizer_fn(efl.optimizer_fn.scope_optimizer(optimizers), task)
    model.compile()
    model.fit(efl.procedure_fn.cotrain(max_iter=common.PASSES, task_select_ratio=ratio), project_name="local_task")
    tasks = " and ".join(ratio)
    print(f"trained {tasks}: joint accuracy {model.history[-1]['metrics']['accuracy']:.4f}")


if __name__ == "__main__":
    main()
