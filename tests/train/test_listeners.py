"""Listeners hear of every checkpoint, before it is made and when it is on disk."""

from __future__ import annotations

import pytest

from plait import train
from plait.variables.checkpoint import CheckpointDir


class Listener(train.CheckpointSaverListener):
    def __init__(self, directory, stop_at=None):
        self.heard = []
        self.directory = CheckpointDir(directory)
        self.stop_at = stop_at

    def begin(self):
        self.heard.append("begin")

    def before_save(self, session, global_step_value):
        self.heard.append(("before", global_step_value))

    def after_save(self, session, global_step_value):
        assert global_step_value in {info.step for info in self.directory.list()}
        self.heard.append(("after", global_step_value))
        return self.stop_at is not None and global_step_value >= self.stop_at

    def end(self, session, global_step_value):
        self.heard.append(("end", global_step_value))


def test_each_save_is_told_of(sums, read, tmp_path):
    listener = Listener(tmp_path)
    estimator = sums(tmp_path, save_checkpoints_steps=10, keep_checkpoint_max=None)
    estimator.train(read(num_epochs=None), steps=25, saving_listeners=[listener])
    assert listener.heard[0] == "begin"
    assert [step for what, step in listener.heard[1:] if what == "before"] == [0, 10, 20, 25]
    assert [step for what, step in listener.heard[1:] if what == "after"] == [0, 10, 20, 25]
    assert listener.heard[-1] == ("end", 25)
    assert listener.heard.index(("before", 10)) < listener.heard.index(("after", 10))


def test_a_listener_may_end_the_training(sums, read, tmp_path):
    listener = Listener(tmp_path, stop_at=10)
    estimator = sums(tmp_path, save_checkpoints_steps=10, keep_checkpoint_max=None)
    estimator.train(read(num_epochs=None), steps=100_000, saving_listeners=[listener])
    assert 10 <= estimator.model.global_step.value < 100_000


def test_the_base_does_nothing():
    listener = train.CheckpointSaverListener()
    listener.begin()
    listener.before_save(None, 1)
    assert listener.after_save(None, 1) is None
    listener.end(None, 1)


@pytest.mark.parametrize("model_dir", [None])
def test_without_checkpoints_nobody_hears_anything(sums, read, model_dir, tmp_path):
    listener = Listener(tmp_path)
    sums(model_dir).train(read(), steps=2, saving_listeners=[listener])
    assert listener.heard == []
