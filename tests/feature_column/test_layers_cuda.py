"""Feature columns on a GPU: the recorded cases, gradients, ready Estimators, and losses over candidates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait import feature_column as fc
from plait import nn as plait_nn
from plait import train

from . import cases, recorded
from .test_recorded import module_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_card(value):
    if isinstance(value, tuple):
        return tuple(on_card(one) for one in value)
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("moved", [True, False], ids=["features on the card", "features in the host's memory"])
@pytest.mark.parametrize("name", cases.CASES)
def test_numbers_are_tensorflows(name, moved, tmp_path):
    case = cases.CASES[name]
    module = module_of(case, tmp_path).cuda()
    features = recorded.features_of(case)
    found = module({key: on_card(value) for key, value in features.items()} if moved else features)
    expected = np.array(recorded.RECORDED[name]["output"], np.float32)
    assert found.shape == expected.shape
    if any(True for _ in module.parameters()):
        assert found.is_cuda
    np.testing.assert_allclose(found.detach().cpu().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_are_those_of_the_cpu(combiner, ragged):
    columns = [
        fc.embedding_column(fc.categorical_column_with_identity(key, 40), 8, combiner=combiner) for key in ("a", "b")
    ]
    generator = torch.Generator().manual_seed(0)
    features = {key: torch.randint(40, (64,), generator=generator) for key in ("a", "b")}
    if ragged:
        offsets = torch.arange(0, 65, 4)
        features = {key: (value, offsets) for key, value in features.items()}
    module = fc.DenseFeatures(columns)
    found = module(features)
    weight = torch.randn(found.shape, generator=generator)
    (found * weight).sum().backward()
    expected = [variable.grad.clone() for variable in module.parameters()]
    module.cuda().zero_grad()
    on_it = {key: on_card(value) for key, value in features.items()}
    for _ in range(2):
        (module(on_it) * weight.cuda()).sum().backward()
    for variable, gradient in zip(module.parameters(), expected, strict=True):
        assert variable.is_cuda
        torch.testing.assert_close(variable.grad.cpu(), 2 * gradient)


@pytest.mark.parametrize("kind", ["Linear", "DNN", "DNNLinearCombined"])
def test_ready_estimators_learn_what_they_learn_on_the_cpu(kind):
    rng = np.random.default_rng(0)
    x = {"age": rng.uniform(0, 1, 512).astype(np.float32), "town": rng.choice(["rome", "oslo"], 512).astype(object)}
    y = (4 * x["age"] - 2 + np.where(x["town"] == "oslo", 1.0, -1.0) > 0).astype(np.int64)
    age, town = fc.numeric_column("age"), fc.categorical_column_with_hash_bucket("town", 10)
    wide, deep = [fc.bucketized_column(age, [0.3, 0.6]), town], [age, fc.embedding_column(town, 3)]

    def run(device):
        config = train.RunConfig(
            save_summary_steps=None, log_step_count_steps=None, tf_random_seed=3, session_config={"device": device}
        )
        if kind == "Linear":
            estimator = train.LinearClassifier(wide, config=config)
        elif kind == "DNN":
            estimator = train.DNNClassifier([16], deep, config=config)
        else:
            estimator = train.DNNLinearCombinedClassifier(
                linear_feature_columns=wide, dnn_feature_columns=deep, dnn_hidden_units=[16], config=config
            )
        estimator.train(train.numpy_input_fn(x, y, 64, None, shuffle=False), steps=40)
        return estimator.evaluate(train.numpy_input_fn(x, y, 64, 1, shuffle=False))

    near, far = run("cpu"), run("cuda")
    assert far["loss"] == pytest.approx(near["loss"], rel=1e-3)
    assert far["accuracy"] == pytest.approx(near["accuracy"], abs=0.01)


def test_text_alone_trains_evaluates_predicts_and_what_numbers_make_is_exported(tmp_path):
    town = np.array(["rome", "oslo"] * 64, object)
    y = np.array([0, 1] * 64)
    words = fc.indicator_column(fc.categorical_column_with_vocabulary_list("town", ["rome", "oslo"]))
    quiet = train.RunConfig(save_summary_steps=None, log_step_count_steps=None)
    text = train.DNNClassifier([8], [words], config=quiet)
    text.train(train.numpy_input_fn({"town": town}, y, 32, None, shuffle=False), steps=60)
    assert text.evaluate(train.numpy_input_fn({"town": town}, y, 32, 1, shuffle=False))["accuracy"] == 1.0
    chosen = [
        int(one["class_ids"][0]) for one in text.predict(train.numpy_input_fn({"town": town}, None, 32, 1, False))
    ]
    assert chosen == y.tolist()
    numbers = train.DNNClassifier([8], [fc.numeric_column("x", 3)], config=quiet)
    x = np.random.default_rng(0).normal(size=(128, 3)).astype(np.float32)
    numbers.train(train.numpy_input_fn({"x": x}, y, 32, None, shuffle=False), steps=2)
    example = {"x": torch.zeros(1, 3)}
    receiver = train.ServingInputReceiver(example, example)
    folder = numbers.export_saved_model(tmp_path / "export", lambda: receiver)
    loaded = torch.export.load(f"{folder}/model.pt2").module()
    assert all(value.device.type == "cpu" for value in loaded.state_dict().values())
    numbers.train(train.numpy_input_fn({"x": x}, y, 32, None, shuffle=False), steps=2)


def test_sequences_of_text_beside_rows_of_a_table():
    word = fc.sequence_categorical_column_with_hash_bucket("word", 20)
    other = fc.sequence_categorical_column_with_identity("number", 5)
    layer = fc.SequenceFeatures([fc.indicator_column(word), fc.embedding_column(other, 4)])
    offsets = torch.tensor([0, 2, 3])
    features = {"word": (np.array(["a", "b", "c"], object), offsets), "number": (torch.tensor([1, 2, 3]), offsets)}
    near, lengths = layer(features)
    far, far_lengths = layer.cuda()({key: on_card(value) for key, value in features.items()})
    assert far.is_cuda
    torch.testing.assert_close(far.cpu(), near)
    assert far_lengths.tolist() == lengths.tolist() == [2, 1]


@pytest.mark.parametrize("loss", [plait_nn.sampled_softmax_loss, plait_nn.nce_loss])
def test_losses_over_candidates_are_those_of_the_cpu(loss):
    generator = torch.Generator().manual_seed(0)
    weights, biases = torch.randn(50, 8, generator=generator), torch.randn(50, generator=generator)
    labels = torch.randint(50, (16, 1), generator=generator)
    inputs = torch.randn(16, 8, generator=generator)
    sampled = plait_nn.log_uniform_candidate_sampler(labels, 1, 20, True, 50, seed=1)
    near = loss(weights, biases, labels, inputs, 20, 50, sampled_values=sampled)
    moved = [one.cuda() for one in (weights, biases, labels, inputs)]
    far = loss(*moved, 20, 50, sampled_values=type(sampled)(*(one.cuda() for one in sampled)))
    torch.testing.assert_close(far.cpu(), near)
    drawn = loss(*moved, 20, 50)
    assert drawn.is_cuda
    assert torch.isfinite(drawn).all()
