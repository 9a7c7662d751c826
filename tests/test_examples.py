"""The examples run as they stand, say what they promise, and leave the directory as it was."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py"))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run an example in an empty directory and return what it printed."""

    def run_example(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def numbers(text):
    return [float(found) for found in re.findall(r"\d+\.\d+", text)]


def test_every_example_is_tested():
    text = Path(__file__).read_text()
    assert SCRIPTS
    assert [name for name in SCRIPTS if text.count(f'"{name}"') == 0] == []


def test_train(run):
    out = run("efl/train.py")
    assert "after 300 steps" in out
    assert numbers(out)[-1] < 0.001


def test_train_and_eval(run, tmp_path):
    out = run("efl/train_and_eval.py", "checkpoints")
    assert re.findall(r"step (\d+): auc", out) == ["64", "128", "192", "256"]
    assert min(numbers(out)) > 0.85
    assert any((tmp_path / "checkpoints").iterdir())


def test_train_and_eval_again_has_nothing_left_to_do(run):
    first = run("efl/train_and_eval.py", "checkpoints")
    assert run("efl/train_and_eval.py", "checkpoints") == first


def test_cotrain(run):
    out = run("efl/cotrain.py")
    click, buy = (int(found) for found in re.findall(r"(\d+) steps", out))
    assert click + buy == 200
    assert 120 < click < 180
    assert min(numbers(out)) > 0.9


def test_stages(run, tmp_path):
    out = run("efl/stages.py")
    first, second, before, after = numbers(out)
    assert first == second
    assert after < before
    assert list(tmp_path.iterdir()) == []


def test_monitored(run, tmp_path):
    out = run("train/monitored.py").splitlines()
    assert out[:2] == ["begin: no session yet", "after_create_session: at step 0"]
    assert re.fullmatch(r"end: loss 0\.00\d\d at step \d+", out[2])
    assert list(tmp_path.iterdir()) == []


def test_one_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-W", "error", str(EXAMPLES / "efl/train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("after 300 steps")
    assert "INFO:plait:step: 100(global step: 100)\tsample/sec: " in done.stderr
    assert list(tmp_path.iterdir()) == []
