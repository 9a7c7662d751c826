"""`import plait` costs little and brings nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.alone  # it measures how long things take

MAX_SECONDS = 0.3
HEAVY = [
    "rich",
    "typer",
    "tensorboard",
    "matplotlib",
    "scipy",
    "dp_accounting",
    "grpc",
    "fsspec",
    "google.protobuf",
    "torch.utils.tensorboard",
]

PROGRAM = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import plait
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


@pytest.fixture(scope="module")
def measured():
    """CPU seconds that `import plait` adds to `import torch`, the best of up to five; and the modules that it adds.

    The bytecode is kept, as it is where plait is installed: the first import may compile, the best one does not.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    best, modules = None, []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        seconds, modules = json.loads(done.stdout)
        best = seconds if best is None else min(best, seconds)
        if best <= MAX_SECONDS:
            break
    return best, modules


def test_it_takes_a_moment(measured):
    assert measured[0] <= MAX_SECONDS


@pytest.mark.parametrize("name", HEAVY)
def test_it_brings_nothing_heavy(measured, name):
    assert [module for module in measured[1] if module == name or module.startswith(f"{name}.")] == []


def test_it_brings_plait(measured):
    assert {"plait", "plait.efl", "plait.train"} <= set(measured[1])
