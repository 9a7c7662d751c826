"""Two tasks over one tower: each step's task is drawn by ratio, each scope has an optimizer of its own."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl, train

TASKS = {"click": 0, "buy": 1}
"""Each task's name, and which feature decides it."""


class CountSteps(train.SessionRunHook):
    """Counts the training steps of the task that it was added to."""

    def __init__(self):
        self.steps = 0

    def after_run(self, run_context, run_values):  # noqa: ARG002 - a hook's arguments
        self.steps += 1


def input_fn(task, model, mode):
    training = mode is efl.MODE.TRAIN
    x = torch.randn(8192, 8, generator=torch.Generator().manual_seed(1 if training else 2))
    label = (x[:, TASKS[task]] > 0).float()
    return plait.data.TensorSource({"x": x, "label": label}, batch_size=32, shuffle=training)


def logit_of(task, sample):
    with plait.variable_scope("tower", reuse=plait.AUTO_REUSE):  # both tasks use it, either may be the first
        hidden = plait.layer("dense", nn.Linear, 8, 16)(sample.x).relu()
    with plait.variable_scope(task):
        return plait.layer("dense", nn.Linear, 16, 1)(hidden).squeeze(1)


def loss_fn(task, model, sample):
    return functional.binary_cross_entropy_with_logits(logit_of(task, sample), sample.label)


def eval_fn(task, model, sample):
    model.add_metric("accuracy", efl.metrics.accuracy(sample.label, (logit_of(task, sample) > 0).float()))


def main():
    model = efl.Model()
    tower = functools.partial(torch.optim.Adam, lr=0.01)
    head = functools.partial(torch.optim.SGD, lr=0.5)
    counts = {task: CountSteps() for task in TASKS}
    for task, count in counts.items():
        model.input_fn(functools.partial(input_fn, task), task)
        model.loss_fn(functools.partial(loss_fn, task), task)
        model.eval_fn(functools.partial(eval_fn, task), task)
        model.optimizer_fn(efl.optimizer_fn.scope_optimizer({"tower": tower, task: head}), task)
        model.add_hooks([count], efl.MODE.TRAIN, task)
    model.compile()
    ratio = {"click": 0.75, "buy": 0.25}
    model.fit(efl.procedure_fn.cotrain(train_step=100, max_iter=2, task_select_ratio=ratio), project_name="cotrain")
    for found in model.history[-len(TASKS) :]:
        task = found["task"]
        print(f"{task}: {counts[task].steps} steps, accuracy {found['metrics']['accuracy']:.4f}")


if __name__ == "__main__":
    main()
