"""A party that ends in any way ends its process, and the other one hears of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys

import torch
from torch import nn

import plait
from plait import efl

model = efl.FederalModel()
model.input_fn(lambda model, mode: plait.data.TensorSource({"x": torch.ones(8, 3)}, 4))
if model.federal_role == "leader":
    def loss_fn(model, sample):
        hidden = model.recv("hidden", require_grad=True)
        return (plait.layer("fc", nn.Linear, 3, 2)(sample.x) + hidden).square().mean()
else:
    def loss_fn(model, sample):
        model.send("hidden", plait.layer("fc", nn.Linear, 3, 2)(sample.x), require_grad=True)
model.loss_fn(loss_fn)
model.optimizer_fn(efl.optimizer_fn.optimizer_setter(lambda variables: torch.optim.SGD(variables, lr=0.1)))
model.compile()
if model.federal_role == sys.argv[1]:
    raise ValueError("between the two")
model.fit(efl.procedure_fn.train())
"""


@pytest.mark.parametrize("role", ["leader", pytest.param("follower", marks=pytest.mark.slow)])
def test_an_error_outside_of_plait_ends_both(tmp_path, role):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [str(Path(sys.executable).with_name("plait")), "federate", str(script), str(script), role]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
                          text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode != 0
    assert "ValueError: between the two" in done.stdout
    assert f"the {role} has ended" in done.stdout
    assert time.monotonic() - begun < 40
