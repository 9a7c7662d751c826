"""`train_and_evaluate`: one run, evaluations of the living model, and the same end after a kill."""

from __future__ import annotations

import pytest
import torch

from plait import train
from plait.errors import ConfigError


class Crash(Exception):
    """Somebody pulled the plug."""


class CrashHook(train.SessionRunHook):
    def after_run(self, run_context, run_values):
        if run_context.session.global_step.value == 27:
            raise Crash


def specs(read, *, hooks=None, max_steps=40, throttle_secs=0, **more):
    return (
        train.TrainSpec(read(shuffle=True, num_epochs=None), max_steps, hooks),
        train.EvalSpec(read(), None, throttle_secs=throttle_secs, **more),
    )


def steps_of(estimator):
    return [found["global_step"] for found in estimator.model.history]


def test_it_evaluates_at_every_checkpoint_and_at_the_end(sums, read, tmp_path):
    estimator = sums(tmp_path, save_checkpoints_steps=15)
    found, exports = train.train_and_evaluate(estimator, *specs(read))
    assert steps_of(estimator) == [15, 30, 40]
    assert found["global_step"] == 40
    assert found == estimator.evaluate(read())
    assert exports == []


def test_evaluations_change_nothing(sums, read, values):
    plain = sums().train(read(shuffle=True, num_epochs=None), steps=40)
    both = sums(save_checkpoints_steps=10)
    train.train_and_evaluate(both, *specs(read))
    assert values(plain) == values(both)


def test_too_many_evaluations_are_left_out_but_not_the_last(sums, read):
    estimator = sums(save_checkpoints_steps=10)
    train.train_and_evaluate(estimator, *specs(read, throttle_secs=1000))
    assert steps_of(estimator) == [10, 40]


def test_by_seconds(sums, read):
    estimator = sums(save_checkpoints_secs=0.2)
    train.train_and_evaluate(estimator, *specs(read, max_steps=400))
    assert steps_of(estimator)[-1] == 400


def test_it_ends_with_the_data(sums, read):
    estimator = sums()
    found, _ = train.train_and_evaluate(estimator, train.TrainSpec(read()), train.EvalSpec(read()))
    assert found["global_step"] == 10
    assert steps_of(estimator) == [10]


def test_a_hook_that_stops_it_gets_a_last_evaluation(sums, read):
    estimator = sums(save_checkpoints_steps=10)
    found, _ = train.train_and_evaluate(estimator, *specs(read, hooks=[train.StopAtStepHook(last_step=13)]))
    assert found["global_step"] == 13
    assert steps_of(estimator) == [10, 13]


def test_a_run_that_was_killed_goes_on_to_the_bit(sums, read, tmp_path, values):
    whole, killed, resumed = (sums(tmp_path / name, save_checkpoints_steps=7) for name in ("a", "b", "b"))
    wanted, _ = train.train_and_evaluate(whole, *specs(read))
    with pytest.raises(Crash):
        train.train_and_evaluate(killed, *specs(read, hooks=[CrashHook()]))
    found, _ = train.train_and_evaluate(resumed, *specs(read))
    assert values(whole) == values(resumed)
    assert found == wanted
    assert resumed.model.history == whole.model.history


def test_what_was_reached_before_is_only_evaluated(sums, read, tmp_path):
    first, second = sums(tmp_path), sums(tmp_path)
    found, _ = train.train_and_evaluate(first, *specs(read))
    again, _ = train.train_and_evaluate(second, *specs(read))
    assert again == found
    more, _ = train.train_and_evaluate(second, *specs(read, max_steps=45))
    assert more["global_step"] == 45


def test_exporters_are_asked_after_evaluations(sums, read, tmp_path):
    receiver_fn = train.build_raw_serving_input_receiver_fn({"x": torch.zeros(2, 3)})
    exporters = [train.LatestExporter("latest", receiver_fn), train.FinalExporter("final", receiver_fn)]
    estimator = sums(tmp_path, save_checkpoints_steps=20)
    _, exports = train.train_and_evaluate(estimator, *specs(read, exporters=exporters))
    assert exports == [str(tmp_path / "export/latest/2"), str(tmp_path / "export/final/1")]
    assert steps_of(estimator) == [20, 40]
    with pytest.raises(ConfigError, match="below model_dir"):
        train.train_and_evaluate(sums(), *specs(read, exporters=exporters[1]))


def test_hooks_of_the_eval_spec_see_evaluations(sums, read):
    class Count(train.SessionRunHook):
        runs = 0

        def after_run(self, run_context, run_values):
            self.runs += 1

    hook = Count()
    train.train_and_evaluate(
        sums(save_checkpoints_steps=20),
        *specs(read, hooks=None, name="x")[:1],
        train.EvalSpec(read(), 4, hooks=[hook], throttle_secs=0),
    )
    assert hook.runs == 8


def test_mistakes_are_said(sums, read, rows):
    with pytest.raises(ConfigError, match="EvalSpec"):
        train.train_and_evaluate(sums(), specs(read)[0], None)
    fixed = train.EvalSpec(lambda: ({"x": rows[0]}, rows[1]), None)
    with pytest.raises(ConfigError, match="pass steps="):
        train.train_and_evaluate(sums(), specs(read)[0], fixed)
