"""Algorithms on several processes: together they do what one does on the joined batch, and their files say the same."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import warnings
from pathlib import Path

import pytest
import torch

from plait.launch import run
from plait.variables.bank import read_variables

PROGRAM = Path(__file__).with_name("training_program.py")
EXAMPLES = Path(__file__).parents[2] / "examples" / "openks"
SPEC = importlib.util.spec_from_file_location("openks_training_program", PROGRAM)
program = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(program)


def launched(command, tmp_path, *, restarts=0, **counts):
    """The lines that the processes showed."""
    out = io.StringIO()
    code = run([str(part) for part in command], max_restarts=restarts, log_dir=tmp_path / "logs", out=out, **counts)
    assert code == 0, out.getvalue()[-4000:]
    return out.getvalue()


def trained(tmp_path, *, flag, save, servers=0, **options):
    """What each of two workers reports."""
    given = {
        "flag": flag, "optimizer": "adagrad", "strategy": {}, "start": 0, "steps": 50, "model_dir": None,
        "kill": None, "uneven": False, "save": str(tmp_path / save), "here": str(tmp_path), **options,
    }  # fmt: skip
    launched([PROGRAM, json.dumps(given)], tmp_path, workers=2, servers=servers, restarts=2 if given["kill"] else 0)
    return [json.loads((tmp_path / f"worker-{index}.json").read_text()) for index in range(2)]


def alone(optimizer, steps, *, sparse):
    """Plain PyTorch on the joined batches."""
    model = program.net(0, sparse=sparse)
    plain = program.OPTIMIZERS[optimizer](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about rows of gradients
        for step in range(steps):
            plain.zero_grad()
            program.loss_of(model, step).backward()
            plain.step()
    return model


def difference(directory, model):
    """The largest, relative to the largest value of its variable."""
    found = read_variables(directory)
    wanted = {name.replace(".", "/"): value for name, value in model.state_dict().items()}
    assert found.keys() == wanted.keys()
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items())


def exported_equals(directory, model):
    ids, _ = program.batch(99)
    found = torch.export.load(directory / "model.pt2").module()(ids=ids)["output"]
    return torch.allclose(found, model(ids), rtol=1e-9, atol=1e-12)


def test_collective_workers_equal_one_process(tmp_path):
    first, second = trained(tmp_path, flag=1, optimizer="adam", save="saved", uneven=True)
    model = alone("adam", 50, sparse=False)
    assert difference(tmp_path / "saved", model) < 1e-10
    assert [first["talk"], second["talk"]] == [[[3, 1.0], ["a", "b"]], [[3, 1.0], ["c"]]]
    assert (first["targets"], second["targets"]) == (["output"], [])
    assert exported_equals(tmp_path / "saved-export", model)
    assert first["left"] == ["another worker has left the loop: its data ended", True]


@pytest.mark.slow
def test_parameter_servers_equal_one_process_and_go_on_with_another_number_of_them(tmp_path):
    first, second = trained(tmp_path, flag=0, servers=2, save="saved", uneven=True)
    model = alone("adagrad", 50, sparse=True)
    assert difference(tmp_path / "saved", model) < 1e-10
    assert [first["talk"], second["talk"]] == [[[3, 1.0], ["a", "b"]], [[3, 1.0], ["c"]]]
    assert exported_equals(tmp_path / "saved-export", model)
    assert first["left"] == ["another worker has left the loop: its data ended", True]
    trained(tmp_path, flag=0, servers=1, start=50, steps=20, save="later", model_dir=str(tmp_path / "saved"))
    assert difference(tmp_path / "later", alone("adagrad", 70, sparse=True)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [{"mode": "half_async"}, {"mode": "async"}, {"mode": "geo", "geo_steps": 5}],
    ids=lambda one: one["mode"],
)
def test_servers_that_do_not_wait_for_all(tmp_path, strategy):
    found = trained(tmp_path, flag=0, servers=1, optimizer="sgd", steps=200, strategy=strategy, save="saved")
    for one in found:
        assert sum(one["losses"][-20:]) < 0.5 * sum(one["losses"][:20])
    model = program.net(0, sparse=True)
    saved = {name.replace("/", "."): value for name, value in read_variables(tmp_path / "saved").items()}
    model.load_state_dict(saved)
    assert sum(program.loss_of(model, step).item() for step in range(20)) < 0.5 * sum(found[0]["losses"][:20])


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "servers", "worker"), [(1, 0, 1), (0, 1, 1), (0, 2, 0)])
def test_a_script_that_saves_now_and_then_survives_a_kill(tmp_path, flag, servers, worker):
    kind = "adagrad" if servers else "adam"
    trained(tmp_path, flag=flag, servers=servers, optimizer=kind, save="saved", steps=40, kill=[worker, 25])
    assert difference(tmp_path / "saved", alone(kind, 40, sparse=servers > 0)) < 1e-10
    assert "ended with SIGKILL" in "".join(path.read_text() for path in (tmp_path / "logs").glob("worker-*.log"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{"local_sgd": 4}, {"gradient_merge": 5}], ids=lambda one: next(iter(one)))
def test_workers_that_talk_now_and_then(tmp_path, strategy):
    first, second = trained(tmp_path, flag=1, optimizer="adam", strategy=strategy, save="saved", steps=50)
    assert sum(first["losses"][-5:] + second["losses"][-5:]) < 0.9 * sum(first["losses"][:5] + second["losses"][:5])
    assert read_variables(tmp_path / "saved").keys() == {
        name.replace(".", "/") for name in program.net(0, sparse=False).state_dict()
    }


@pytest.mark.parametrize(("name", "servers", "least"), [("collective", 0, 0.85), ("parameter_server", 1, 0.95)])
def test_the_examples_on_two_workers(tmp_path, name, servers, least):
    out = launched([EXAMPLES / f"{name}.py", tmp_path / "saved"], tmp_path, workers=2, servers=servers)
    assert {"[worker 0] worker_index: 0, step: 0", "[worker 1] worker_index: 1, step: 0"} <= set(
        re.findall(r"\[worker \d\] worker_index: \d, step: 0", out)
    )
    assert float(re.search(r"(\d\.\d+) of 128", out)[1]) >= least
    assert any((tmp_path / "saved").iterdir())
