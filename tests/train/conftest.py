"""A small Estimator over made-up rows: y is the sum of three numbers."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from torch import nn

import plait
from plait import train

ROWS = 160


@pytest.fixture
def rows():
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return x, x.sum(1)


@pytest.fixture
def read(rows):
    """`read(shuffle=True, num_epochs=None)`: an input_fn."""

    def make(*, shuffle=False, num_epochs=1, batch_size=16, seed=0):
        x, y = rows
        return train.numpy_input_fn({"x": x}, y, batch_size, num_epochs, shuffle, seed=seed)

    return make


def model_fn(features, labels, mode, params):
    x = features["x"] if isinstance(features, dict) else features
    hidden = plait.layer("hidden", nn.Linear, 3, params.get("width", 4))(x).tanh()
    found = plait.layer("output", nn.Linear, params.get("width", 4), 1)(hidden).squeeze(1)
    if mode == train.ModeKeys.PREDICT:
        return train.EstimatorSpec(mode, predictions={"y": found, "twice": 2 * found})
    loss = (found - labels).square().mean()
    if mode == train.ModeKeys.EVAL:
        return train.EstimatorSpec(mode, loss=loss, eval_metric_ops={"rmse": plait.metrics.rmse(labels, found)})
    optimizer = train.AdamOptimizer(params.get("rate", 0.02))
    return train.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, train.get_global_step()))


@pytest.fixture
def sums():
    """`sums(model_dir=None, **settings)`: an Estimator."""

    def make(model_dir=None, *, function=model_fn, params=None, warm_start_from=None, **settings):
        config = train.RunConfig(**{"save_summary_steps": None, "log_step_count_steps": None, **settings})
        return train.Estimator(function, model_dir, config, params or {}, warm_start_from)

    return make


@pytest.fixture
def values():
    """The variables of an Estimator, as lists."""
    return lambda estimator: {
        name: estimator.get_variable_value(name).tolist() for name in estimator.get_variable_names()
    }


@pytest.fixture(autouse=True)
def _quiet():
    """The log of these runs is long; what is looked for in it is caught."""
    logger = logging.getLogger("plait")
    before = logger.level
    yield
    logger.setLevel(before)
