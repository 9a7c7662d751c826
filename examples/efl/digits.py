"""One model learns two tasks from real handwriting: which digit is it, and is the number odd or even?

Both tasks look at an image through one shared tower; each has a head of its own. Each step's task is drawn by lot.

    python examples/efl/digits.py checkpoints
"""

from __future__ import annotations

import functools
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import demo, efl

TASKS = {"digit": 10, "even": 2}
"""The tasks, and how many answers each has to choose from."""
TRAINING_IMAGES = 1437  # four fifths of 1797


def input_fn(task, model, mode):
    """Where a task's data comes from: shuffled batches to train on, the held-out images to evaluate on."""
    images, digits = demo.load()
    labels = digits if task == "digit" else (digits + 1) % 2
    training = mode is efl.MODE.TRAIN
    rows = slice(TRAINING_IMAGES) if training else slice(TRAINING_IMAGES, None)
    return plait.data.TensorSource({"image": images[rows], "label": labels[rows]}, batch_size=32, shuffle=training)


def logits_of(task, sample):
    """The network. A layer is made where it is first called, and found there again at every later call."""
    with plait.variable_scope("tower", reuse=plait.AUTO_REUSE):  # either task may be the first to come by
        hidden = plait.layer("conv1", nn.Conv2d, 1, 16, 3, padding=1)(sample.image).relu()
        hidden = plait.layer("conv2", nn.Conv2d, 16, 32, 3, padding=1)(hidden).relu()
        hidden = functional.max_pool2d(hidden, 2).flatten(1)
        hidden = plait.layer("dropout", nn.Dropout, 0.5)(hidden)  # drops in training steps only, as in plain PyTorch
        hidden = plait.layer("dense", nn.Linear, 32 * 4 * 4, 64)(hidden).relu()
    with plait.variable_scope(task):
        return plait.layer("dense", nn.Linear, 64, TASKS[task])(hidden)


def loss_fn(task, model, sample):
    return functional.cross_entropy(logits_of(task, sample), sample.label)


def eval_fn(task, model, sample):
    model.add_metric("accuracy", efl.metrics.accuracy(sample.label, logits_of(task, sample)))


def main():
    torch.manual_seed(0)  # for dropout; variables and the order of the data have their own randomness
    model = efl.Model()
    # A factory makes the optimizer when the variables are known. Both tasks name the tower, so they share its Adam.
    adam = functools.partial(torch.optim.Adam, lr=0.001)
    for task in TASKS:
        model.input_fn(functools.partial(input_fn, task), task)
        model.loss_fn(functools.partial(loss_fn, task), task)
        model.eval_fn(functools.partial(eval_fn, task), task)
        model.optimizer_fn(efl.optimizer_fn.scope_optimizer({"tower": adam, task: adam}), task)
    model.compile()
    # Six steps in ten are the first task's, until both have seen all of their data; then both are evaluated.
    procedure = efl.procedure_fn.cotrain(max_iter=10, task_select_ratio={"digit": 0.6, "even": 0.4})
    checkpoint_dir = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    model.fit(procedure, log_step=200, project_name="digits", checkpoint_dir=checkpoint_dir, save_steps=250)
    for found in model.history[-len(TASKS) :]:
        print(f"{found['task']}: accuracy {found['metrics']['accuracy']:.4f}")
    print(f"look inside with  plait inspect {checkpoint_dir}")


if __name__ == "__main__":
    main()
