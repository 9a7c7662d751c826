"""Each kind of bad input ends with one error of ours that names the thing, and leaves the last good checkpoint.

A run of three steps makes good checkpoints; then comes a run with the bad input, in the same directory.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import plait
from plait import efl, errors
from plait.variables.checkpoint import CheckpointDir

SGD = functools.partial(torch.optim.SGD, lr=0.1)
SETTER = efl.optimizer_fn.optimizer_setter(SGD)
BATCHES = [{"x": torch.ones(2, 2) * i} for i in range(4)]


def tower_loss(model, sample):
    with plait.variable_scope("tower"):
        return plait.layer("fc", nn.Linear, 2, 1)(sample.x).mean()


def small(*, data=BATCHES, loss_fn=tower_loss, optimizer_fn=SETTER, task=None):
    model = efl.Model()
    model.input_fn(lambda model, mode: data, task=task).loss_fn(loss_fn, task=task)
    if optimizer_fn is not None:
        model.optimizer_fn(optimizer_fn, task=task)
    return model


def wide_loss(model, sample):
    with plait.variable_scope("tower"):
        return plait.layer("fc", nn.Linear, 2, 5)(sample.x).mean()


def nan_loss(model, sample):
    return tower_loss(model, sample) * (math.nan if model.compiled and int(model.global_step) >= 3 else 1.0)


SCOPES = efl.optimizer_fn.scope_optimizer
ON = {"project_name": "second"}
"""A project of its own trains on, where the first one is done."""

CASES = {
    "an unknown task": (small, errors.TaskError, "no task 'clik'", {"task": "clik"}),
    "a loss that is not a scalar": (
        functools.partial(small, loss_fn=lambda model, s: plait.layer("fc", nn.Linear, 2, 1)(s.x)),
        errors.FunctionError,
        r"the loss for TRAIN has shape \[2, 1\]: return one number",
        {},
    ),
    "a loss_fn that returns nothing": (
        functools.partial(small, loss_fn=lambda model, s: None),
        errors.FunctionError,
        "loss_fn for TRAIN returned NoneType: return the loss",
        {},
    ),
    "an optimizer_fn that returns nothing": (
        functools.partial(small, optimizer_fn=lambda model, task: None),
        errors.FunctionError,
        r"optimizer_fn of task None returned NoneType .*return \{optimizer",
        {},
    ),
    "an input_fn that returns nothing": (
        functools.partial(small, data=None),
        errors.DataError,
        "input_fn for TRAIN returned None: return a Sample",
        {},
    ),
    "an input_fn with an empty list": (
        functools.partial(small, data=[]),
        errors.DataError,
        "input 'TRAIN' has no data.*check that it is not empty",
        {},
    ),
    "a missing optimizer": (
        functools.partial(small, optimizer_fn=None, task="click"),
        errors.TaskError,
        r"task 'click' has a loss_fn but no optimizer_fn: write model.optimizer_fn\(",
        {},
    ),
    "a scope that matches no variable": (
        functools.partial(small, optimizer_fn=SCOPES({"towr": SGD})),
        errors.VariableError,
        "no trainable variable is in scope 'towr': the model has tower",
        {},
    ),
    "a variable in two scopes": (
        functools.partial(small, optimizer_fn=SCOPES({"tower": SGD, "tower/fc": SGD})),
        errors.VariableError,
        "variable 'tower/fc/weight' is in two scopes, 'tower' and 'tower/fc'",
        {},
    ),
    "a NaN loss": (
        functools.partial(small, loss_fn=nan_loss),
        errors.NanLossError,
        "the loss of TRAIN is nan, noticed at global step 4 .*: lower the learning rate",
        ON,
    ),
    "a checkpoint of another model": (
        functools.partial(small, loss_fn=wide_loss),
        errors.MismatchError,
        r"belongs to another model:\n  tower/fc/weight: \[1, 2\] in the checkpoint, \[5, 2\] in the model",
        {},
    ),
}


@pytest.fixture
def good(tmp_path):
    """A directory with good checkpoints, and the weights in the last."""
    model = small().compile()
    model.fit(efl.procedure_fn.train(3), checkpoint_dir=tmp_path / "run")
    return tmp_path / "run", {name: value.detach().clone() for name, value in model.variables().items()}


def assert_still_good(path, weights):
    info, tree = CheckpointDir(path).read_latest()
    assert info.step == 3
    assert all(torch.equal(tree["variables"][name], value) for name, value in weights.items())
    assert all(CheckpointDir(path).read(each) for each in CheckpointDir(path).list())
    assert not list(path.glob(".tmp*"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("save_steps", [1, None])
def test_ends_with_one_error_of_ours_and_leaves_the_last_good_checkpoint(good, case, save_steps):
    path, weights = good
    make, kind, words, asked = CASES[case]
    task = asked.get("task")
    project = asked.get("project_name", "default_prj")
    with pytest.raises(kind, match=words) as raised:
        make().fit(efl.procedure_fn.train(task=task), project_name=project, checkpoint_dir=path, save_steps=save_steps)
    assert isinstance(raised.value, errors.PlaitError)
    assert_still_good(path, weights)


@pytest.mark.parametrize("name", ["checkpoint_dir", "summary_dir"])
def test_a_directory_below_a_file_ends_before_the_first_step(tmp_path, name):
    (tmp_path / "file").write_text("in the way")
    model = small().compile()
    with pytest.raises(errors.PlaitError, match=r"file/run") as raised:
        model.fit(efl.procedure_fn.train(), **{name: tmp_path / "file" / "run"})
    assert isinstance(raised.value, (errors.CheckpointError, errors.ConfigError))
    assert int(model.global_step) == 0
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(good):
    path, weights = good
    path.chmod(0o500)
    try:
        with pytest.raises(errors.CheckpointError, match="cannot write a checkpoint in .*Permission denied"):
            small().fit(efl.procedure_fn.train(), checkpoint_dir=path, **ON)
    finally:
        path.chmod(0o700)
    assert_still_good(path, weights)


@pytest.mark.parametrize("writer", ["_write", "sync_file"])
@pytest.mark.parametrize("save_steps", [1, None])
def test_a_disk_that_fills_up_while_training(good, monkeypatch, writer, save_steps):
    path, weights = good
    model = small().compile()
    real = getattr(plait.variables.checkpoint, writer)

    def full(file, *args):
        if int(model.global_step) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return real(file, *args)

    monkeypatch.setattr(plait.variables.checkpoint, writer, full)
    with pytest.raises(
        errors.CheckpointError, match=r"cannot write a checkpoint in .*No space left.*Name a directory .*with room"
    ):
        model.fit(efl.procedure_fn.train(), checkpoint_dir=path, save_steps=save_steps, **ON)
    assert_still_good(path, weights)


PROGRAM = """
import functools, resource, sys
import torch
from torch import nn
from plait import efl, errors, layer

model = efl.Model()
model.input_fn(lambda model, mode: [{"x": torch.ones(2, 64)}] * 2)
model.loss_fn(lambda model, sample: layer("fc", nn.Linear, 64, 64)(sample.x).mean())
model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))
model.compile()
model.fit(efl.procedure_fn.train(), checkpoint_dir=sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    model.fit(efl.procedure_fn.train(), project_name="second", checkpoint_dir=sys.argv[1])
except errors.CheckpointError as error:
    print("ours:", error)
"""


def test_a_real_limit_on_file_sizes(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert done.stdout.startswith(f"ours: cannot write a checkpoint in {tmp_path / 'run'}"), done.stderr
    assert "Traceback" not in done.stderr
    info, tree = CheckpointDir(tmp_path / "run").read_latest()
    assert info.step == 2
    assert list(tree["variables"]["fc/weight"].shape) == [64, 64]
