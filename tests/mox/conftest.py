"""What the tests of `mox` share."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest

from plait.mox.flags import reset_flags

SPEC = importlib.util.spec_from_file_location("mox_runs", Path(__file__).with_name("runs.py"))
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)


@pytest.fixture(autouse=True)
def fresh_flags(monkeypatch, caplog):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    caplog.set_level(logging.INFO, "plait")
    yield
    reset_flags()


@pytest.fixture
def trained(tmp_path):
    """A directory with a training of ten steps, and its variables."""
    model = runs.run(log_dir=str(tmp_path / "trained"), max_number_of_steps=10)
    return str(tmp_path / "trained"), runs.weights(model)
