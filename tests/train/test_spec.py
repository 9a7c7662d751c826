"""`EstimatorSpec`: what each mode needs."""

from __future__ import annotations

import inspect

import pytest
import torch

import plait
from plait import train
from plait.errors import ConfigError, FunctionError
from plait.train.spec import measurement_of

LOSS = torch.zeros(())


def test_the_fields_are_tensorflows():
    assert list(inspect.signature(train.EstimatorSpec).parameters) == [
        "mode", "predictions", "loss", "train_op", "eval_metric_ops", "export_outputs", "training_chief_hooks",
        "training_hooks", "scaffold", "evaluation_hooks", "prediction_hooks",
    ]  # fmt: skip
    assert (train.ModeKeys.TRAIN, train.ModeKeys.EVAL, train.ModeKeys.PREDICT) == ("train", "eval", "infer")


@pytest.mark.parametrize(
    ("mode", "given", "text"),
    [
        ("train", {"loss": LOSS}, "no train_op"),
        ("train", {"train_op": lambda params: None}, "no loss"),
        ("eval", {}, "no loss"),
        ("infer", {"loss": LOSS}, "no predictions"),
        ("eval", {"loss": LOSS, "eval_metric_ops": {"x": (1, 2)}}, "plait.metrics"),
    ],
)
def test_each_mode_has_its_needs(mode, given, text):
    with pytest.raises(FunctionError, match=text):
        train.EstimatorSpec(mode, **given).check(mode)


def test_a_spec_of_another_mode_is_refused():
    with pytest.raises(FunctionError, match="'eval'"):
        train.EstimatorSpec("eval", loss=LOSS).check("train")


def test_a_scaffold_is_refused():
    with pytest.raises(ConfigError, match="scaffold"):
        train.EstimatorSpec("eval", loss=LOSS, scaffold=object())


def test_a_pair_of_value_and_update_is_one_metric():
    pair = tuple(plait.metrics.mean(torch.ones(3)))
    assert measurement_of("x", pair) is pair[0]


def test_hooks_belong_to_modes():
    hooks = [train.SessionRunHook() for _ in range(4)]
    spec = train.EstimatorSpec(
        "train",
        training_hooks=[hooks[0]],
        training_chief_hooks=[hooks[1]],
        evaluation_hooks=[hooks[2]],
        prediction_hooks=(hooks[3],),
    )
    assert spec.hooks("train", chief=True) == hooks[:2]
    assert spec.hooks("train", chief=False) == hooks[:1]
    assert spec.hooks("eval", chief=True) == [hooks[2]]
    assert spec.hooks("infer", chief=True) == [hooks[3]]
