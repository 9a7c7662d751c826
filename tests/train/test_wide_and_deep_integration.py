"""The example of wide and deep: alone, with the ready Estimator, with a parameter server, and in two parties."""

from __future__ import annotations

import importlib
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plait import train

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train" / "wide_and_deep"
CENSUS = Path("~/.cache/plait/census/leader.npz").expanduser()
NAMES = ["alone", "common", "table"]


@pytest.fixture
def example(monkeypatch):
    """The example's modules, which are forgotten afterwards: other examples have some of these names, too."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


def made_table(table, folder, rows):
    """Rows that were thrown with dice, in the form of the real ones."""
    dice = random.Random(0)
    made = {}
    for part, count in rows.items():
        lines = []
        for _ in range(count):
            row = [str(dice.randrange(5)) for _ in range(41)]
            lines.append([*row, "50000+." if int(row[0]) + int(row[39]) + dice.randrange(3) > 6 else "- 50000."])
        made[part] = list(zip(*lines, strict=True))
    table.read = lambda archive, part: made[part]
    for party in ("leader", "follower"):
        np.savez(folder / f"{party}.npz", **table.make(party, b""))


@pytest.fixture
def folder(example, tmp_path):
    made_table(example["table"], tmp_path, {"train": 1600, "test": 600})
    return tmp_path


def test_it_learns_and_its_variables_belong_to_parties(example, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["alone.py", "--data", str(folder), "--epochs", "2"])
    example["alone"].main()
    found = [float(value) for value in re.findall(r"test auc (\d\.\d+)", capsys.readouterr().out)]
    assert len(found) == 2
    assert found[0] < found[1]


def test_columns_are_named_and_split(example, folder, monkeypatch):
    common = example["common"]
    monkeypatch.setattr(sys, "argv", ["alone.py", "--data", str(folder)])
    args = common.arguments("")
    names = [set(common.features(party, args, "train")) for party in common.PARTIES]
    assert not names[0] & names[1]
    assert names[0] | names[1] == set(common.NAMES.values())
    batch = next(example["alone"].input_fn(args, "train")().batches(0, 0))
    assert batch[0]["education"].min() >= 1
    assert isinstance(
        example["alone"].input_fn(args, "test")(), train.numpy_input_fn({"x": [1]}, shuffle=False)().__class__
    )


def aucs(*command):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(value) for value in re.findall(r"test auc (\d\.\d+)", done.stdout)]


def three_ways(folder, *more):
    plait, scripts = (
        [sys.executable, "-m", "plait"],
        [str(EXAMPLE / name) for name in ("alone.py", "leader.py", "follower.py")],
    )
    arguments = ["--data", str(folder), *more]
    alone = aucs(sys.executable, "-W", "error", scripts[0], *arguments)
    launched = [*plait, "launch", "--workers", "2", "--servers", "1", scripts[0], "--batch", "256"]
    return alone, aucs(*launched, *arguments), aucs(*plait, "federate", *scripts[1:], *arguments)


@pytest.mark.slow
def test_it_is_the_same_in_three_ways(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    alone, served, split = three_ways(folder, "--epochs", "3")
    assert len(alone) == 3
    assert served == pytest.approx(alone, abs=3e-4)
    assert split == pytest.approx(alone, abs=3e-4)


@pytest.mark.slow
@pytest.mark.skipif(not CENSUS.exists(), reason="the census was not downloaded: run the example first")
def test_it_reaches_what_it_should_on_the_census(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert aucs(sys.executable, str(EXAMPLE / "alone.py"))[-1] >= 0.945
    assert aucs(sys.executable, str(EXAMPLE / "ready.py"))[-1] >= 0.945
