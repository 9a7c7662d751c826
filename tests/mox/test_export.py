"""At the end of a run, what the ExportSpec names is written; what is wrong with it is told before the first step."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

import plait
from plait import mox
from plait.errors import ConfigError, FunctionError
from plait.export import load, versions
from plait.export.formats import FORMATS, Format

from .runs import EVAL, EXPORT, PREDICT, TRAIN, model_fn, run, same, weights

X = torch.linspace(-1, 1, 40).reshape(20, 2)
ROOT = Path(__file__).parents[2]


def exporting(**spec):
    """The usual model_fn, with an ExportSpec in EXPORT mode."""

    def made(inputs, mode):
        found = model_fn(inputs, mode)
        if mode == EXPORT:
            inputs_dict, outputs_dict = {"x": inputs[0]}, {"out": found.output_info["out"]}
            found.export_spec = mox.ExportSpec(inputs_dict, outputs_dict, **spec)
        return found

    return made


def exported(tmp_path, function=None, key="TORCH", steps=3, **settings):
    """Train, and give the model and the export."""
    log_dir = str(tmp_path / "run")
    model = run(
        model_fn=function or exporting(), export_model=key, log_dir=log_dir, max_number_of_steps=steps, **settings
    )
    return model, load(tmp_path / "run" / "export" / versions(tmp_path / "run" / "export")[-1])


class TestAtTheEndOfARun:
    def test_the_trained_variables_are_exported(self, tmp_path):
        model, found = exported(tmp_path)
        trained = weights(model)
        expected = (X @ trained["fc/weight"].T + trained["fc/bias"]).squeeze(1)
        np.testing.assert_allclose(found.run({"x": X.numpy()})["out"], expected.numpy(), rtol=1e-5, atol=1e-6)
        assert found.about["step"] == 3
        assert found.about["inputs"] == [{"name": "x", "dtype": "float32", "shape": [None, 2]}]

    def test_what_is_asked_for_at_the_end_changes_nothing_of_the_training(self, tmp_path):
        def noisy(inputs, mode):
            spec = exporting()(inputs, mode)
            spec.loss = spec.loss + torch.rand(()) * plait.get_variable("extra", [1]).sum()
            return spec

        torch.manual_seed(3)
        plain = weights(run(model_fn=noisy, max_number_of_steps=4))
        torch.manual_seed(3)
        model, found = exported(tmp_path, noisy, steps=4)
        assert same(plain, weights(model))
        assert list(found.about["files"]) == ["model.pt2"]

    def test_when_the_model_fn_is_asked(self, tmp_path):
        calls = []

        def noted(inputs, mode):
            calls.append((mode, torch.is_grad_enabled()))
            return exporting()(inputs, mode)

        exported(tmp_path, noted, steps=2)
        assert calls[:4] == [(TRAIN, True), (EXPORT, False), (TRAIN, True), (TRAIN, True)]
        assert set(calls[4:]) == {(EXPORT, False)}

    def test_a_run_that_had_ended_exports_the_next_version(self, tmp_path):
        exported(tmp_path)
        exported(tmp_path)
        assert versions(tmp_path / "run" / "export") == ["1", "2"]

    def test_an_evaluation_exports_what_it_has_loaded(self, tmp_path, trained):
        directory, variables = trained
        log_dir = str(tmp_path / "eval")
        run(EVAL, model_fn=exporting(version="best"), checkpoint_path=directory, log_dir=log_dir, export_model="TORCH")
        found = load(tmp_path / "eval" / "export" / "best")
        assert found.about["step"] == 10
        assert found.about["metrics"].keys() == {"loss", "bias"}
        expected = X[:1] @ variables["fc/weight"].T + variables["fc/bias"]
        np.testing.assert_allclose(found.run({"x": X[:1].numpy()})["out"], expected[0].numpy(), rtol=1e-5)

    def test_evaluations_in_the_middle_leave_their_numbers(self, tmp_path):
        def evaluated(inputs, mode):
            spec = exporting()(inputs, mode)
            info = {"loss": spec.log_info["loss"]}
            spec.hooks = [mox.LogEvaluationMetricHook(info, 4, samples_in_train=8, samples_in_eval=8)]
            return spec

        _, found = exported(tmp_path, evaluated, steps=4, inter_mode=EVAL)
        assert found.about["metrics"]["loss"] > 0

    def test_several_replicas(self, tmp_path):
        mox.set_flag("num_gpus", 2)
        _, found = exported(tmp_path)
        assert found.run({"x": X.numpy()})["out"].shape == (20,)


class TestInputs:
    def test_fields_by_name(self, tmp_path):
        def named(inputs, mode):
            out = plait.layer("fc", nn.Linear, 2, 1)(inputs["b"]).squeeze(1) * inputs.a
            spec = mox.ExportSpec({"a": inputs["a"], "b": inputs.b}, {"out": out})
            return mox.ModelSpec(loss=(out - inputs["y"]).square().mean(), export_spec=spec)

        data = [{"a": x.sum(), "b": x, "y": x[0], "name": "row"} for x in X]
        _, found = exported(tmp_path, named, data=data)
        assert [one["name"] for one in found.about["inputs"]] == ["a", "b"]
        assert found.run({"a": np.zeros(3, np.float32), "b": X[:3].numpy()})["out"].tolist() == [0.0] * 3

    def test_a_placeholder_is_an_input(self, tmp_path):
        def fed(inputs, mode):
            x, y = inputs
            other = mox.placeholder(torch.float32, [None, 2], "other")
            scale = mox.placeholder(torch.float32, [], "scale")
            out = plait.layer("fc", nn.Linear, 2, 1)(x).squeeze(1)
            moved = plait.layer("fc", nn.Linear, 2, 1)(other) if mode == EXPORT else out
            spec = mox.ExportSpec({"other": other, "scale": scale}, {"moved": moved * scale})
            hook = mox.FeedSessionRunHook({other: torch.zeros(4, 2), scale: 1.0})
            return mox.ModelSpec(loss=(out - y).square().mean() * scale, export_spec=spec, hooks=[hook])

        model, found = exported(tmp_path, fed)
        other = X[:3].numpy()
        one, two = (found.run({"other": other, "scale": np.float32(scale)})["moved"] for scale in (1, 2))
        np.testing.assert_allclose(2 * one, two)
        trained = weights(model)
        np.testing.assert_allclose(one, other @ trained["fc/weight"].T.numpy() + trained["fc/bias"].numpy(), rtol=1e-5)

    def test_whole_numbers_are_tried_with_those_of_the_data(self, tmp_path):
        def looked_up(inputs, mode):
            out = plait.layer("table", nn.Embedding, 5, 1)(inputs[0]).squeeze(1)
            return mox.ModelSpec(loss=out.square().mean(), export_spec=mox.ExportSpec({"i": inputs[0]}, {"out": out}))

        _, found = exported(tmp_path, looked_up, data=[(torch.tensor(number % 5), 0.0) for number in range(20)])
        assert found.about["inputs"] == [{"name": "i", "dtype": "int64", "shape": [None]}]

    def test_nothing_of_the_data_is_written(self, tmp_path):
        secret = torch.full((20, 2), 1234.5678)
        exported(tmp_path, data=[(x, torch.tensor(1234.5678)) for x in secret])
        archive = (tmp_path / "run" / "export" / "1" / "model.pt2").read_bytes()
        assert np.float32(1234.5678).tobytes() not in archive
        assert b"1234.5" not in archive


def spec_of(change):
    def made(inputs, mode):
        spec = model_fn(inputs, mode)
        if mode == EXPORT:
            spec.export_spec = change(inputs, spec.output_info["out"], spec.loss)
        return spec

    return made


class TestWhatIsToldBeforeTraining:
    """Each of them leaves the log_dir without a step."""

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (lambda x, out, loss: None, FunctionError, "in EXPORT mode the model_fn's ModelSpec needs export_spec"),
            (
                lambda x, out, loss: mox.ExportSpec({"x": x[0] * 1}, {"out": out}),
                FunctionError,
                r"inputs_dict\['x'\] is no field of the batch and no mox.placeholder, but made of field 0 of the batch",
            ),
            (
                lambda x, out, loss: mox.ExportSpec({"x": torch.ones(4, 2)}, {"out": out}),
                FunctionError,
                r"inputs_dict\['x'\] is no field of the batch and no mox.placeholder: write a tensor that",
            ),
            (
                lambda x, out, loss: mox.ExportSpec({"x": x[0], "z": x[0]}, {"out": out}),
                FunctionError,
                "inputs_dict has 'x' and 'z' for one tensor",
            ),
            (
                lambda x, out, loss: mox.ExportSpec({"my x": x[0]}, {"out": out}),
                FunctionError,
                "inputs_dict has 'my x': write a name of letters",
            ),
            (
                lambda x, out, loss: mox.ExportSpec({"x": x[0]}, {"out": out, "loss": loss}),
                FunctionError,
                r"outputs_dict\['loss'\] is made of field 1 of the batch, which is not among the inputs",
            ),
            (
                lambda x, out, loss: mox.ExportSpec({"x": x[0]}, {"out": out * mox.placeholder(shape=[], name="k")}),
                FunctionError,
                r"outputs_dict\['out'\] is made of placeholder k, which is not among",
            ),
            (
                lambda x, out, loss: mox.ExportSpec({"x": x[0]}, {"out": out + x[0].mul_(2).sum()}),
                FunctionError,
                "the model_fn writes into field 0 of its batch",
            ),
            (
                lambda x, out, loss: mox.ExportSpec({"x": x[0]}, {"out": out}, labels=["two\nlines"]),
                ConfigError,
                "labels has 'two",
            ),
            (
                lambda x, out, loss: mox.ExportSpec({"x": x[0]}, {"out": out}, preprocess={"mean": object()}),
                ConfigError,
                "preprocess.mean is a object",
            ),
            (
                lambda x, out, loss: mox.ExportSpec({"x": x[0]}, {"out": out}, "here"),
                ConfigError,
                "has a version here already",
            ),
        ],
    )
    def test_a_wrong_spec(self, tmp_path, change, error, words):
        (tmp_path / "run" / "export" / "here").mkdir(parents=True)
        with pytest.raises(error, match=words):
            exported(tmp_path, spec_of(change))
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["export"]

    def test_a_format_that_is_not_installed(self, tmp_path, monkeypatch):
        monkeypatch.setitem(FORMATS, "onnx", Format(module="plait.export.onnx", needs=("not_there",)))

        def untouched(mode):
            pytest.fail("work was done")

        with pytest.raises(ConfigError, match=r"needs not_there, which is not installed: pip install 'plait\[export"):
            exported(tmp_path, key="ONNX", input_fn=untouched)

    @pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed")
    def test_tensorflow_is_an_extra(self, tmp_path):
        with pytest.raises(ConfigError, match="format 'tf'"):
            exported(tmp_path, key="TF_SERVING")

    def test_without_a_place(self):
        with pytest.raises(ConfigError, match="give log_dir="):
            run(model_fn=exporting(), export_model="TORCH")

    def test_an_unknown_kind(self):
        with pytest.raises(ConfigError, match="export_model=True: write one of mox.ExportKeys, TF_SERVING, ONNX"):
            run(export_model=True)

    def test_a_new_variable(self, tmp_path):
        def larger(inputs, mode):
            spec = exporting()(inputs, mode)
            if mode == EXPORT:
                plait.layer("late", nn.Linear, 2, 1)(inputs[0])
            return spec

        with pytest.raises(plait.errors.VariableError, match="layer 'late' is new after compile"):
            exported(tmp_path, larger)


def picture_model(name, classes, size):
    """As in the documentation: the loss is worked out in every mode."""

    def made(inputs, mode):
        images, labels = inputs
        sizes = {"image_height": size, "image_width": size}
        logits, _ = mox.get_model_fn(name, mode, classes, weight_decay=1e-4, **sizes)(images)
        loss = functional.cross_entropy(logits, labels) + sum(mox.get_collection("regularization_losses"))
        confidence, best = logits.softmax(1).topk(1)
        spec = mox.ExportSpec({"images": images}, {"logits": logits, "labels": best, "confidences": confidence})
        return mox.ModelSpec(loss=loss, output_info={"logits": logits}, export_spec=spec)

    return made


def pictures(rows, size, channels):
    generator = torch.Generator().manual_seed(rows)
    images = torch.randint(0, 256, (rows, size, size, channels), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 10, (rows,), generator=generator)


def round_trip(tmp_path, name, size, channels, key):
    """A step of training, an export, and the same logits from it as from PREDICT."""
    function, log_dir = picture_model(name, 10, size), str(tmp_path / "run")
    images, labels = pictures(4, size, channels)
    data = [*zip(images, labels, strict=True)]
    run(data=data, model_fn=function, max_number_of_steps=1, log_dir=log_dir, export_model=key)
    found = load(tmp_path / "run" / "export" / "1")
    assert found.about["preprocess"] == {"layout": "NHWC", "size": [size, size]}
    for rows in (1, 3, 32):
        images, labels = pictures(rows, size, channels)
        outputs = []
        run(
            PREDICT,
            data=[*zip(images, labels, strict=True)],
            model_fn=function,
            output_fn=outputs.extend,
            batch_size=rows,
            checkpoint_path=log_dir,
        )
        expected = outputs[0]["logits"]
        given = found.run({"images": images.numpy()})
        np.testing.assert_allclose(given["logits"], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
        assert (given["labels"][:, 0] == expected.argmax(1)).all()


def test_round_trip_of_a_network(tmp_path):
    round_trip(tmp_path, "lenet", 28, 1, "ONNX")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [("resnet_v1_18", 224), ("mobilenet_v2", 224), ("inception_v3", 299), ("nasnet_mobile", 224)]
)
def test_round_trips_of_large_networks(tmp_path, name, size):
    round_trip(tmp_path, name, size, 3, "ONNX")


def test_the_documents_model_fn_trains_its_network_in_every_mode(tmp_path, caplog):
    """It says run_mode=TRAIN whatever the mode is; an export drops nothing at random all the same."""

    def always_training(inputs, mode):
        images, labels = inputs
        logits, _ = mox.get_model_fn("lenet", TRAIN, 10, image_height=28, image_width=28)(images)
        spec = mox.ExportSpec({"images": images}, {"logits": logits}, 1)
        return mox.ModelSpec(loss=functional.cross_entropy(logits, labels), export_spec=spec)

    data = [*zip(*pictures(4, 28, 1), strict=True)]
    _, found = exported(tmp_path, always_training, data=data, steps=1)
    images = pictures(2, 28, 1)[0].numpy()
    first, second = (found.run({"images": images})["logits"] for _ in range(2))
    assert (first == second).all()
    assert "put into training while it is exported" in caplog.text


def test_round_trip_of_a_generator(tmp_path):
    """Of the example: its export has neither the discriminator nor the losses."""
    gan = runpy.run_path(str(ROOT / "examples" / "mox" / "gan.py"))

    def exporting_gan(inputs, mode):
        spec = gan["model_fn"](inputs, mode)
        if mode == EXPORT:
            with plait.variable_scope("generator", reuse=True):
                spec.export_spec = mox.ExportSpec({"noise": inputs[0]}, {"points": gan["mlp"](inputs[0], 2)})
        return spec

    settings = {"optimizer_fn": [mox.get_optimizer_fn("adam", learning_rate=0.002)] * 2, "steps": 5}
    model, found = exported(tmp_path, exporting_gan, "ONNX", input_fn=gan["input_fn"], batch_size=64, **settings)
    layers = [model._store._made[f"generator/fc{number}"] for number in (1, 2, 3)]
    network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    for rows in (1, 3, 32):
        noise = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        points = found.run({"noise": noise.numpy()})["points"]
        np.testing.assert_allclose(points, network(noise).detach().numpy(), rtol=1e-4, atol=1e-6)
    kept = onnx.load(tmp_path / "run" / "export" / "1" / "model.onnx").graph.initializer
    assert len(kept) == 6
