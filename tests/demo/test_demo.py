from __future__ import annotations

import functools
import hashlib
from importlib import resources

import numpy as np
import pytest
import torch

from plait import demo, efl
from plait.data import TensorSource
from plait.errors import ConfigError
from plait.variables.checkpoint import CheckpointDir


@pytest.fixture
def short(monkeypatch):
    """Two passes: enough to go through everything, too few to learn well."""
    monkeypatch.setattr(demo, "PASSES", 2)


def newest(checkpoints):
    found = CheckpointDir(checkpoints).read_latest()
    assert found is not None
    return found[1]


def test_the_data_is_what_digits_md_says():
    file = resources.files("plait.demo").joinpath("digits.npz")
    assert len(file.read_bytes()) < 100_000
    with resources.as_file(file) as path, np.load(path, allow_pickle=False) as arrays:
        assert sorted(arrays) == ["images", "labels"]
        images, labels = arrays["images"], arrays["labels"]
    assert (images.shape, images.dtype, images.min(), images.max()) == ((1797, 8, 8), np.uint8, 0, 16)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # scikit-learn's first image, a nought
    assert images[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_training_and_held_out_images_are_all_of_them_and_always_the_same():
    images, digits = demo.load()
    assert (images.shape, digits.shape) == ((1797, 1, 8, 8), (1797,))
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert digits.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    train, test = (demo.input_fn("digit", 0, efl.Model(), mode) for mode in (efl.MODE.TRAIN, efl.MODE.EVAL))
    assert (train.rows, test.rows) == (1437, 360)
    assert (train.shuffle, test.shuffle) == (True, False)
    together = torch.cat([train.tensors[1], test.tensors[1]])
    assert torch.equal(together, digits)
    assert hashlib.sha256(digits.numpy().tobytes()).hexdigest().startswith("0a708bf25364e1b5")


def test_even_numbers_have_label_one():
    digits, evens = (demo.input_fn(task, 0, efl.Model(), efl.MODE.EVAL).tensors[1] for task in ("digit", "even"))
    assert torch.equal(evens == 1, digits % 2 == 0)


def test_the_tasks_share_the_tower_and_its_optimizer():
    model = demo.build()
    assert {name.partition("/")[0] for name in model.variables()} == {"tower", "digit", "even"}
    towers = {}
    for task in demo.TASKS:
        by_scope = {scope: opt for opt, (_, scope) in model.opt_to_vars(task).items()}
        assert set(by_scope) == {"tower", task}
        towers[task] = by_scope["tower"]
    assert towers["digit"] is towers["even"]


def test_the_whole_demo(tmp_path, capsys):
    """What `make demo` promises: above 0.95 on both tasks, a curve, checkpoints."""
    found = demo.run(tmp_path / "out")
    assert set(found) == {"digit", "even"}
    assert min(found.values()) > 0.95
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoints", "curve.png"]
    state = newest(tmp_path / "out" / "checkpoints")
    assert state["global_step"] == 1800
    assert [entry["metrics"]["accuracy"] for entry in state["history"][-2:]] == list(found.values())
    said = capsys.readouterr().out
    assert f"{found['digit']:.4f}" in said
    assert f"{found['even']:.4f}" in said
    assert str(tmp_path / "out" / "curve.png") in said
    assert said.endswith(f"plait inspect {tmp_path / 'out' / 'checkpoints'}\n")


def test_a_finished_run_is_done_again_and_other_files_stay(tmp_path, short):
    first = demo.run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    assert demo.run(tmp_path) == first
    after = CheckpointDir(tmp_path / "checkpoints").list()
    assert [(info.step, info.sequence) for info in after] == [(0, 1), (180, 2)]
    assert newest(tmp_path / "checkpoints")["global_step"] == 180
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / "checkpoints" / "notes.txt").read_text() == "mine"


def test_a_run_that_was_cut_off_goes_on(tmp_path, short, monkeypatch, caplog):
    whole = demo.run(tmp_path / "whole")
    loss_fn, calls = demo.loss_fn, []

    def failing(*args):
        calls.append(1)
        if len(calls) > 150:
            raise KeyboardInterrupt
        return loss_fn(*args)

    with monkeypatch.context() as patch:
        patch.setattr(demo, "loss_fn", failing)
        patch.setattr(efl.Model, "fit", functools.partialmethod(efl.Model.fit, config=save_often(tmp_path)))
        with pytest.raises(KeyboardInterrupt):
            demo.run(tmp_path / "cut")
    caplog.set_level("INFO", "plait")
    assert demo.run(tmp_path / "cut") == whole
    assert any("going on at global step 1" in record.getMessage() for record in caplog.records)
    ends = [newest(tmp_path / name / "checkpoints")["variables"] for name in ("whole", "cut")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def save_often(directory):
    config = directory / "often.toml"
    config.write_text("[checkpoint]\nsave_steps = 50\n")
    return config


def test_checkpoints_of_somebody_else_are_left_alone(tmp_path):
    model = efl.Model()
    model.net = torch.nn.Linear(1, 1)
    model.input_fn(lambda model, mode: TensorSource({"x": torch.ones(4, 1)}, 2))
    model.loss_fn(lambda model, sample: model.net(sample.x).sum())
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))
    model.fit(efl.procedure_fn.train(), project_name="mine", checkpoint_dir=tmp_path / "checkpoints")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="project 'mine'.*--output DIR"):
        demo.run(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_without_matplotlib_the_summary_names_no_curve(tmp_path):
    said = demo.summary({"digit": 0.98, "even": 0.97}, tmp_path / "checkpoints", None)
    assert "curve" not in said
    assert "accuracy of digit  0.9800" in said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_other_seeds_do_as_well(tmp_path, seed):
    assert min(demo.run(tmp_path, seed=seed).values()) > 0.95
