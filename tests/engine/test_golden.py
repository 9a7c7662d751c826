"""The first losses of three small trainings, kept to the last bit: a change that moves one is noticed.

`python tests/engine/test_golden.py --write` writes them anew, after a change that is meant to move them.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait import efl
from plait.data import TensorSource
from plait.engine.hooks import SessionRunArgs, SessionRunHook
from plait.engine.task import MODE

FILE = Path(__file__).with_name("golden_losses.json")
STEPS = 10
ULPS = 4
"""How far losses may be apart on another torch or CPU, whose kernels add in another order; per step done."""


class Losses(SessionRunHook):
    def __init__(self, model, found, task=None):
        self.op, self.found = model.loss(task), found

    def before_run(self, run_context):
        return SessionRunArgs(self.op)

    def after_run(self, run_context, run_values):
        self.found.append(float(run_values.results))


def numbers(*shape, seed):
    """The same everywhere: small fractions from integer arithmetic, not from a generator that torch may change."""
    count = math.prod(shape)
    values = (torch.arange(count, dtype=torch.int64) * 1_103_515_245 + seed * 12_345) % 2_147_483_647
    return (values.double() / 2_147_483_647 * 2 - 1).float().reshape(shape)


def fill(module):
    """Initial weights that no generator draws."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=seed) * 0.3)
    return module


def classes(x):
    return (x.flatten(1).sum(1) > 0).long()


def one_task(net, x, factory):
    model = efl.Model()
    model.net = fill(net)
    model.input_fn(lambda model, mode: TensorSource({"x": x, "y": classes(x)}, 8))
    model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample.x), sample.y))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(factory)).compile()
    return run(model, efl.procedure_fn.train(max_step=STEPS))


def run(model, procedure):
    found = []
    for task in model.tasks():
        model.add_hooks([Losses(model, found, task)], MODE.TRAIN, task)
    model.fit(procedure)
    return found


def sgd_mlp():
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    return one_task(net, numbers(96, 6, seed=100), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def adam_conv():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 2))
    return one_task(net, numbers(96, 2, 6, 6, seed=200), functools.partial(torch.optim.Adam, lr=0.01))


def task_loss(model, sample, task):
    with plait.variable_scope("tower", reuse=plait.AUTO_REUSE):
        hidden = torch.tanh(sample.x @ plait.get_variable("w", [6, 8], initializer=numbers(6, 8, seed=1)))
    with plait.variable_scope("heads"):
        logits = hidden @ plait.get_variable(task, [8, 2], initializer=numbers(8, 2, seed=2))
    return F.cross_entropy(logits, sample.y)


def two_tasks():
    model = efl.Model()
    adam, sgd = functools.partial(torch.optim.Adam, lr=0.01), functools.partial(torch.optim.SGD, lr=0.1)
    split = efl.optimizer_fn.scope_optimizer({"tower": adam, "heads": sgd})
    for seed, task in enumerate(("click", "buy"), start=300):
        x = numbers(64, 6, seed=seed)
        model.input_fn(lambda model, mode, x=x: TensorSource({"x": x, "y": classes(x)}, 8), task=task)
        model.loss_fn(functools.partial(task_loss, task=task), task=task)
        model.optimizer_fn(split, task=task)
    return run(model.compile(), efl.procedure_fn.cotrain(train_step=STEPS, max_iter=1, seed=1))


TRAININGS = {made.__name__: made for made in (sgd_mlp, adam_conv, two_tasks)}


def here():
    """What the last bits depend on besides plait."""
    return {"torch": torch.__version__.partition("+")[0], "cpu": torch.backends.cpu.get_cpu_capability()}


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_are_those_of_the_file(name):
    golden = json.loads(FILE.read_text())
    expected = [float.fromhex(text) for text in golden["losses"][name]]
    found = TRAININGS[name]()
    assert len(found) == len(expected) == STEPS
    if golden["made_with"] == here():
        assert [loss.hex() for loss in found] == golden["losses"][name]
    ulp = torch.finfo(torch.float32).eps
    for step, (loss, other) in enumerate(zip(found, expected, strict=True)):
        assert loss == pytest.approx(other, rel=ULPS * (step + 1) * ulp), f"step {step}"


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_fall(name):
    """A golden file of a training that learns nothing would prove little."""
    losses = [float.fromhex(text) for text in json.loads(FILE.read_text())["losses"][name]]
    assert min(losses[-3:]) < losses[0]
    assert len(set(losses)) == STEPS


def write():
    losses = {name: [loss.hex() for loss in made()] for name, made in TRAININGS.items()}
    FILE.write_text(json.dumps({"made_with": here(), "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("to write the losses anew: python tests/engine/test_golden.py --write")
    write()
