"""`Estimator`: one living model that trains, evaluates and predicts; checkpoints, and what goes on from them."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import plait
from plait import feature_column as fc
from plait import train
from plait.errors import ConfigError, DataError, FunctionError, MismatchError
from plait.variables import checkpoint


def test_it_trains_evaluates_and_predicts(sums, read, rows):
    estimator = sums()
    before = estimator.evaluate(read())
    assert estimator.train(read(shuffle=True, num_epochs=None), steps=200) is estimator
    after = estimator.evaluate(read())
    assert after["global_step"] == 200
    assert before["global_step"] == 0
    assert after["loss"] < before["loss"] / 10
    assert after["rmse"] == pytest.approx(after["loss"] ** 0.5, rel=1e-6)
    found = list(estimator.predict(read()))
    assert len(found) == len(rows[0])
    assert np.mean([(one["y"] - y) ** 2 for one, y in zip(found, rows[1], strict=True)]) == pytest.approx(
        after["loss"], rel=1e-4
    )


def test_training_is_a_bare_loops_bit_for_bit(sums, read, rows):
    estimator = sums()
    estimator.train(read(), steps=10)
    hidden, output = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    model = plait.Model(seed=0)
    with model.scope():
        hidden, output = plait.layer("hidden", torch.nn.Linear, 3, 4), plait.layer("output", torch.nn.Linear, 4, 1)
    optimizer = train.AdamOptimizer(0.02)([*hidden.parameters(), *output.parameters()])
    x, y = map(torch.from_numpy, rows)
    for place in range(0, 160, 16):
        optimizer.zero_grad()
        batch = slice(place, place + 16)
        (output(hidden(x[batch]).tanh()).squeeze(1) - y[batch]).square().mean().backward()
        optimizer.step()
    assert np.array_equal(estimator.get_variable_value("hidden/weight"), hidden.weight.detach().numpy())
    assert np.array_equal(estimator.get_variable_value("output/bias"), output.bias.detach().numpy())


def test_evaluation_uses_the_living_model(sums, read, tmp_path, monkeypatch):
    """Nothing is built again, and nothing is read from disk."""
    estimator = sums(tmp_path)
    estimator.train(read(), steps=5)
    estimator.evaluate(read())
    list(estimator.predict(read()))
    model = estimator.model
    monkeypatch.setattr(checkpoint, "load_parts", lambda path: pytest.fail(f"{path} was read"))
    monkeypatch.setattr(plait.Model, "compile", lambda *_args, **_named: pytest.fail("a model was compiled"))
    with torch.no_grad():
        model.variables()["output/bias"].fill_(100.0)  # no checkpoint has this
    assert estimator.evaluate(read())["loss"] > 9000
    assert next(estimator.predict(read()))["y"] > 90
    assert estimator.model is model


def test_the_model_is_the_same_in_every_training_of_a_process(sums, read):
    estimator = sums()
    estimator.train(read(), steps=3)
    model = estimator.model
    estimator.evaluate(read())
    estimator.train(read(seed=1, batch_size=8), steps=3)
    assert estimator.model is model
    assert model.global_step.value == 6


def test_each_training_reads_its_input_from_the_beginning(sums):
    seen = []

    def model_fn(features, mode):
        seen.append(int(features[0]))
        weight = plait.get_variable("w", [1], initializer=1.0)
        loss = (weight * features).sum()
        return train.EstimatorSpec(mode, loss=loss, train_op=train.GradientDescentOptimizer(0.1))

    estimator = sums(function=model_fn)
    batches = [torch.tensor([float(number)]) for number in range(5)]
    estimator.train(lambda: batches, steps=3)
    estimator.train(lambda: batches, steps=2)
    assert seen == [0, 0, 1, 2, 0, 1]  # the first is the build


@pytest.mark.parametrize("kind", ["list", "loader", "sample", "generator", "source"])
def test_inputs_come_in_many_forms(sums, rows, kind):
    x, y = map(torch.from_numpy, rows)
    batches = [({"x": x[:80]}, y[:80]), ({"x": x[80:]}, y[80:])]
    forms = {
        "list": lambda: batches,
        "loader": lambda: DataLoader(TensorDataset(x, y), 80),
        "sample": lambda: plait.data.Sample(batches),
        "generator": lambda: iter(batches),
        "source": lambda: plait.data.TensorSource((x, y), 80),
    }

    estimator = sums()
    estimator.train(forms[kind])
    assert estimator.model.global_step.value == 2
    assert estimator.evaluate(forms[kind])["global_step"] == 2


def test_tensors_are_the_same_batch_for_ever(sums, rows):
    x, y = map(torch.from_numpy, rows)
    estimator = sums()
    estimator.train(lambda: ({"x": x}, y), steps=7)
    assert estimator.model.global_step.value == 7
    assert estimator.evaluate(lambda: ({"x": x}, y), steps=2)["global_step"] == 7
    with pytest.raises(ConfigError, match="pass steps="):
        estimator.evaluate(lambda: ({"x": x}, y))


def test_an_input_fn_gets_what_it_asks_for(sums, read):
    asked = []

    def input_fn(mode, params, config):
        asked.append((mode, params["width"], config.tf_random_seed))
        return read()()

    estimator = sums(params={"width": 2}, tf_random_seed=5)
    estimator.train(input_fn)
    estimator.evaluate(input_fn)
    list(estimator.predict(input_fn))
    assert asked == [("train", 2, 5), ("eval", 2, 5), ("infer", 2, 5)]


def test_max_steps_is_the_global_step(sums, read, tmp_path, caplog):
    caplog.set_level("INFO", "plait")
    estimator = sums(tmp_path)
    estimator.train(read(num_epochs=None), max_steps=10)
    estimator.train(read(num_epochs=None), max_steps=14)
    assert estimator.model.global_step.value == 14
    again = sums(tmp_path).train(read(num_epochs=None), max_steps=14)
    assert "max_steps=14 was reached" in caplog.text
    with pytest.raises(ConfigError, match="no model yet"):
        again.model  # noqa: B018 - nothing was built
    with pytest.raises(ConfigError, match="give one of them"):
        again.train(read(), steps=1, max_steps=2)


def test_another_process_goes_on_from_the_checkpoint(sums, read, tmp_path, values):
    first = sums(tmp_path)
    first.train(read(num_epochs=None), steps=8)
    second = sums(tmp_path)
    assert second.evaluate(read()) == first.evaluate(read())
    second.train(read(num_epochs=None), steps=4)
    assert second.model.global_step.value == 12
    assert values(first) != values(second)
    assert second.latest_checkpoint().rpartition("-")[0].endswith("ckpt-000000000012")


def test_steps_in_two_calls_are_those_of_one(sums, read, tmp_path, values):
    whole = sums(tmp_path / "a").train(read(), steps=10)
    parts = sums(tmp_path / "b").train(read(), steps=10)
    parts = sums(tmp_path / "b").train(read(), steps=10)  # reads from the beginning, with the optimizer's state
    whole.train(read(), steps=10)
    assert values(whole) == values(parts)


class Crash(Exception):
    """Somebody pulled the plug."""


class CrashHook(train.SessionRunHook):
    def __init__(self, step):
        self.step = step

    def after_run(self, run_context, run_values):
        if run_context.session.global_step.value == self.step:
            raise Crash


def test_a_training_that_was_killed_goes_on_to_the_bit(sums, read, tmp_path, values):
    options = {"shuffle": True, "num_epochs": None}
    whole = sums(tmp_path / "whole", save_checkpoints_steps=5).train(read(**options), steps=33)
    with pytest.raises(Crash):
        sums(tmp_path / "killed", save_checkpoints_steps=5).train(read(**options), [CrashHook(18)], steps=33)
    resumed = sums(tmp_path / "killed", save_checkpoints_steps=5).train(read(**options), steps=33)
    assert resumed.model.global_step.value == 33
    assert values(resumed) == values(whole)


def test_with_another_input_the_weights_go_on_and_the_data_starts_anew(sums, read, tmp_path, caplog):
    with pytest.raises(Crash):
        sums(tmp_path, save_checkpoints_steps=5).train(read(num_epochs=None), [CrashHook(18)], steps=33)
    other = sums(tmp_path).train(read(num_epochs=None, batch_size=8), steps=10)
    assert other.model.global_step.value == 25
    assert "had another input" in caplog.text


def test_predictions_can_be_chosen_and_come_in_batches(sums, read):
    estimator = sums()
    batches = list(estimator.predict(read(), predict_keys="twice", yield_single_examples=False))
    assert [set(batch) for batch in batches] == [{"twice"}] * 10
    assert batches[0]["twice"].shape == (16,)
    with pytest.raises(ConfigError, match="predictions are y, twice"):
        next(estimator.predict(read(), predict_keys=["z"]))
    assert len(list(estimator.predict(read(num_epochs=3)))) == 480


def test_a_prediction_may_be_left_in_the_middle(sums, read):
    estimator = sums()
    found = estimator.predict(read())
    next(found)
    estimator.train(read(), steps=2)
    found.close()
    assert len(list(estimator.predict(read()))) == 160


def test_another_checkpoint_is_used_for_once(sums, read, tmp_path, values):
    estimator = sums(tmp_path, save_checkpoints_steps=10, keep_checkpoint_max=0)
    estimator.train(read(num_epochs=None), steps=30)
    before, newest = values(estimator), estimator.evaluate(read())
    first = str(min(tmp_path.glob("ckpt-000000000010-*")))
    older = estimator.evaluate(read(), checkpoint_path=first)
    assert older["global_step"] == 10
    assert older["loss"] > newest["loss"]
    assert next(estimator.predict(read(), checkpoint_path=first))["y"] != next(estimator.predict(read()))["y"]
    assert values(estimator) == before
    assert estimator.evaluate(read()) == newest
    with pytest.raises(MismatchError, match="another model"):
        sums(params={"width": 9}).evaluate(read(), checkpoint_path=first)


def test_a_checkpoint_of_another_model_is_refused(sums, read, tmp_path):
    sums(tmp_path).train(read(), steps=1)
    with pytest.raises(MismatchError, match="another model"):
        sums(tmp_path, params={"width": 9}).evaluate(read())


def test_hooks_see_their_own_runs(sums, read):
    class Count(train.SessionRunHook):
        def __init__(self):
            self.calls = []

        def begin(self):
            self.calls.append("begin")

        def after_run(self, run_context, run_values):
            self.calls.append("run")

        def end(self, session):
            self.calls.append("end")

    training, evaluating, predicting = Count(), Count(), Count()
    estimator = sums()
    estimator.train(read(), [training], steps=2)
    estimator.evaluate(read(), 3, [evaluating])
    list(estimator.predict(read(), hooks=[predicting]))
    assert training.calls == ["begin", "run", "run", "end"]
    assert evaluating.calls == ["begin", *["run"] * 3, "end"]
    assert predicting.calls == ["begin", *["run"] * 10, "end"]


def test_metrics_are_kept_for_tensorboard(sums, read, tmp_path):
    estimator = sums(tmp_path, save_summary_steps=2)
    estimator.train(read(), steps=4)
    estimator.evaluate(read(), name="small")
    assert list((tmp_path / "eval_small").glob("events*"))
    assert list(tmp_path.glob("events*"))
    assert estimator.eval_dir("small") == str(tmp_path / "eval_small")
    assert estimator.eval_dir() == str(tmp_path / "eval")


def test_what_it_was_made_of_can_be_asked(sums, tmp_path):
    estimator = sums(tmp_path, params={"width": 2})
    estimator.params["width"] = 3
    assert estimator.params == {"width": 2}
    assert estimator.model_dir == str(tmp_path)
    assert estimator.config.model_dir == str(tmp_path)
    assert estimator.model_fn.__name__ == "model_fn"
    assert estimator.latest_checkpoint() is None
    with pytest.raises(ConfigError, match="train"):
        estimator.get_variable_names()


def test_variables_can_be_looked_at_without_a_model(sums, read, tmp_path):
    trained = sums(tmp_path).train(read(), steps=2)
    fresh = sums(tmp_path)
    assert fresh.get_variable_names() == ["hidden/bias", "hidden/weight", "output/bias", "output/weight"]
    assert np.array_equal(fresh.get_variable_value("output/bias"), trained.get_variable_value("output/bias"))
    with pytest.raises(ConfigError, match="no variable 'x'"):
        fresh.get_variable_value("x")


def test_arguments_and_defaults_are_tensorflows():
    def names(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"}

    needed = inspect.Parameter.empty
    assert names(train.Estimator) == {
        "model_fn": needed, "model_dir": None, "config": None, "params": None, "warm_start_from": None,
    }  # fmt: skip
    assert names(train.Estimator.train) == {
        "input_fn": needed, "hooks": None, "steps": None, "max_steps": None, "saving_listeners": None,
    }  # fmt: skip
    assert names(train.Estimator.evaluate) == {
        "input_fn": needed, "steps": None, "hooks": None, "checkpoint_path": None, "name": None,
    }  # fmt: skip
    assert list(names(train.Estimator.predict)) == [
        "input_fn", "predict_keys", "hooks", "checkpoint_path", "yield_single_examples",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda e, read: e.train([1]), "give a function"),
        (lambda e, read: e.train(lambda: None), "returned None"),
        (lambda e, read: e.train(lambda: [(1, 2, 3)]), "3 parts"),
        (lambda e, read: e.train(read(), steps=0), "steps=0"),
        (lambda e, read: train.Estimator(e.model_fn, config={}), "RunConfig"),
        (lambda e, read: e.export_saved_model("x", dict, assets_extra={"a": "b"}), "assets_extra"),
    ],
)
def test_mistakes_are_said(sums, read, call, text):
    with pytest.raises((ConfigError, DataError, FunctionError), match=text):
        call(sums(), read)


def dropped(features, labels, mode):
    kept = torch.nn.functional.dropout(features["x"], 0.5, training=mode == train.ModeKeys.TRAIN)
    found = plait.layer("output", torch.nn.Linear, 3, 1)(kept).squeeze(1)
    loss = (found - labels).square().mean()
    return train.EstimatorSpec(mode, loss=loss, train_op=train.AdamOptimizer(0.1).minimize(loss))


def test_a_seed_makes_runs_alike_whatever_was_drawn_before(sums, read, values):
    found = []
    for seed in (3, 3, 4):
        estimator = sums(function=dropped, tf_random_seed=seed)
        torch.rand(seed + len(found))
        state = torch.get_rng_state()
        estimator.train(read(), steps=4)
        assert torch.equal(torch.get_rng_state(), state)
        first = values(estimator)
        estimator.train(read(), steps=4)  # its draws are others than those of the first four steps
        found.append((first, values(estimator)))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_predictions_of_several_heads(sums, read):
    def heads(features, mode):
        x = features["x"]
        return train.EstimatorSpec(mode, predictions={"sum": {"y": x.sum(1)}, "both": {"y": x, "top": x.argmax(1)}})

    one = next(sums(function=heads).predict(read()))
    assert one["sum"]["y"] == pytest.approx(one["both"]["y"].sum(), rel=1e-6)
    assert one["both"]["top"] == one["both"]["y"].argmax()
    uneven = sums(function=lambda features, mode: train.EstimatorSpec(mode, {"h": {"y": features["x"].sum()}}))
    with pytest.raises(FunctionError, match="{'h/y': None}"):
        next(uneven.predict(read()))


def test_groups_of_columns_are_features(sums, rows):
    x = fc.embedding_column(fc.bucketized_column(fc.numeric_column("x"), [0.0]), 2)

    def model_fn(features, mode):
        found = plait.layer("output", torch.nn.Linear, 2, 1)(features["deep"]).squeeze(1)
        loss = (found - features["y"]).square().mean()
        return train.EstimatorSpec(mode, found, loss, train.AdamOptimizer(0.1).minimize(loss))

    batch = {"x": rows[0][:, 0], "y": rows[1]}
    estimator = sums(function=model_fn)
    estimator.train(lambda: plait.data.Sample([batch] * 3, {"deep": [x]}))
    assert "deep/input_layer/x_bucketized_embedding/embedding_weights" in estimator.get_variable_names()
    assert len(list(estimator.predict(lambda: plait.data.Sample([batch], {"deep": [x]})))) == len(rows[1])
    pair = ({"x": batch["x"]}, batch["y"])
    with pytest.raises(DataError, match="named fields"):
        sums(function=model_fn).train(lambda: plait.data.Sample([pair], {"deep": [x]}))


def test_the_step_is_a_variable_and_mistakes_are_seen_at_once(sums, read, tmp_path):
    estimator = sums(tmp_path)
    estimator.train(read(), steps=3)
    assert estimator.get_variable_value("global_step") == sums(tmp_path).get_variable_value("global_step") == 3
    with pytest.raises(ConfigError, match="steps=0"):
        estimator.evaluate(read(), steps=0)
    with pytest.raises(ConfigError, match="params is a int"):
        train.Estimator(dropped, params=3)
    with pytest.raises(FunctionError, match="its first argument is `features`"):
        train.Estimator(lambda x, y: None)
