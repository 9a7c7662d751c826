"""Where variables begin: another checkpoint, other names, another vocabulary."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

import plait
from plait import train
from plait.errors import ConfigError, MismatchError


@pytest.fixture
def trained(sums, read, tmp_path):
    return sums(tmp_path / "old").train(read(), steps=5)


def test_all_variables_begin_as_there(sums, read, trained, tmp_path):
    warm = sums(params={"rate": 1e-30}, warm_start_from=tmp_path / "old").train(read(), steps=1)
    assert warm.model.global_step.value == 1
    for name in trained.get_variable_names():
        np.testing.assert_allclose(warm.get_variable_value(name), trained.get_variable_value(name), rtol=1e-6)


def test_patterns_choose(sums, read, trained, tmp_path):
    settings = train.WarmStartSettings(tmp_path / "old", vars_to_warm_start=["hidden/.*"])
    warm = sums(params={"rate": 1e-30}, warm_start_from=settings).train(read(), steps=1)
    cold = sums(params={"rate": 1e-30}).train(read(), steps=1)
    assert np.allclose(warm.get_variable_value("hidden/bias"), trained.get_variable_value("hidden/bias"))
    assert np.array_equal(warm.get_variable_value("output/bias"), cold.get_variable_value("output/bias"))


def test_a_checkpoint_of_ones_own_comes_first(sums, read, trained, tmp_path, values):
    sums(tmp_path / "own").train(read(), steps=3)
    shutil.copytree(tmp_path / "own", tmp_path / "copy")
    again = sums(tmp_path / "own", warm_start_from=tmp_path / "old").train(read(), steps=1)
    assert values(again) == values(sums(tmp_path / "copy").train(read(), steps=1))


def test_names_may_differ(sums, read, trained, tmp_path):
    settings = train.WarmStartSettings(
        tmp_path / "old", vars_to_warm_start=None, var_name_to_prev_var_name={"hidden/bias": "hidden/bias"}
    )
    warm = sums(params={"rate": 1e-30}, warm_start_from=settings).train(read(), steps=1)
    assert np.allclose(warm.get_variable_value("hidden/bias"), trained.get_variable_value("hidden/bias"))
    for name in ("var_name_to_prev_var_name", "var_name_to_vocab_info"):
        wrong = train.WarmStartSettings(tmp_path / "old", **{name: {"nothing": "x"}})
        with pytest.raises(ConfigError, match="'nothing'"):
            sums(warm_start_from=wrong).train(read(), steps=1)


def words_fn(features, labels, mode, params):
    table = plait.get_variable("table", [params["words"], 2], initializer=params["start"])
    loss = table[features].sum()
    return train.EstimatorSpec(mode, loss=loss, train_op=train.GradientDescentOptimizer(1.0))


def test_rows_follow_their_words(tmp_path):
    (tmp_path / "old.txt").write_text("cat\ndog\nowl\n", encoding="utf-8")
    (tmp_path / "new.txt").write_text("owl\nfox\ncat\n", encoding="utf-8")

    def input_fn():
        return [(torch.arange(3), torch.zeros(3))]

    old = train.Estimator(words_fn, tmp_path / "old", params={"words": 3, "start": torch.arange(6.0).view(3, 2)})
    old.train(input_fn)
    info = train.VocabInfo(str(tmp_path / "new.txt"), 3, 1, str(tmp_path / "old.txt"))
    settings = train.WarmStartSettings(tmp_path / "old", var_name_to_vocab_info={"table": info})
    warm = train.Estimator(words_fn, params={"words": 4, "start": torch.full((4, 2), 9.0)}, warm_start_from=settings)
    warm.train(input_fn)
    rows = old.get_variable_value("table")
    wanted = np.stack([rows[2] - 1, [8, 8], rows[0] - 1, [9, 9]])  # one step of -1 each, but for the bucket
    assert np.array_equal(warm.get_variable_value("table"), wanted)
    short = train.VocabInfo(str(tmp_path / "new.txt"), 3, 5, str(tmp_path / "old.txt"))
    wrong = train.WarmStartSettings(tmp_path / "old", var_name_to_vocab_info={"table": short})
    with pytest.raises(ConfigError, match="5 buckets"):
        train.Estimator(words_fn, params={"words": 4, "start": torch.zeros(4, 2)}, warm_start_from=wrong).train(
            input_fn
        )


def test_what_does_not_fit_is_refused(sums, read, trained, tmp_path):
    with pytest.raises(MismatchError, match="leave it out"):
        sums(params={"width": 5}, warm_start_from=tmp_path / "old").train(read(), steps=1)
    settings = train.WarmStartSettings(tmp_path / "old", var_name_to_prev_var_name={"hidden/bias": "hidden/missing"})
    with pytest.raises(MismatchError, match="hidden/missing"):
        sums(warm_start_from=settings).train(read(), steps=1)


class Noting:
    """Batches without an end, and whether somebody has closed them."""

    num_epochs, batch_size, seekable = None, 16, True

    def __init__(self, rows):
        self.rows = [torch.from_numpy(one[:16]) for one in rows]
        self.open = 0

    def batches(self, epoch, start):
        self.open += 1
        try:
            while True:
                yield {"x": self.rows[0]}, self.rows[1]
        finally:
            self.open -= 1

    def fingerprint(self):
        return {"kind": "noting"}


def test_what_fails_before_the_first_step_leaves_no_readers_behind(sums, rows, trained, tmp_path):
    source = Noting(rows)
    estimator = sums(params={"width": 5}, warm_start_from=tmp_path / "old")
    with pytest.raises(MismatchError, match="leave it out"):
        estimator.train(lambda: source, steps=1)
    assert source.open == 0
    fixed = train.EvalSpec(lambda: ({"x": rows[0]}, rows[1]), None)
    living = sums()
    with pytest.raises(ConfigError, match="pass steps="):
        train.train_and_evaluate(living, train.TrainSpec(lambda: source, max_steps=2), fixed)
    assert source.open == 0
    living.train(lambda: source, steps=2)
    assert living.model.global_step.value == 2
