"""Private training by two workers: the joined batch's sums, and the same noise altogether."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plait import efl

from .private_program import CLIP, JOINED, make, net_of

PROGRAM = Path(__file__).with_name("private_program.py")
SECONDS = 100


def launched(directory, noise, rows, *more, mode="auto", servers=0):
    """What each of two workers found."""
    directory.mkdir(exist_ok=True)
    command = [
        "launch",
        "--workers",
        "2",
        "--servers",
        str(servers),
        "--log-dir",
        str(directory / "logs"),
        str(PROGRAM),
    ]
    command += [str(directory), str(noise), str(rows), mode, *map(str, more)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from plait.cli import main; main()", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
    assert process.returncode == 0, output[-4000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def one_process(noise, rows):
    model = make(1, noise, rows)
    model.compile(session_config={"device": "cpu"})
    model.fit(efl.procedure_fn.train())
    return model


def assert_alike(found, model, tolerance=1e-5):
    for values, expected in zip(found["weights"], model.net.parameters(), strict=True):
        assert torch.allclose(torch.tensor(values), expected.detach().flatten(), atol=tolerance, rtol=0)


WAYS = [pytest.param("auto", 0, id="collective"), pytest.param("sync", 1, id="server", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("mode", "servers"), WAYS)
def test_two_workers_are_one_process_on_the_joined_batch(tmp_path, mode, servers):
    rows = 96 if servers else 90  # without servers, a short batch of one worker counts for its rows
    expected = one_process(0.0, rows)
    for found in launched(tmp_path, 0.0, rows, mode=mode, servers=servers):
        assert_alike(found, expected)
        assert found["step"] == 12


def moved(found):
    """How far each variable has come from where it began."""
    return torch.cat(
        [
            torch.tensor(values) - start.detach().flatten()
            for values, start in zip(found["weights"], net_of().parameters(), strict=True)
        ]
    )


@pytest.mark.parametrize(("mode", "servers"), WAYS)
def test_two_workers_have_the_noise_of_one(tmp_path, mode, servers):
    first, second = launched(tmp_path, 3.0, 96, "", 1, mode=mode, servers=servers)
    assert first["weights"] == second["weights"]
    assert moved(first).std().item() == pytest.approx(CLIP * 3.0 / JOINED, rel=0.02)
    assert first["epsilon"] == second["epsilon"]


@pytest.mark.slow
def test_workers_that_do_not_wait_release_with_all_of_the_noise(tmp_path):
    for found in launched(tmp_path, 3.0, 96, "", 1, mode="async", servers=1):
        # two pushes, each divided by its own worker's rows
        assert moved(found).std().item() == pytest.approx(2**0.5 * CLIP * 3.0 / (JOINED // 2), rel=0.02)
        assert found["step"] == 2


@pytest.mark.slow
def test_a_resumed_group_is_the_uninterrupted_one(tmp_path):
    launched(tmp_path / "first", 1.0, 96, tmp_path / "saved", 5)
    resumed = launched(tmp_path / "second", 1.0, 96, tmp_path / "saved", 9)
    whole = launched(tmp_path / "whole", 1.0, 96, tmp_path / "other", 9)
    for one, other in zip(resumed, whole, strict=True):
        assert one["weights"] == other["weights"]
        assert one["epsilon"] == other["epsilon"]
        assert one["step"] == other["step"] == 9
