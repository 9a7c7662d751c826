"""Ready Estimators: they learn, their optimizers and variables are TensorFlow's, and text may come in."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from plait import feature_column as fc
from plait import train
from plait.errors import ConfigError
from plait.optim.rules import Ftrl

ROWS = 512
QUIET = train.RunConfig(save_summary_steps=None, log_step_count_steps=None)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    age = rng.uniform(0, 1, ROWS).astype(np.float32)
    town = rng.choice(["rome", "oslo", "lima"], ROWS)
    score = 4 * age - 2 + np.where(town == "oslo", 2.0, -1.0)
    return {"age": age, "town": town.astype(object)}, score.astype(np.float32)


AGE = fc.numeric_column("age")
TOWN = fc.categorical_column_with_vocabulary_list("town", ["rome", "oslo", "lima"])
WIDE = [fc.bucketized_column(AGE, [0.25, 0.5, 0.75]), TOWN]
DEEP = [AGE, fc.embedding_column(TOWN, 3)]


def classes(score, n_classes):
    return (score > 0).astype(np.int64) if n_classes == 2 else np.digitize(score, [-1, 1]).astype(np.int64)


MODELS = {
    "linear": lambda kind, **more: getattr(train, f"Linear{kind}")(WIDE, **more),
    "dnn": lambda kind, **more: getattr(train, f"DNN{kind}")([16], DEEP, **more),
    "both": lambda kind, **more: getattr(train, f"DNNLinearCombined{kind}")(
        linear_feature_columns=WIDE, dnn_feature_columns=DEEP, dnn_hidden_units=[16], **more
    ),
}


def read(x, y, *, training):
    return train.numpy_input_fn(x, y, 64, None if training else 1, shuffle=training)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_classes_are_learnt(table, model, n_classes):
    x, score = table
    y = classes(score, n_classes)
    estimator = MODELS[model]("Classifier", n_classes=n_classes, config=QUIET)
    estimator.train(read(x, y, training=True), steps=60)
    found = estimator.evaluate(read(x, y, training=False))
    assert found["accuracy"] > 0.8
    if n_classes == 2:
        assert found["auc"] > 0.93
    chosen = [int(one["class_ids"][0]) for one in estimator.predict(read(x, None, training=False))]
    assert np.mean(np.array(chosen) == y) == pytest.approx(found["accuracy"])


@pytest.mark.parametrize("model", MODELS)
def test_numbers_are_learnt(table, model):
    x, score = table
    estimator = MODELS[model]("Regressor", config=QUIET)
    estimator.train(read(x, score, training=True), steps=80)
    found = estimator.evaluate(read(x, score, training=False))
    assert found["average_loss"] < np.var(score) / 2
    assert found["label/mean"] == pytest.approx(float(score.mean()), rel=1e-4)


def test_each_part_has_its_optimizer_and_its_scope(table):
    x, score = table
    estimator = MODELS["both"]("Classifier", config=QUIET)
    estimator.train(read(x, classes(score, 2), training=True), steps=1)
    deep, wide = estimator.model.optimizers()
    assert isinstance(wide, Ftrl)
    assert isinstance(deep, torch.optim.Adagrad)
    assert wide.param_groups[0]["lr"] == 0.005
    assert deep.param_groups[0]["lr"] == 0.05
    assert set(estimator.get_variable_names()) == {
        "dnn/hiddenlayer_0/bias", "dnn/hiddenlayer_0/weight", "dnn/logits/bias", "dnn/logits/weight",
        "dnn/input_from_feature_columns/input_layer/town_embedding/embedding_weights",
        "linear/linear_model/age_bucketized/weights", "linear/linear_model/bias_weights",
        "linear/linear_model/town/weights",
    }  # fmt: skip
    moved = {id(one) for optimizer in (deep, wide) for one in optimizer.param_groups[0]["params"]}
    assert moved == {id(one) for one in estimator.model.trainable_variables().values()}


def test_a_linear_models_rate_depends_on_its_columns(table):
    x, score = table
    many = [fc.numeric_column("age"), *(fc.bucketized_column(AGE, [n / 40]) for n in range(1, 2))] * 1
    estimator = train.LinearRegressor(many, config=QUIET).train(read(x, score, training=True), steps=1)
    assert estimator.model.optimizers()[0].param_groups[0]["lr"] == 0.2


def test_other_optimizers_can_be_given(table):
    x, score = table
    estimator = train.DNNRegressor([4], DEEP, optimizer=lambda params: torch.optim.SGD(params, lr=0.3), config=QUIET)
    estimator.train(read(x, score, training=True), steps=1)
    assert isinstance(estimator.model.optimizers()[0], torch.optim.SGD)
    named = train.LinearRegressor(WIDE, optimizer="Adam", config=QUIET).train(read(x, score, training=True), steps=1)
    assert type(named.model.optimizers()[0]).__name__ == "Adam"


def test_dropout_and_batch_norm_are_for_training(table):
    x, score = table
    estimator = train.DNNRegressor([8, 4], DEEP, dropout=0.5, batch_norm=True, activation_fn=torch.tanh, config=QUIET)
    estimator.train(read(x, score, training=True), steps=3)
    assert estimator.get_variable_value("dnn/hiddenlayer_1_batchnorm/num_batches_tracked") == 3
    found = [estimator.evaluate(read(x, score, training=False)) for _ in range(2)]
    assert found[0] == found[1]


def test_words_and_weights(table):
    x, score = table
    words = np.where(score > 0, "yes", "no").astype(object)
    features = {**x, "weight": np.where(x["town"] == "rome", 0.0, 1.0).astype(np.float32)}
    estimator = train.LinearClassifier(
        WIDE, label_vocabulary=["no", "yes"], weight_column=fc.numeric_column("weight"), config=QUIET
    )
    estimator.train(read(features, words, training=True), steps=20)
    rome = estimator.get_variable_value("linear/linear_model/town/weights")[0]
    assert rome.tolist() == [0.0]  # its rows weigh nothing
    assert next(estimator.predict(read(features, None, training=False)))["classes"][0] in (b"no", b"yes")


DEFAULTS = {
    "model_dir": None, "weight_column": None, "config": None, "warm_start_from": None, "loss_reduction": "weighted_sum",
}  # fmt: skip
LINEAR = {"optimizer": "Ftrl", "partitioner": None, "sparse_combiner": "sum"}
DNN = {
    "optimizer": "Adagrad", "activation_fn": torch.relu, "dropout": None, "input_layer_partitioner": None,
    "batch_norm": False,
}  # fmt: skip
BOTH = {
    "linear_feature_columns": None, "linear_optimizer": "Ftrl", "dnn_feature_columns": None,
    "dnn_optimizer": "Adagrad", "dnn_hidden_units": None, "dnn_activation_fn": torch.relu, "dnn_dropout": None,
    "input_layer_partitioner": None, "batch_norm": False, "linear_sparse_combiner": "sum",
}  # fmt: skip


@pytest.mark.parametrize(("name", "own"), [("Linear", LINEAR), ("DNN", DNN), ("DNNLinearCombined", BOTH)])
@pytest.mark.parametrize(
    ("kind", "more"),
    [("Classifier", {"n_classes": 2, "label_vocabulary": None}), ("Regressor", {"label_dimension": 1})],
)
def test_arguments_and_defaults_are_tensorflows(name, own, kind, more):
    parameters = inspect.signature(getattr(train, name + kind)).parameters
    given = {key: one.default for key, one in parameters.items() if one.default is not one.empty}
    assert given == {**DEFAULTS, **own, **more}
    needed = [key for key, one in parameters.items() if one.default is one.empty]
    assert needed == {"Linear": ["feature_columns"], "DNN": ["hidden_units", "feature_columns"]}.get(name, [])


def test_numbers_only_can_be_exported(table, tmp_path):
    x, score = table
    estimator = train.DNNClassifier([4], [AGE], config=QUIET)
    estimator.train(read({"age": x["age"]}, classes(score, 2), training=True), steps=2)
    receiver_fn = train.build_raw_serving_input_receiver_fn({"age": torch.zeros(2)})
    assert estimator.export_saved_model(tmp_path, receiver_fn) == str(tmp_path / "1")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: train.LinearClassifier([]), "empty"),
        (lambda: train.DNNClassifier([], DEEP), "hidden_units"),
        (lambda: train.DNNClassifier([4], DEEP, dropout=1.0), "dropout=1.0"),
        (train.DNNLinearCombinedRegressor, "or both"),
        (lambda: train.LinearRegressor(WIDE, optimizer="Best"), "Ftrl"),
    ],
)
def test_mistakes_are_said(make, text):
    with pytest.raises(ConfigError, match=text):
        make()
