"""`plait demo`: one model learns two tasks from real handwriting, in seconds, on a CPU.

Read it as a tour of plait. Each image of a digit, 8 by 8 pixels, asks two questions: which digit is it, and is the
number odd or even? Both tasks look at the image through one shared tower; each has a head of its own. The functions
below are what a user of plait writes, in the order in which plait needs them.
"""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl
from plait.data import Sample, TensorSource
from plait.demo import curve
from plait.errors import ConfigError
from plait.variables.checkpoint import CheckpointDir

__all__ = ["build", "load", "run"]

TASKS = {"digit": 10, "even": 2}
"""The tasks, and how many answers each has to choose from."""
PASSES = 20
"""Iterations of training and evaluation; in each, both tasks see all of their training data once."""
PROJECT = "plait-demo"
TRAINING_IMAGES = 1437  # four fifths of 1797


def run(output: Path = Path("demo-output"), *, seed: int = 0) -> dict[str, float]:
    """Train, evaluate, draw the curve into `output`, say what came of it; return each task's test accuracy.

    A run that was cut off goes on where it was; one that had ended is removed and done again.
    """
    checkpoints, picture = Path(output) / "checkpoints", Path(output) / "curve.png"
    remove_finished_run(checkpoints, picture)
    torch.manual_seed(seed)  # for dropout; variables and the order of the data have their own randomness
    model = build(seed)
    # Each step's task is drawn by lot, six to four, until both have seen all of their data; then both are evaluated.
    procedure = efl.procedure_fn.cotrain(max_iter=PASSES, task_select_ratio={"digit": 0.6, "even": 0.4}, seed=seed)
    model.fit(procedure, log_step=200, project_name=PROJECT, checkpoint_dir=checkpoints, save_steps=250)
    accuracies = {task: last_accuracy(model, task) for task in TASKS}
    drawn = curve.draw(model.history, picture)
    print(summary(accuracies, checkpoints, picture if drawn else None))  # noqa: T201 - what a command has to say
    return accuracies


def build(seed: int = 0) -> efl.Model:
    """A model with both tasks: give each its four functions, then compile."""
    model = efl.Model(seed=seed)
    # A factory makes the optimizer when the variables are known. Both tasks name the tower, so they share its Adam.
    adam = functools.partial(torch.optim.Adam, lr=0.001)
    for task in TASKS:
        model.input_fn(functools.partial(input_fn, task, seed), task)
        model.loss_fn(functools.partial(loss_fn, task), task)
        model.eval_fn(functools.partial(eval_fn, task), task)
        model.optimizer_fn(efl.optimizer_fn.scope_optimizer({"tower": adam, task: adam}), task)
    return model.compile()


def input_fn(task: str, seed: int, model: efl.Model, mode: efl.MODE) -> TensorSource:
    """Where a task's data comes from: shuffled batches to train on, the held-out images to evaluate on."""
    del model
    images, digits = load()
    labels = digits if task == "digit" else (digits + 1) % 2
    training = mode is efl.MODE.TRAIN
    rows = slice(TRAINING_IMAGES) if training else slice(TRAINING_IMAGES, None)
    return TensorSource({"image": images[rows], "label": labels[rows]}, batch_size=32, shuffle=training, seed=seed)


def logits_of(task: str, sample: Sample) -> torch.Tensor:
    """The network. A layer is made where it is first called, and found there again at every later call."""
    with plait.variable_scope("tower", reuse=plait.AUTO_REUSE):  # either task may be the first to come by
        hidden = plait.layer("conv1", nn.Conv2d, 1, 16, 3, padding=1)(sample.image).relu()
        hidden = plait.layer("conv2", nn.Conv2d, 16, 32, 3, padding=1)(hidden).relu()
        hidden = functional.max_pool2d(hidden, 2).flatten(1)
        hidden = plait.layer("dropout", nn.Dropout, 0.5)(hidden)  # drops in training steps only, as in plain PyTorch
        hidden = plait.layer("dense", nn.Linear, 32 * 4 * 4, 64)(hidden).relu()
    with plait.variable_scope(task):
        logits: torch.Tensor = plait.layer("dense", nn.Linear, 64, TASKS[task])(hidden)
    return logits


def loss_fn(task: str, model: efl.Model, sample: Sample) -> torch.Tensor:
    """What a training step minimises."""
    del model
    return functional.cross_entropy(logits_of(task, sample), sample.label)


def eval_fn(task: str, model: efl.Model, sample: Sample) -> None:
    """What an evaluation measures, over all of its batches together."""
    logits = logits_of(task, sample)
    model.add_metric("accuracy", efl.metrics.accuracy(sample.label, logits))
    model.add_metric("loss", functional.cross_entropy(logits, sample.label))


@functools.cache
def load() -> tuple[torch.Tensor, torch.Tensor]:
    """The images, from 0 to 1, and the digits that they show. `DIGITS.md` says whose they are."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        images, digits = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    # A fixed order, mixed once: the held-out images come from everywhere in the file, not from its end.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order].unsqueeze(1).float() / 16, digits[order].long()


def last_accuracy(model: efl.Model, task: str) -> float:
    """`model.history` holds what each evaluation found."""
    found = [entry["metrics"]["accuracy"] for entry in model.history if entry["task"] == task]
    return float(found[-1])


def remove_finished_run(checkpoints: Path, picture: Path) -> None:
    """Make room for a new run, without touching what is not the demo's own."""
    directory = CheckpointDir(checkpoints)
    found = directory.read_latest()
    if found is None:
        return
    state = found[1]
    project = (state.get("journal") or {}).get("project")
    if project != PROJECT:
        raise ConfigError(
            f"{checkpoints} holds checkpoints of project {project!r}, which the demo would overwrite: "
            "name another directory, `plait demo --output DIR`"
        )
    if len(state["history"]) == PASSES * len(TASKS):
        for checkpoint in directory.list():
            shutil.rmtree(checkpoint.path)
        picture.unlink(missing_ok=True)


def summary(accuracies: dict[str, float], checkpoints: Path, picture: Path | None) -> str:
    lines = [f"accuracy of {task:<7}{accuracy:.4f}" for task, accuracy in accuracies.items()]
    lines += [f"curve             {picture}"] if picture else []
    # as it was called, which need not be on the PATH
    command = sys.argv[0] if Path(sys.argv[0]).name == "plait" else "plait"
    return "\n".join([*lines, f"checkpoints       {checkpoints}", f"look inside with  {command} inspect {checkpoints}"])
