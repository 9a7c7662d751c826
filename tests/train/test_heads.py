"""Heads: losses, predictions and metrics of two classes, several classes and numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from plait import train
from plait.errors import ConfigError, DataError
from plait.train.heads import BinaryHead, MultiClassHead, RegressionHead, classification_head

LOGITS = torch.tensor([[-1.0], [0.5], [2.0]])
TRUTH = torch.tensor([0.0, 0.0, 1.0])


def spec(head, mode, logits=LOGITS, labels=None, features=None):
    return head.spec(features or {}, mode, logits, labels, lambda loss: ("op", loss))


def results(made):
    found = {}
    for name, measured in made.eval_metric_ops.items():
        metric = measured.create()
        metric.update(*measured.args)
        found[name] = float(metric.result())
    return found


def test_two_classes_have_tensorflows_predictions():
    found = spec(BinaryHead(), "infer").predictions
    assert set(found) == {"logits", "logistic", "probabilities", "class_ids", "classes"}
    torch.testing.assert_close(found["logistic"], LOGITS.sigmoid())
    torch.testing.assert_close(found["probabilities"].sum(1), torch.ones(3))
    assert found["class_ids"].tolist() == [[0], [1], [1]]
    assert found["classes"].tolist() == [[b"0"], [b"1"], [b"1"]]


def test_two_classes_have_tensorflows_metrics():
    made = spec(BinaryHead(), "eval", labels=TRUTH)
    losses = functional.binary_cross_entropy_with_logits(LOGITS.squeeze(1), TRUTH, reduction="none")
    assert float(made.loss) == pytest.approx(float(losses.sum()))
    found = results(made)
    assert set(found) == {
        "accuracy", "accuracy_baseline", "auc", "auc_precision_recall", "average_loss", "label/mean", "precision",
        "prediction/mean", "recall",
    }  # fmt: skip
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["accuracy_baseline"] == pytest.approx(2 / 3)
    assert found["average_loss"] == pytest.approx(float(losses.mean()))
    assert found["precision"] == 0.5
    assert found["recall"] == found["auc"] == 1
    assert found["label/mean"] == pytest.approx(1 / 3)
    assert found["prediction/mean"] == pytest.approx(float(LOGITS.sigmoid().mean()))


def test_weights_weigh_losses_and_metrics():
    features = {"w": torch.tensor([0.0, 0.0, 4.0])}
    made = spec(BinaryHead(weight_column="w"), "eval", labels=TRUTH, features=features)
    last = math.log1p(math.exp(-2))
    assert float(made.loss) == pytest.approx(4 * last)
    assert results(made)["average_loss"] == pytest.approx(last)
    assert results(made)["accuracy"] == 1


@pytest.mark.parametrize(
    ("reduction", "wanted"),
    [("SUM", 14.0), ("MEAN", 14 / 3), ("SUM_OVER_BATCH_SIZE", 14 / 3), ("SUM_BY_NONZERO_WEIGHTS", 14 / 2)],
)
def test_losses_are_reduced_as_tensorflow_does(reduction, wanted):
    head = RegressionHead(weight_column="w", loss_reduction=getattr(train.Reduction, reduction))
    features = {"w": torch.tensor([[0.0], [1.0], [2.0]])}
    made = spec(head, "eval", torch.zeros(3, 1), torch.tensor([5.0, 2.0, math.sqrt(5)]), features)
    assert float(made.loss) == pytest.approx(wanted)


def test_training_has_an_op_of_the_loss():
    made = spec(BinaryHead(), "train", labels=TRUTH.unsqueeze(1))
    assert made.train_op == ("op", made.loss)


def test_labels_may_be_words():
    head = classification_head(2, ["no", "yes"])
    texts = np.array(["no", "no", "yes"])
    assert float(spec(head, "eval", labels=texts).loss) == float(spec(BinaryHead(), "eval", labels=TRUTH).loss)
    assert spec(head, "infer").predictions["classes"].tolist() == [[b"no"], [b"yes"], [b"yes"]]
    many = classification_head(3, [b"a", b"b", b"c"])
    logits = torch.eye(3)
    words = np.array([[b"a"], [b"b"], [b"c"]], dtype=object)
    assert results(spec(many, "eval", logits, words))["accuracy"] == 1
    assert spec(many, "infer", logits).predictions["classes"].tolist() == [[b"a"], [b"b"], [b"c"]]


def test_several_classes():
    logits = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    labels = torch.tensor([1, 2])
    head = MultiClassHead(3)
    made = spec(head, "eval", logits, labels)
    assert float(made.loss) == pytest.approx(float(functional.cross_entropy(logits, labels, reduction="sum")))
    assert results(made)["accuracy"] == 0.5
    found = spec(head, "infer", logits).predictions
    assert found["class_ids"].tolist() == [[1], [0]]
    torch.testing.assert_close(found["probabilities"], logits.softmax(1))


def test_numbers():
    head = RegressionHead(2)
    logits, labels = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    made = spec(head, "eval", logits, labels)
    assert float(made.loss) == 5
    assert results(made) == {"average_loss": 2.5, "label/mean": 2, "prediction/mean": 1.5}
    assert spec(head, "infer", logits).predictions["predictions"] is logits


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: spec(BinaryHead(), "eval"), "no labels"),
        (lambda: spec(BinaryHead(), "eval", labels=torch.zeros(2)), r"\[3, 1\]"),
        (lambda: spec(BinaryHead(), "eval", labels=np.array(["a", "b", "c"])), "label_vocabulary"),
        (lambda: spec(BinaryHead(["a", "b"]), "eval", labels=np.array(["a", "b", "c"])), "b'c'"),
        (lambda: spec(BinaryHead(["a", "b"]), "eval", labels=TRUTH), "give its words"),
        (lambda: spec(BinaryHead(weight_column="w"), "eval", labels=TRUTH), "weight_column 'w'"),
        (lambda: spec(BinaryHead(), "eval", labels=torch.tensor([0, 1, 2])), "label is 2.0: labels go from 0 to 1"),
        (lambda: spec(MultiClassHead(3), "eval", torch.zeros(1, 3), torch.tensor([3])), "label is 3"),
        (lambda: spec(MultiClassHead(3), "eval", torch.zeros(1, 3), torch.tensor([-1])), "label is -1"),
        (lambda: spec(RegressionHead(), "eval", labels={"a": TRUTH}), "labels are a dict"),
        (lambda: BinaryHead(["a"]), "1 words"),
        (lambda: classification_head(1, None), "n_classes=1"),
        (lambda: RegressionHead(0), "label_dimension=0"),
        (lambda: BinaryHead(loss_reduction="all"), "loss_reduction='all'"),
    ],
)
def test_mistakes_are_said(make, text):
    with pytest.raises((ConfigError, DataError), match=text):
        make()
