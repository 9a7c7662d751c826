"""Exports of what an Estimator predicts, and the exporters of `train_and_evaluate`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import plait
from plait import train
from plait.errors import ConfigError, FunctionError
from plait.export import load
from plait.train.exporting import received

EXAMPLE = {"x": torch.zeros(2, 3)}


def receiver_fn():
    return train.build_raw_serving_input_receiver_fn(EXAMPLE)


def test_an_export_predicts_what_the_model_predicts(sums, read, rows, tmp_path):
    estimator = sums(tmp_path / "model")
    estimator.train(read(), steps=10)
    where = estimator.export_saved_model(tmp_path / "export", receiver_fn())
    assert where == str(tmp_path / "export" / "1")
    found = load(where).run({"x": rows[0]})
    wanted = list(estimator.predict(read()))
    np.testing.assert_allclose(found["y"], [one["y"] for one in wanted], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["twice"], 2 * found["y"], rtol=1e-6)
    # and in another process, of the checkpoint; the model can go on training afterwards
    fresh = sums(tmp_path / "model")
    again = load(fresh.export_saved_model(tmp_path / "export", receiver_fn())).run({"x": rows[0]})
    np.testing.assert_allclose(again["y"], found["y"], rtol=1e-6)
    estimator.train(read(), steps=1)


def test_an_older_checkpoint_can_be_exported(sums, read, rows, tmp_path, values):
    estimator = sums(tmp_path, save_checkpoints_steps=5, keep_checkpoint_max=None)
    estimator.train(read(), steps=10)
    before = values(estimator)
    older = str(min(tmp_path.glob("ckpt-000000000005-*")))
    where = estimator.export_saved_model(tmp_path / "export", receiver_fn(), checkpoint_path=older)
    found = load(where).run({"x": rows[0]})["y"]
    wanted = [one["y"] for one in estimator.predict(read(), checkpoint_path=older)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert values(estimator) == before


def exported(tmp_path, **spec):
    def model_fn(features, labels, mode):
        found = plait.layer("o", torch.nn.Linear, 3, 1)(features)
        made = {name: make(found) for name, make in spec.items()}
        return train.EstimatorSpec(mode, **{"predictions": {"text": "not a tensor"}, **made})

    def serving():
        x = torch.zeros(2, 3)
        return train.ServingInputReceiver(x, x)

    where = train.Estimator(model_fn).export_saved_model(tmp_path, serving)
    return load(where).run({"features": np.zeros((4, 3), np.float32)})


def test_outputs_are_the_default_signature_the_only_one_or_the_predictions(tmp_path):
    assert set(exported(tmp_path, predictions=lambda y: y)) == {"output"}
    assert set(exported(tmp_path, export_outputs=lambda y: {"a": y, "b": y})) == {"a", "b"}
    both = {"other": "x", "serving_default": "y"}
    found = exported(tmp_path, export_outputs=lambda y: {name: {output: y} for name, output in both.items()})
    assert set(found) == {"y"}
    with pytest.raises(FunctionError, match="no prediction is a tensor"):
        exported(tmp_path)


def test_what_is_received_are_the_features():
    with pytest.raises(FunctionError, match="build_raw_serving_input_receiver_fn"):
        received(dict)
    with pytest.raises(FunctionError, match="are not the features"):
        received(lambda: train.ServingInputReceiver({"x": torch.ones(1)}, {"x": torch.ones(1)}))


class Recorder:
    """In the place of an Estimator: exports nothing, remembers where to."""

    def __init__(self):
        self.asked = []

    def export_saved_model(self, path, receiver_fn, formats):
        self.asked.append(path)
        return path


def asked(exporter, losses):
    estimator = Recorder()
    for number, loss in enumerate(losses):
        final = number == len(losses) - 1
        exporter.export(estimator, str(number), None, {"loss": loss}, final)
    return estimator.asked


def test_exporters_have_their_times():
    losses = [3.0, 1.0, 2.0, 0.5]
    assert asked(train.FinalExporter("final", receiver_fn()), losses) == ["3"]
    assert asked(train.LatestExporter("latest", receiver_fn()), losses) == ["0", "1", "2", "3"]
    best = train.BestExporter(serving_input_receiver_fn=receiver_fn())
    assert best.name == "best_exporter"
    assert asked(best, losses) == ["0", "1", "3"]
    higher = train.BestExporter(
        "b", receiver_fn(), lambda best_eval_result, current_eval_result: current_eval_result["loss"] > 2.5
    )
    assert asked(higher, losses) == ["0"]
    with pytest.raises(ConfigError, match="serving_input_receiver_fn"):
        train.BestExporter()
    with pytest.raises(ConfigError, match="name"):
        train.FinalExporter("", receiver_fn())
