"""Which journal a training goes on with."""

from __future__ import annotations

import json

import pytest

from plait import train
from plait.train.resuming import project_of, where_of


class Crash(Exception):
    """Somebody pulled the plug."""


class CrashHook(train.SessionRunHook):
    def after_run(self, run_context, run_values):
        if run_context.session.global_step.value >= 8:
            raise Crash


def test_a_training_that_ended_is_followed_by_the_next(sums, read, tmp_path):
    estimator = sums(tmp_path)
    assert estimator.prepare_training(read()).model is estimator.model
    assert project_of(estimator.model, tmp_path) == "estimator-1"
    for number in (2, 3):
        estimator.train(read(), steps=2)
        assert project_of(estimator.model, tmp_path) == f"estimator-{number}"


def test_an_interrupted_one_goes_on_if_its_input_is_the_same(sums, read, tmp_path):
    with pytest.raises(Crash):
        sums(tmp_path, save_checkpoints_steps=5).train(read(), [CrashHook()])
    estimator = sums(tmp_path)
    estimator.prepare_training(read())
    assert project_of(estimator.model, tmp_path) == "estimator-1"
    estimator.prepare_training(read(batch_size=3))
    assert project_of(estimator.model, tmp_path) == "estimator-2"


def test_a_file_that_cannot_be_read_is_passed_over(sums, read, tmp_path):
    estimator = sums(tmp_path, save_checkpoints_steps=2).train(read(), steps=4)
    newest = max(tmp_path.glob("ckpt-*")) / "state.json"
    state = json.loads(newest.read_text())
    assert state["journal"]["project"] == "estimator-1"
    newest.write_text("no JSON")
    assert project_of(estimator.model, tmp_path) in ("estimator-1", "estimator-2")


def test_workers_that_go_their_own_ways_have_their_own_directories(sums, read, tmp_path, monkeypatch):
    estimator = sums(tmp_path)
    estimator.prepare_training(read())
    assert where_of(estimator.model, tmp_path) == tmp_path
    monkeypatch.setattr(type(estimator.model.strategy), "worker_id", 2, raising=False)
    monkeypatch.setattr(estimator.model.strategy, "worker_id", 2, raising=False)
    assert where_of(estimator.model, tmp_path) == tmp_path / "worker-2"
