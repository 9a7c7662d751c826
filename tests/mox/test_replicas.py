"""`num_gpus` above 1: replicas in one process share each step's batch."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

import plait
from plait import mox
from plait.data import Sample, SequenceSource
from plait.data.datasets import Dataset, column_source
from plait.errors import DataError
from plait.mox.replicas import JoinedSource, join, shares

from .runs import BATCHES, PREDICT, SAMPLES, X, Y, lines, model_fn, run, weights


@pytest.fixture
def two_replicas():
    mox.set_flag("num_gpus", 2)


class TestJoinedSource:
    def test_batches_are_joined_and_the_last_may_be_fewer(self):
        source = JoinedSource(SequenceSource(BATCHES), 2)
        rows = [len(x) for x, _ in source.batches(0, 0)]
        assert rows == [8, 8, 4]
        assert torch.equal(next(source.batches(0, 1))[0], X[8:16])

    def test_names_stay(self):
        batch = {"x": torch.ones(2, 3), "name": ["a", "b"]}
        joined = next(JoinedSource(SequenceSource([batch, batch]), 2).batches(0, 0))
        assert joined["x"].shape == (4, 3)
        assert joined["name"] == ["a", "b", "a", "b"]

    def test_batches_that_do_not_fit_are_an_error(self):
        source = JoinedSource(SequenceSource([(torch.ones(2, 3),), (torch.ones(2, 4),)]), 2)
        with pytest.raises(DataError, match="2 replicas do not join"):
            next(source.batches(0, 0))

    def test_it_knows_what_it_was_made_of(self):
        inner = SequenceSource(BATCHES, num_epochs=3)
        source = JoinedSource(inner, 2)
        assert (source.num_epochs, source.seekable) == (3, True)
        assert source.fingerprint() == {"kind": "joined", "replicas": 2, "batches": inner.fingerprint()}


class TestShares:
    def test_rows_are_shared_out_in_order(self):
        parts = shares(Sample.of((X[:7], Y[:7])), 2)
        assert [len(part[0]) for part, _ in parts] == [3, 4]
        assert [weight for _, weight in parts] == [3 / 7, 4 / 7]
        assert torch.equal(torch.cat([part[0] for part, _ in parts]), X[:7])

    def test_fewer_rows_than_replicas_stay_together(self):
        ((part, weight),) = shares(Sample.of({"x": X[:1]}), 2)
        assert (len(part["x"]), weight) == (1, 1.0)


class TestJoin:
    def test_numbers_are_means_over_the_rows(self):
        specs = [mox.ModelSpec(torch.tensor(float(n)), log_info={"n": torch.tensor(float(n))}) for n in (1, 5)]
        joined = join(specs, [0.25, 0.75], log_first=False)
        assert (joined.loss.item(), joined.log_info["n"].item()) == (4.0, 4.0)
        assert join(specs, [0.25, 0.75], log_first=True).log_info["n"].item() == 1.0

    def test_lists_of_losses_are_joined_one_by_one(self):
        specs = [mox.ModelSpec([torch.tensor(1.0 * n), torch.tensor(2.0 * n)]) for n in (1, 3)]
        assert [loss.item() for loss in join(specs, [0.5, 0.5], log_first=True).loss] == [2.0, 4.0]


class TestRun:
    @pytest.mark.parametrize("data", [SAMPLES, BATCHES], ids=["samples", "batches"])
    def test_two_replicas_equal_one_on_the_joined_batch(self, data, two_replicas):
        together = weights(run(data=data, auto_batch=data is SAMPLES, max_number_of_steps=7))
        mox.set_flag("num_gpus", 1)
        joined = [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:], Y[16:])]
        alone = weights(run(data=joined, auto_batch=False, max_number_of_steps=7))
        for name, value in alone.items():
            torch.testing.assert_close(together[name], value, rtol=1e-5, atol=1e-7)

    def test_outputs_are_one_dict_for_each_step_and_replica(self, tmp_path, two_replicas):
        run(log_dir=str(tmp_path), max_number_of_steps=1)
        seen = []
        run(PREDICT, checkpoint_path=str(tmp_path), output_fn=seen.append, output_every_n_steps=2, auto_batch=True)
        assert [len(outputs) for outputs in seen] == [4, 2]  # (step 0, replica 0), (step 0, replica 1), (step 1, ...)
        order = torch.cat([torch.from_numpy(step["y"]) for outputs in seen for step in outputs])
        assert torch.equal(order, Y)

    @pytest.mark.parametrize("first", [True, False])
    def test_the_log_shows_the_first_replica_or_the_mean(self, first, two_replicas, caplog):
        mox.set_flag("log_first_clone", first)

        def says_rows(inputs, mode):
            spec = model_fn(inputs, mode)
            return mox.ModelSpec(spec.loss, log_info={"first": inputs[0][0, 0]})

        with caplog.at_level(logging.INFO, logger="plait"):
            run(model_fn=says_rows, max_number_of_steps=1)
        shown = float(re.search(r"first: (\S+)", lines(caplog)[0])[1])
        wanted = X[0, 0] if first else (X[0, 0] + X[4, 0]) / 2
        assert shown == pytest.approx(wanted.item(), abs=1e-3)

    def test_a_name_made_twice_by_one_replica_is_still_an_error(self, two_replicas):
        def twice(inputs, mode):
            plait.layer("fc", nn.Linear, 2, 1)
            return model_fn(inputs, mode)

        with pytest.raises(plait.errors.VariableError, match="'fc' is made twice"):
            run(model_fn=twice, max_number_of_steps=1)


class Watch(mox.AggregativeSessionRunHook):
    """Notes what it sees after each run."""

    seen: list[tuple[int, float]]

    def __init__(self, number, together, seen):
        self.info = {"first": number}
        self._together = together
        self._seen = seen

    def after_run(self, run_context, run_values):
        self._seen.append((id(self), round(float(self.info["first"]), 4)))

    def support_aggregation(self):
        return self._together

    def support_sync_workers(self):
        return False

    def run_inter_mode(self):
        return False


@pytest.mark.parametrize("together", [True, False])
def test_one_hook_for_all_replicas_or_one_for_each(together, two_replicas):
    seen = []

    def watched(inputs, mode):
        spec = model_fn(inputs, mode)
        return mox.ModelSpec(spec.loss, hooks=[Watch(inputs[0][0, 0], together, seen)])

    run(model_fn=watched, max_number_of_steps=2)
    hooks = len({number for number, _ in seen})
    values = [value for _, value in seen]
    first, second, third, fourth = (round(X[row, 0].item(), 4) for row in (0, 4, 8, 12))
    if together:
        assert (hooks, len(values)) == (1, 2)
        assert values == pytest.approx([(first + second) / 2, (third + fourth) / 2], abs=1e-3)
    else:
        assert (hooks, values) == (2, [first, second, third, fourth])


def test_training_is_resumed_exactly(tmp_path, two_replicas):
    whole = weights(run(max_number_of_steps=6))
    run(max_number_of_steps=3, log_dir=str(tmp_path))
    assert all(torch.equal(whole[n], v) for n, v in weights(run(max_number_of_steps=6, log_dir=str(tmp_path))).items())


def test_an_evaluation_is_of_all_rows(tmp_path, two_replicas, caplog):
    run(log_dir=str(tmp_path), max_number_of_steps=1)
    found = run("EVAL", checkpoint_path=str(tmp_path)).metric_values("EVAL")
    mox.set_flag("num_gpus", 1)
    alone = run("EVAL", checkpoint_path=str(tmp_path)).metric_values("EVAL")
    assert found == pytest.approx(alone, rel=1e-5)


def test_a_remainder_that_is_dropped_is_dropped_of_the_joined_batches():
    dataset = Dataset("rows", 20, {"x": torch.tensor}, drop_remainder=True)
    (x,) = dataset.get(["x"])
    joined = JoinedSource(column_source(x).batched(4), 2)
    assert [len(batch[0]) for batch in joined.batches(0, 0)] == [8, 8]
    kept = JoinedSource(column_source(Dataset("rows", 20, {"x": torch.tensor}).get(["x"])[0]).batched(4), 2)
    assert [len(batch[0]) for batch in kept.batches(0, 0)] == [8, 8, 4]


def test_a_field_without_rows_goes_to_every_replica():
    parts = shares(Sample.of({"x": torch.arange(4), "scale": torch.tensor(2.0)}), 2)
    assert [float(part["scale"]) for part, _ in parts] == [2.0, 2.0]
