"""The command `plait`: in this process with typer's runner, and once as people run it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from plait import __version__, cli, efl
from plait.errors import CheckpointError, ConfigError
from plait.export import load, versions

SCRIPT = """
import functools, json, sys
import torch
from plait import efl

model = efl.Model()
model.net = torch.nn.Linear(2, 1)
model.input_fn(lambda model, mode: efl.Sample({"x": torch.ones(4, 2)}))
model.loss_fn(lambda model, sample: model.net(sample.x).square().mean())
model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))
found = {}


def look(sess, ctx):
    found["width"] = ctx.get("model", "width")


def procedure(model):
    model.run_stage("look", look)
    efl.procedure_fn.train(max_step=2)(model)


model.compile().fit(procedure)
print(json.dumps({"argv": sys.argv, "name": __name__, **found}))
"""


@pytest.fixture
def plait_command(monkeypatch):
    """Run `plait` with these words; what a command changes in the process is put back."""
    monkeypatch.setattr(sys, "argv", ["plait"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PLAIT_CONFIG", "")
    return functools.partial(CliRunner().invoke, cli.app)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    model = efl.Model()
    model.net = torch.nn.Linear(2, 1)
    model.input_fn(lambda model, mode: efl.Sample({"x": torch.ones(4, 2)}))
    model.loss_fn(lambda model, sample: model.net(sample.x).square().mean())
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))
    model.compile().fit(efl.procedure_fn.train(max_step=3), project_name="cli", checkpoint_dir=folder)
    return folder


def test_version(plait_command):
    found = plait_command(["version"])
    assert (found.exit_code, found.output) == (0, f"{__version__}\n")


def test_help_names_every_command(plait_command):
    found = plait_command(["--help"])
    assert found.exit_code == 0
    assert all(f" {name} " in found.output for name in ("demo", "inspect", "run", "schedule", "version"))


def test_inspect_shows_tensors_stages_and_positions(plait_command, checkpoints):
    found = plait_command(["inspect", str(checkpoints)])
    assert found.exit_code == 0
    for word in ("net/weight", "[1, 2]", "journal of cli", "train", "step 3", "valid"):
        assert word in found.output


def test_inspect_of_one_checkpoint(plait_command, checkpoints):
    newest = max(checkpoints.glob("ckpt-*"))
    found = plait_command(["inspect", str(newest)])
    assert found.exit_code == 0
    assert found.output.startswith(f"{newest.name}: step 3")


@pytest.mark.parametrize(("name", "what"), [("", "a directory without checkpoints"), ("missing", "not a directory")])
def test_inspect_of_nothing(plait_command, tmp_path, name, what):
    found = plait_command(["inspect", str(tmp_path / name)])
    assert isinstance(found.exception, CheckpointError)
    assert what in str(found.exception)
    assert "name a directory of ckpt-* directories" in str(found.exception)


def test_an_error_of_our_own_is_one_line_and_exit_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["plait", "inspect", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("plait: ")
    assert err.count("\n") == 1


def write(folder, **config):
    script, file = folder / "script.py", folder / "plait.json"
    script.write_text(SCRIPT)
    file.write_text(json.dumps(config))
    return str(script), str(file)


def test_run_gives_a_script_its_arguments_and_fit_the_configuration(plait_command, tmp_path):
    kept = tmp_path / "kept"
    script, file = write(tmp_path, model={"width": 5}, checkpoint={"dir": str(kept)}, fit={"log_step": 1})
    found = plait_command(["run", script, "--config", file, "arg1", "--its-own", "2"])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout.splitlines()[-1])
    assert said == {"argv": [script, "arg1", "--its-own", "2"], "name": "__main__", "width": 5}
    assert list(kept.glob("ckpt-*"))


def test_run_reads_toml(plait_command, tmp_path):
    script, _ = write(tmp_path)
    (tmp_path / "plait.toml").write_text("[model]\nwidth = 7\n")
    found = plait_command(["run", script, "--config", str(tmp_path / "plait.toml")])
    assert json.loads(found.stdout.splitlines()[-1])["width"] == 7


def test_run_without_a_configuration(plait_command, tmp_path):
    found = plait_command(["run", write(tmp_path)[0]])
    assert json.loads(found.stdout.splitlines()[-1])["width"] is None


def test_run_refuses_a_bad_configuration_before_the_script_starts(plait_command, tmp_path):
    script, file = write(tmp_path, checkpoint={"directory": "x"})
    found = plait_command(["run", script, "--config", file])
    assert isinstance(found.exception, ConfigError)
    assert "unknown keys directory: it takes dir, save_steps" in str(found.exception)
    assert found.stdout == ""


def test_run_of_a_missing_script_says_so(plait_command, tmp_path):
    found = plait_command(["run", str(tmp_path / "missing.py")])
    assert found.exit_code == 2
    assert "missing.py" in found.output
    assert "does not exist" in found.output


STRATEGY = "5:0.1->0.4,10:0.4=>0.8,15:0.8,20:0.08"


def test_schedule_shows_each_stage_and_what_holds_after_the_last(plait_command):
    found = plait_command(["schedule", STRATEGY, "--samples", "640", "--batch-size", "32"])
    assert found.exit_code == 0
    assert [line.split() for line in found.stdout.splitlines()] == [
        ["epochs", "from", "step", "first", "middle", "last"],
        ["0-5", "0", "0.1", "0.25", "0.4"],
        ["5-10", "100", "0.4", "0.5657", "0.8"],
        ["10-15", "200", "0.8", "0.8", "0.8"],
        ["15-20", "300", "0.08", "0.08", "0.08"],
        ["20-", "400", "0.08"],
    ]


def test_schedule_has_sizes_of_its_own(plait_command):
    found = plait_command(["schedule", "2.5:1=>100"])
    assert [line.split() for line in found.stdout.splitlines()[1:]] == [
        ["0-2.5", "0", "1", "10", "100"],
        ["2.5-", "250", "100"],
    ]


def test_schedule_draws(plait_command, tmp_path):
    found = plait_command(["schedule", STRATEGY, "--plot", str(tmp_path / "out.png")])
    assert found.exit_code == 0
    assert found.stdout.endswith(f"drawn: {tmp_path / 'out.png'}\n")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_schedule_that_could_not_be_drawn_fails(plait_command, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = plait_command(["schedule", STRATEGY, "--plot", str(tmp_path / "out.png")])
    assert (found.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert "pip install 'plait[plot]'" in caplog.text


def test_schedule_says_where_a_strategy_is_wrong(plait_command):
    found = plait_command(["schedule", "5:0.1,3:0.2"])
    assert isinstance(found.exception, ConfigError)
    assert "wrong at character 7" in str(found.exception)
    assert "an epoch after 5" in str(found.exception)


def test_schedule_refuses_an_epoch_without_samples(plait_command):
    found = plait_command(["schedule", STRATEGY, "--samples", "0"])
    assert isinstance(found.exception, ConfigError)
    assert "num_samples is 0" in str(found.exception)


def test_export_writes_what_a_script_describes(plait_command, checkpoints, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT[: SCRIPT.index("found = {}")]
        + "model.compile()\n"
        + "efl.export(model, lambda model, sample: model.net(sample.x), {'x': torch.ones(2, 2)}, sys.argv[1])\n"
    )
    words = ["export", str(checkpoints), str(script), str(tmp_path / "a"), "--format", "torch"]
    found = plait_command(words)
    assert (found.exit_code, found.output) == (0, f"{tmp_path / 'a' / '1'}\n")
    assert load(tmp_path / "a" / "1").about["step"] == 3
    plait_command([*words, "--version", "best", "--out", str(tmp_path / "b")])
    assert versions(tmp_path / "b") == ["best"]
    plait_command([*words, "--version", "-1", "--out", str(tmp_path / "b")])
    assert versions(tmp_path / "b") == ["best", "1"]
    found = plait_command([*words, "--format", "sql"])
    assert isinstance(found.exception, ConfigError)


def test_an_unknown_command_is_refused(plait_command):
    found = plait_command(["fly"])
    assert found.exit_code == 2
    assert "No such command 'fly'" in found.output


def test_the_command_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-c", "from plait.cli import main; main()", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("plait: ")
    assert "Traceback" not in done.stderr
