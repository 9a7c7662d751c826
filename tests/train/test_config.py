"""Settings of Estimators: defaults are TensorFlow's, and what cannot work is said when it is written."""

from __future__ import annotations

import pytest

from plait import train
from plait.errors import ConfigError


def test_defaults_are_tensorflows():
    config = train.RunConfig()
    assert (config.save_checkpoints_secs, config.save_checkpoints_steps) == (600, None)
    assert (config.keep_checkpoint_max, config.save_summary_steps, config.log_step_count_steps) == (5, 100, 100)
    spec = train.EvalSpec(dict)
    assert (spec.steps, spec.throttle_secs, spec.start_delay_secs, spec.name) == (100, 600, 120, None)
    assert train.TrainSpec(dict).max_steps is None
    assert train.WarmStartSettings("x").vars_to_warm_start == ".*"


def test_steps_take_the_place_of_seconds():
    config = train.RunConfig(save_checkpoints_steps=50)
    assert (config.save_checkpoints_secs, config.save_checkpoints_steps) == (None, 50)
    changed = config.replace(save_checkpoints_secs=5, model_dir="d")
    assert (changed.save_checkpoints_secs, changed.save_checkpoints_steps) == (5, None)
    assert changed.model_dir == "d"
    assert config.model_dir is None
    assert train.RunConfig(keep_checkpoint_max=0).keep_checkpoint_max is None
    assert (
        train.RunConfig(save_checkpoints_steps=None, save_checkpoints_secs=None).replace().save_checkpoints_secs is None
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: train.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1), "not both"),
        (lambda: train.RunConfig(save_checkpoints_steps=-1), "save_checkpoints_steps=-1"),
        (lambda: train.RunConfig(keep_checkpoint_every_n_hours=1), "keep_checkpoint_max"),
        (lambda: train.RunConfig().replace(modeldir="x"), "modeldir"),
        (lambda: train.TrainSpec(3), "give a function"),
        (lambda: train.TrainSpec(dict, max_steps=0), "max_steps=0"),
        (lambda: train.EvalSpec(dict, steps=0), "steps=0"),
        (lambda: train.EvalSpec(dict, throttle_secs=-1), "throttle_secs=-1"),
        (lambda: train.VocabInfo("a", 1, 0, "b", axis=2), "axis"),
    ],
)
def test_what_cannot_work_is_said(make, text):
    with pytest.raises(ConfigError, match=text):
        make()
