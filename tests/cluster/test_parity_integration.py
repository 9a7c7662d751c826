"""Two workers in step equal one process on the joined batch: collective, and with one and two servers."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
from safetensors.torch import load_file

from plait.cluster.settings import Distributed

from .clusters import PROGRAMS, Cluster

SECONDS = 120


@functools.cache
def one_process():
    """The variables of one process that trains on the joined batches."""
    spec = importlib.util.spec_from_file_location("parity", PROGRAMS / "parity.py")
    parity = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parity)
    model = parity.make(1)
    model.compile(strategy=Distributed())
    model.fit(
        lambda model: (
            [
                model.run_stage(task, parity.train_loop(model, task, step=parity.STEPS, across_passes=True))
                for task in parity.TASKS
            ]
            and None
        ),
        log_step=1000,
    )
    return {name: value.detach().clone() for name, value in model.variables().items()}


@pytest.mark.parametrize(
    ("mode", "servers"), [("collective", 0), pytest.param("sync", 1, marks=pytest.mark.slow), ("sync", 2)]
)
def test_two_workers_in_step_equal_one_process_on_the_joined_batch(mode, servers, tmp_path):
    out = tmp_path / "weights.safetensors"
    with Cluster(tmp_path, "parity.py", out, mode, servers=servers) as cluster:
        assert cluster.wait(SECONDS) == 0, cluster.output()[-4000:]
    found, expected = load_file(out), one_process()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        limit = 1e-10 if value.dtype == torch.float64 else 1e-4
        difference = (found[name] - value).abs().max() / value.abs().max()
        assert difference <= limit, f"{name}: {difference}"
