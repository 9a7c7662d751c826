"""Meta-training that is killed, between meta-steps and inside one, ends with the bits of one that never was."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait import efl
from plait.data.episodes import EpisodeSource, tensor_classes
from plait.engine.meta import fomaml, inner_adam, maml, reptile, reptile_eval

CALLS_TO_DIE_AT = (11, 40)
"""Calls of the loss function in the first process and in the second: in the second meta-step, and four later."""


def train(kind: str, checkpoints: str | None, die_at: int) -> dict:
    calls = 0

    def loss_fn(model, sample):
        nonlocal calls
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(model.net(sample.x), sample.y)

    def eval_fn(model, sample):
        logits = model.net(sample.x)[-len(sample.query_y) :]
        model.add_metric("accuracy", efl.metrics.accuracy(sample.query_y, logits))

    def input_fn(model, mode):
        points = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        classes = tensor_classes(points, torch.arange(60) % 6)
        return EpisodeSource(classes, 3, 4, 2, tasks=3 if mode is efl.MODE.TRAIN else None)

    def procedure(model):
        if kind == "reptile":
            reptile(6, inner_iters=3, inner_batch=5)(model)
            reptile_eval(3, inner_iters=3)(model)
        else:
            maml(3, inner_steps=2)(model)
            fomaml(5, inner_steps=2)(model)

    torch.manual_seed(1)
    model = efl.Model()
    model.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    model.input_fn(input_fn).loss_fn(loss_fn).eval_fn(eval_fn)
    optimizer = inner_adam(1e-2) if kind == "reptile" else functools.partial(torch.optim.Adam, lr=1e-2)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(optimizer))
    model.fit(procedure, checkpoint_dir=checkpoints, save_steps=1)
    return {
        "variables": {name: value.tolist() for name, value in model.variables().items()},
        "optimizer": repr(model.optimizers()[0].state_dict()),
        "history": model.history,
        "global_step": int(model.global_step),
    }


def run(kind: str, checkpoints: Path, die_at: int) -> tuple[int, str]:
    command = [sys.executable, __file__, kind, str(checkpoints), str(die_at)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize("kind", ["reptile", pytest.param("maml", marks=pytest.mark.slow)])
def test_killed_inside_a_meta_step(kind, tmp_path):
    expected = train(kind, None, -1)
    for calls in CALLS_TO_DIE_AT:
        assert run(kind, tmp_path, calls)[0] == -signal.SIGKILL
    code, out = run(kind, tmp_path, -1)
    assert code == 0
    assert json.loads(out) == expected


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
