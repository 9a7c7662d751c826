"""A script is run to export from a checkpoint what it trained: nothing is trained, and nothing is left behind."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from plait.engine import fit
from plait.errors import CheckpointError, ConfigError, MismatchError
from plait.export import load, versions
from plait.export.script import Asked, asked, export_script

MOX = """
import sys
import torch
from torch import nn
import plait
from plait import mox

log_dir, width = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
X = torch.linspace(-1, 1, 40).reshape(20, 2)


def model_fn(inputs, mode):
    out = plait.layer("fc", nn.Linear, 2, width)(inputs[0])
    spec = mox.ExportSpec({"x": inputs[0]}, {"out": out}, "mine") if mode == "EXPORT" else None
    return mox.ModelSpec(loss=out.square().mean(), log_info={"out": out.mean()}, export_spec=spec)


mox.run(
    input_fn=lambda mode: torch.utils.data.TensorDataset(X),
    model_fn=model_fn,
    optimizer_fn=mox.get_optimizer_fn("sgd", learning_rate=0.1),
    run_mode="TRAIN",
    batch_size=4,
    max_number_of_steps=7,
    log_dir=log_dir,
)
print("after")
"""

EFL = """
import functools, sys
import torch
from torch import nn
import helper_beside
from plait import data, efl

X = torch.linspace(-1, 1, 40).reshape(20, 2)
OPTIMIZER = OPTIMIZER_HERE
model = efl.Model()
model.net = nn.Linear(2, 1)
model.input_fn(lambda model, mode: data.TensorSource({"x": X}, batch_size=4))
model.loss_fn(lambda model, sample: model.net(sample.x).square().mean(1 if model.private_tasks or PRIVATE else None))
model.eval_fn(lambda model, sample: model.add_metric("size", model.net(sample.x).square().mean()))
model.optimizer_fn(efl.optimizer_fn.optimizer_setter(OPTIMIZER))
model.fit(efl.procedure_fn.train_and_eval(max_iter=2), checkpoint_dir=sys.argv[1])
print(model.history[-1]["metrics"]["size"])
efl.export(model, lambda model, sample: model.net(sample.x), {"x": X}, sys.argv[1] + "/export", version="mine")
print("after")
"""


@pytest.fixture
def script(tmp_path):
    """Write a script, run it as it stands, and give its path and its directory."""
    (tmp_path / "helper_beside.py").write_text("")

    def write(text, **changes):
        for word, value in changes.items():
            text = text.replace(word, value)
        (tmp_path / "script.py").write_text(text)
        return tmp_path / "script.py"

    return write


@pytest.fixture
def trained(script, tmp_path, monkeypatch, capsys):
    """The script has trained and written its checkpoints."""

    def train(text, **changes):
        path = script(text, **changes)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [str(path), str(tmp_path / "run")])
            patch.syspath_prepend(tmp_path)
            exec(compile(path.read_text(), path, "exec"), {"__name__": "__main__"})
        sys.modules.pop("helper_beside", None)
        capsys.readouterr()
        return path, tmp_path / "run"

    return train


def exported(path, run, *arguments, **settings):
    before = sys.argv, list(sys.path), fit.fit
    try:
        return export_script(Asked(checkpoint=run, **settings), path, [str(run), *arguments])
    finally:
        assert (sys.argv, sys.path, fit.fit) == before
        assert asked() is None
        sys.modules.pop("helper_beside", None)


def weights(where):
    found = load(where).run({"x": np.eye(3, 2, dtype=np.float32)})
    return next(iter(found.values()))


class TestOfMox:
    def test_where_and_what_the_script_says(self, trained, tmp_path, capsys):
        path, run = trained(MOX)
        where = exported(path, run)
        assert where == run / "export" / "mine"
        assert load(where).about["step"] == 7
        assert capsys.readouterr().out == "", "the script ends with the export"

    def test_what_is_asked_for_comes_first(self, trained, tmp_path):
        path, run = trained(MOX)
        where = exported(path, run, formats=["onnx", "torch"], version=-1, directory=tmp_path / "out")
        assert where == tmp_path / "out" / "1"
        assert load(where).about["formats"] == ["onnx", "torch"]
        checkpoint = next(one for one in run.iterdir() if one.name.startswith("ckpt-000000000000"))
        first = exported(path, checkpoint, version=-1, directory=tmp_path / "out")
        assert load(first).about["step"] == 0
        assert not np.allclose(weights(where), weights(first))

    def test_nothing_of_the_run_is_touched(self, trained):
        path, run = trained(MOX)
        before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}
        exported(path, run)
        assert {file: file.stat().st_mtime_ns for file in before} == before

    def test_a_checkpoint_of_another_model(self, trained):
        path, run = trained(MOX)
        with pytest.raises(MismatchError, match=r"fc/weight|\[1, 2\]"):
            exported(path, run, "3")


class TestOfEfl:
    SGD = {"OPTIMIZER_HERE": "functools.partial(torch.optim.SGD, lr=0.1)", "PRIVATE": "False"}

    def test_fit_takes_up_the_checkpoint(self, trained, tmp_path, capsys):
        path, run = trained(EFL, **self.SGD)
        where = exported(path, run, directory=tmp_path / "out", version=-1)
        about = load(where).about
        assert about["step"] == 10
        assert capsys.readouterr().out == f"{about['metrics']['size']}\n"
        np.testing.assert_array_equal(weights(where), weights(run / "export" / "mine"))

    @pytest.mark.slow
    def test_epsilon_goes_with_it(self, trained, tmp_path):
        private = "efl.privacy.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=2.0)"
        path, run = trained(EFL, OPTIMIZER_HERE=private, PRIVATE="True")
        where = exported(path, run, directory=tmp_path / "out")
        epsilon = load(where).about["epsilon"]
        assert epsilon == pytest.approx(load(run / "export" / "mine").about["epsilon"])
        assert epsilon > 0

    def test_a_version_that_is_there(self, trained):
        path, run = trained(EFL, **self.SGD)
        with pytest.raises(ConfigError, match="has a version mine already"):
            exported(path, run)


def test_a_script_that_exports_nothing(script, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"script.py has ended without an export: it has to call mox.run"):
        exported(script("print(1)"), tmp_path / "run")


def test_a_script_that_leaves_without_an_export(script, tmp_path):
    for words in ("sys.exit()", "sys.exit(0)"):
        with pytest.raises(ConfigError, match="ended without an export"):
            exported(script(f"import sys; {words}"), tmp_path)


def test_a_script_that_leaves(script, tmp_path):
    with pytest.raises(SystemExit, match="4"):
        exported(script("import sys; sys.exit(4)"), tmp_path)


def test_a_format_that_there_is_not(script, tmp_path):
    with pytest.raises(ConfigError, match="there is no format 'sql'"):
        exported(script("raise KeyError"), tmp_path, formats=["sql"])


def test_a_checkpoint_that_there_is_not(trained, tmp_path):
    path, _ = trained(MOX)
    with pytest.raises((CheckpointError, ConfigError), match="nowhere"):
        exported(path, tmp_path / "nowhere")
    assert versions(tmp_path / "run") == []
