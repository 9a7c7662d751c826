"""Where `mox.run` loads from and what it saves: checkpoints, summaries."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import plait
from plait import mox
from plait.engine.build import current_model
from plait.errors import ConfigError, MismatchError, PlaitError
from plait.variables.checkpoint import CheckpointDir

SPEC = importlib.util.spec_from_file_location("mox_runs", Path(__file__).with_name("runs.py"))
runs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(runs)

TRAIN, EVAL, PREDICT = mox.ModeKeys.TRAIN, mox.ModeKeys.EVAL, mox.ModeKeys.PREDICT
Y = runs.Y
by_hand, model_fn, run, same, weights = runs.by_hand, runs.model_fn, runs.run, runs.same, runs.weights


def saved_steps(directory):
    """Of the last step there may be two: after the step, and after the stage."""
    return sorted({info.step for info in CheckpointDir(directory).list()})


class TestCheckpoints:
    def test_one_at_the_start_and_one_at_the_end(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=7)
        assert saved_steps(tmp_path) == [0, 7]

    def test_save_model_steps(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=7, save_model_steps=3)
        assert saved_steps(tmp_path) == [0, 3, 6, 7]

    def test_save_model_secs(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=3, save_model_secs=1e-9)
        assert saved_steps(tmp_path) == [0, 1, 2, 3]

    def test_seconds_win_over_steps(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=7, save_model_secs=3600, save_model_steps=1)
        assert saved_steps(tmp_path) == [0, 7]

    def test_none_is_not_given(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=2, save_model_secs=None, save_model_steps=1)
        assert saved_steps(tmp_path) == [0, 1, 2]

    @pytest.mark.parametrize("setting", [{"save_model_steps": 0}, {"save_model_secs": -1}])
    def test_bad_intervals(self, tmp_path, setting):
        with pytest.raises(ConfigError, match="write a (whole )?number above 0"):
            run(log_dir=str(tmp_path), **setting)

    def test_a_raised_limit_goes_on_to_the_same_bits(self, tmp_path):
        for steps in (3, 7, 13):
            model = run(log_dir=str(tmp_path), max_number_of_steps=steps)
            assert model.global_step.value == steps
        assert same(weights(model), by_hand(13))

    @pytest.mark.parametrize("steps", [5, 3])
    def test_at_its_last_step_or_beyond_it_says_so(self, tmp_path, caplog, steps):
        before = weights(run(log_dir=str(tmp_path), max_number_of_steps=5))
        assert "nothing was trained" not in caplog.text
        model = run(log_dir=str(tmp_path), max_number_of_steps=steps)
        assert same(weights(model), before)
        words = rf"{re.escape(str(tmp_path))} has ended, at step 5 .*max_number_of_steps={steps}: nothing was trained"
        (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert re.search(words + ".*Raise max_number_of_steps, or choose another log_dir", said.getMessage())

    def test_a_lower_limit_than_an_interrupted_run_has_reached_says_so(self, tmp_path, caplog):
        def dying(inputs, mode):
            if current_model() is not None and current_model().global_step.value == 5:
                raise KeyboardInterrupt
            return model_fn(inputs, mode)

        with pytest.raises(KeyboardInterrupt):
            run(model_fn=dying, log_dir=str(tmp_path), max_number_of_steps=9, save_model_steps=1)
        caplog.clear()
        build_model = run(log_dir=str(tmp_path), max_number_of_steps=2)
        assert build_model.global_step.value == 5
        assert "has ended, at step 5 with max_number_of_steps=2: nothing was trained" in caplog.text

    def test_log_dir_comes_before_checkpoint_path(self, tmp_path, trained):
        log_dir = str(tmp_path / "log")
        run(log_dir=log_dir, max_number_of_steps=3)
        model = run(log_dir=log_dir, max_number_of_steps=4, checkpoint_path=trained[0])
        assert same(weights(model), by_hand(4))

    def test_with_a_checkpoint_in_log_dir_checkpoint_path_is_not_even_looked_at(self, tmp_path):
        log_dir, gone = str(tmp_path / "log"), str(tmp_path / "gone")
        run(log_dir=log_dir, max_number_of_steps=3)
        assert run(log_dir=log_dir, max_number_of_steps=4, checkpoint_path=gone).global_step.value == 4

    def test_without_a_checkpoint_in_log_dir_variables_come_from_checkpoint_path(self, tmp_path, trained):
        directory, variables = trained
        log_dir = str(tmp_path / "log")
        still = mox.get_optimizer_fn("sgd", learning_rate=0.0)
        model = run(log_dir=log_dir, max_number_of_steps=2, checkpoint_path=directory, optimizer_fn=still)
        assert same(weights(model), variables)
        assert model.global_step.value == 2

    @pytest.mark.parametrize("mode", [EVAL, PREDICT])
    def test_the_other_modes_need_checkpoint_path(self, mode, trained):
        words = f"{mode} needs checkpoint_path=, the directory of a run or a file of variables"
        with pytest.raises(ConfigError, match=f"{words}$"):
            run(mode, output_fn=print)
        instead = re.escape(f": write checkpoint_path={trained[0]!r} instead of log_dir")
        with pytest.raises(ConfigError, match=words + instead):
            run(mode, log_dir=trained[0], output_fn=print)

    def test_a_model_without_variables_needs_none(self):
        def bare(inputs, mode):
            return mox.ModelSpec(log_info={"mean": inputs[1].mean()})

        assert run(EVAL, model_fn=bare).metric_values(plait.efl.MODE.EVAL)["mean"] == pytest.approx(float(Y.mean()))

    @pytest.mark.parametrize("mode", [TRAIN, EVAL])
    def test_a_checkpoint_path_that_is_not_there(self, tmp_path, mode):
        with pytest.raises(PlaitError, match="nowhere"):
            run(mode, checkpoint_path=str(tmp_path / "nowhere"))

    def test_a_checkpoint_of_another_model(self, trained):
        def other(inputs, mode):
            loss = plait.layer("other", nn.Linear, 2, 1)(inputs[0]).mean()
            return mox.ModelSpec(loss=loss, log_info={"loss": loss})

        for mode in (TRAIN, EVAL):
            with pytest.raises(MismatchError, match="nothing in .* is wanted by the model: it has other/weight"):
                run(mode, model_fn=other, checkpoint_path=trained[0])

    def test_an_evaluation_needs_every_variable_a_training_does_not(self, trained):
        def wider(inputs, mode):
            loss = model_fn(inputs, mode).loss + plait.get_variable("more", [1]).sum()
            return mox.ModelSpec(loss=loss, log_info={"loss": loss})

        with pytest.raises(MismatchError, match="lacks variable 'more'"):
            run(EVAL, model_fn=wider, checkpoint_path=trained[0])
        still = mox.get_optimizer_fn("sgd", learning_rate=0.0)
        model = run(model_fn=wider, checkpoint_path=trained[0], optimizer_fn=still)
        assert torch.equal(model.variables()["fc/weight"], trained[1]["fc/weight"])


class TestSummaries:
    def scalars(self, directory):
        events = EventAccumulator(str(directory))
        events.Reload()
        return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    def test_are_written_every_so_many_steps(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=10, save_summary_steps=4)
        assert self.scalars(tmp_path) == {"train/loss": [1, 5, 9], "train/bias": [1, 5, 9]}

    def test_zero_writes_none(self, tmp_path):
        run(log_dir=str(tmp_path), max_number_of_steps=10, save_summary_steps=0)
        assert list(tmp_path.glob("events*")) == []

    def test_an_evaluation_writes_none(self, tmp_path, trained):
        run(EVAL, log_dir=str(tmp_path / "log"), checkpoint_path=trained[0])
        assert not (tmp_path / "log").exists()
