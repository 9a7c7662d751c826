"""The examples run as they stand, say what they promise, and leave the directory as it was."""

from __future__ import annotations

import csv
import logging
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(
    path.relative_to(EXAMPLES).as_posix()
    for path in EXAMPLES.rglob("*.py")
    if path.parent.parent.name != "federal" and path.parent.name != "wide_and_deep"
)
"""Those of two parties, and those that are run in several ways, have tests of their own."""


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


def test_digits(run, tmp_path):
    out = run("efl/digits.py", "checkpoints")
    assert re.findall(r"(\w+): accuracy", out) == ["digit", "even"]
    assert min(numbers(out)) > 0.95
    assert any((tmp_path / "checkpoints").iterdir())


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


@pytest.fixture
def logged(run, caplog):
    """Run an example and return what it printed, and what it logged without the tables."""

    def run_example(name, *arguments):
        with caplog.at_level(logging.INFO, "plait"):
            out = run(name, *arguments)
        lines = [record.getMessage() for record in caplog.records if "\n" not in record.getMessage()]
        caplog.clear()
        return out, lines

    return run_example


def test_softmax_regression(logged):
    _, lines = logged("mox/softmax_regression.py")
    training = [line for line in lines if line.startswith("step: ") and "(global step: 200)" not in line]
    assert [line.partition("(")[0] for line in training] == ["step: 0", "step: 50", "step: 100", "step: 150"]
    assert numbers(training[0])[1] == 2.303  # the logarithm of 10: it starts knowing nothing
    assert numbers(training[-1])[1] < 0.1
    evaluation = next(line for line in lines if line.startswith("step: 39(global step: 200)"))
    assert numbers(evaluation)[2] > 0.75


def test_softmax_regression_again_has_nothing_left_to_train(logged):
    logged("mox/softmax_regression.py", "log_dir")
    _, lines = logged("mox/softmax_regression.py", "log_dir")
    assert any("at step 200 with max_number_of_steps=200: nothing was trained" in line for line in lines)


def test_feed_hook(logged):
    out, lines = logged("mox/feed_hook.py")
    step = "{'x': array(1., dtype=float32)}"
    assert out == f"[{step}, {step}]\n" * 2
    assert re.fullmatch(r"step: 0\(global step: 0\)\tsample/sec: [0-9.]+\tx: 1\.000", lines[0])


def test_gan(run):
    out = run("mox/gan.py")
    assert out.count("over 200 steps") == 5
    assert numbers(out)[0] > 0.5
    assert numbers(out)[-1] < 0.2


def test_outputs(run, tmp_path):
    out = run("mox/outputs.py", "outputs.csv")
    file = tmp_path / "outputs.csv"
    assert out == f"{file.stat().st_size} bytes in outputs.csv\n"
    rows = list(csv.DictReader(file.read_text().splitlines()))
    right = [int(row["prediction"]) == (float(row["x"]) > 0) * 2 + (float(row["y"]) > 0) for row in rows]
    assert len(rows) == 320
    assert sum(right) / len(right) > 0.9


def test_early_stopping(logged):
    _, lines = logged("mox/early_stopping.py")
    evaluations = [line for line in lines if line.startswith("[EarlyStopping]")]
    steps = [line for line in lines if line.startswith("step: ")]
    stopping = r"\[EarlyStopping\] stopping after step 79: accuracy has not got better than 0\.\d+ in 3 evaluations"
    assert re.fullmatch(stopping, evaluations.pop())
    assert [re.fullmatch(r"\[EarlyStopping\] step: (\d+) accuracy: 0\.\d{3}", line)[1] for line in evaluations] == [
        "19", "39", "59", "79",
    ]  # fmt: skip
    form = r"step: (\d+)\(global step: (\d+)\)\tsample/sec: \d+\.\d{3}\tloss: \d\.\d{3}\taccuracy: \d\.\d{3}"
    assert [re.fullmatch(form, line).groups() for line in steps] == [(str(n), str(n)) for n in range(0, 80, 10)]
    assert lines.index(evaluations[0]) == 2  # between those of steps 10 and 20


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_piecewise(logged, optimizer):
    out, lines = logged("mox/piecewise.py", "--optimizer", optimizer, "--gradient_clip", "5")
    assert re.findall(r"epoch +([\d.]+): ([\d.]+)", out) == [
        ("0", "0.1000"), ("2.5", "0.2500"), ("5", "0.4000"), ("7.5", "0.5657"), ("10", "0.8000"), ("12.5", "0.8000"),
        ("15", "0.0800"), ("20", "0.0800"),
    ]  # fmt: skip
    losses = [numbers(line)[1] for line in lines if line.startswith("step: ")]
    assert losses[-1] < losses[0]


def test_one_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-W", "error", str(EXAMPLES / "efl/train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("after 300 steps")
    assert "INFO:plait:step: 100(global step: 100)\tsample/sec: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_pictures(run, tmp_path):
    out = run("mox/pictures.py", "digits")
    found = re.search(r"accuracy (\d\.\d+) on (\d+) pictures held out", out)
    assert float(found[1]) >= 0.97
    assert int(found[2]) >= 350
    assert (tmp_path / "digits" / "split" / "train" / "labels.txt").exists()


@pytest.mark.slow
def test_reptile(run):
    scratch, learnt = numbers(run("openks/reptile.py"))[-2:]
    assert learnt - scratch >= 20


def test_collective(run, tmp_path):
    out = run("openks/collective.py", "exported")
    assert out.count("worker_index: 0, step: ") == 3
    assert numbers(out)[-1] > 0.8
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == ["model.json", "model.pt2"]


def test_export(run, tmp_path):
    out = run("mox/export.py", "log_dir").splitlines()
    assert out[0] == "version 1, of step 300: onnx"
    assert numbers(out[1])[0] > 0.85
    assert re.search(r"the first picture is digit \d$", out[1])
    version = tmp_path / "log_dir" / "export" / "1"
    assert sorted(path.name for path in version.iterdir()) == ["labels.txt", "model.json", "model.onnx"]


def test_parameter_server(run, tmp_path):
    out = run("openks/parameter_server.py", "saved")
    assert out.count("worker_index: 0, step: ") == 8
    assert numbers(out)[-1] > 0.95
    assert any((tmp_path / "saved").iterdir())


def test_people_whom_two_companies_share(run):
    said = run("psi/people.py").splitlines()
    assert said[0] == "4 customers of the shop, 4 of the bank, 3 of both"
    assert {line.split(",")[0] for line in said[1:4]} == {"José García", "Grace Hopper", "李雷"}
    births = [re.findall(r"\d{4}-\d\d-\d\d", line) for line in said[1:4]]
    assert all(left == right for left, right in births)
    assert said[4] == "the same rows in the same order at both: True"
