"""Heads: what the logits of a ready Estimator mean; their loss, predictions and metrics, as TensorFlow has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from plait.data.sources import as_tensor
from plait.engine import metrics
from plait.engine.metrics import Measurement
from plait.errors import ConfigError, DataError
from plait.train.head_metrics import accuracy_baseline, auc_precision_recall
from plait.train.spec import EstimatorSpec, ModeKeys
from plait.variables.store import may_look_at

__all__ = ["BinaryHead", "Head", "MultiClassHead", "Reduction", "RegressionHead", "classification_head"]


class Reduction:
    """How the losses of a batch become one number."""

    MEAN = "weighted_mean"
    """Their sum by the sum of the weights."""
    SUM = "weighted_sum"
    """Their sum: TensorFlow's default. Workers in step take the mean of their sums."""
    SUM_BY_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"
    SUM_OVER_BATCH_SIZE = "weighted_sum_over_batch_size"


class Head(ABC):
    """Makes an `EstimatorSpec` of logits. Losses are those of rows, [batch, 1], before weights."""

    logits_dimension: int

    def __init__(self, weight_column: Any = None, loss_reduction: str = Reduction.SUM) -> None:
        self._weight_column = weight_column
        known = [value for name, value in vars(Reduction).items() if name.isupper()]
        if loss_reduction not in known:
            raise ConfigError(f"loss_reduction={loss_reduction!r}: write plait.train.Reduction.SUM, MEAN, ...")
        self._reduction = loss_reduction

    def spec(
        self, features: Any, mode: str, logits: Tensor, labels: Any, train_op_fn: Callable[[Tensor], Any]
    ) -> EstimatorSpec:
        """The spec of one batch; `train_op_fn` makes the train_op of the loss."""
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=self._predictions(logits))
        if labels is None:
            raise DataError("there are no labels: let the input_fn give (features, labels)")
        truth = self._labels(labels, logits)
        weights = self._weights(features, logits)
        losses = self._losses(truth, logits)
        loss = self._reduced(losses, weights)
        if mode == ModeKeys.TRAIN:
            return EstimatorSpec(mode, loss=loss, train_op=train_op_fn(loss))
        found = {"average_loss": metrics.mean(losses, weights), **self._metrics(truth, logits, weights)}
        return EstimatorSpec(mode, loss=loss, eval_metric_ops=found, predictions=self._tensors(logits))

    @abstractmethod
    def _labels(self, labels: Any, logits: Tensor) -> Tensor:
        """Labels as numbers, [batch, label_dimension]."""

    @abstractmethod
    def _losses(self, truth: Tensor, logits: Tensor) -> Tensor: ...

    @abstractmethod
    def _tensors(self, logits: Tensor) -> dict[str, Any]:
        """The predictions that are numbers."""

    @abstractmethod
    def _metrics(self, truth: Tensor, logits: Tensor, weights: Tensor | None) -> dict[str, Measurement]: ...

    def _predictions(self, logits: Tensor) -> dict[str, Any]:
        return self._tensors(logits)

    def _weights(self, features: Any, logits: Tensor) -> Tensor | None:
        """[batch, 1]; a column may be a key, or a `numeric_column`."""
        column = self._weight_column
        if column is None:
            return None
        key = column if isinstance(column, str) else column.key
        if not isinstance(features, Mapping) or key not in features:
            there = ", ".join(map(str, features)) if isinstance(features, Mapping) else "one tensor"
            raise DataError(f"weight_column {key!r} is not among the features: there are {there}")
        value = as_tensor(features[key])
        normalizer = getattr(column, "normalizer_fn", None)
        found = (value if normalizer is None else normalizer(value)).to(logits)
        return _column("weights", found, len(logits))

    def _reduced(self, losses: Tensor, weights: Tensor | None) -> Tensor:
        weighted = losses if weights is None else losses * weights
        total = weighted.sum()
        if self._reduction == Reduction.SUM:
            return total
        if self._reduction == Reduction.SUM_OVER_BATCH_SIZE or weights is None:
            return total / losses.numel()
        each = weights.expand_as(losses)
        return total / (each.sum() if self._reduction == Reduction.MEAN else each.count_nonzero()).clamp(min=1e-12)


def _column(what: str, value: Any, rows: int, width: int = 1) -> Tensor:
    """[rows, width]."""
    if not isinstance(value, Tensor):
        raise DataError(f"{what} are a {type(value).__name__}: give one array of numbers")
    found = value.unsqueeze(-1) if value.dim() == 1 else value
    if found.shape != (rows, width):
        raise DataError(f"{what} have shape {list(value.shape)}: give [{rows}, {width}] for logits of {rows} rows")
    return found


def _to(labels: Any, like: Tensor) -> Any:
    found = as_tensor(labels)
    return found.to(like) if isinstance(found, Tensor) else found


def _checked(labels: Tensor, highest: int) -> Tensor:
    """Labels, which are classes that there are."""
    if len(labels) and may_look_at(labels):
        low, high = (end.item() for end in labels.aminmax())
        if low < 0 or high > highest:
            wrong = low if low < 0 else high
            raise DataError(f"a label is {wrong}: labels go from 0 to {highest}; write n_classes= for more classes")
    return labels


class _Classes:
    """Classes by name, if there is a vocabulary; numbers else."""

    def __init__(self, n_classes: int, vocabulary: Sequence[Any] | None) -> None:
        if vocabulary is not None and len(vocabulary) != n_classes:
            raise ConfigError(f"label_vocabulary has {len(vocabulary)} words for n_classes={n_classes}: give one each")
        self.n_classes = n_classes
        texts = [_bytes(word) for word in vocabulary] if vocabulary is not None else None
        self._ids = None if texts is None else {text: place for place, text in enumerate(texts)}
        names = texts or [str(number).encode() for number in range(n_classes)]
        self._names = np.array(names, dtype=object)

    def ids(self, labels: Any, like: Tensor) -> Tensor:
        """[batch, 1] int64."""
        found = as_tensor(labels)
        if self._ids is not None:
            found = self._looked_up(found)
        elif not isinstance(found, Tensor):
            raise DataError("labels are text: give label_vocabulary= to say which classes there are")
        return _column("labels", found.to(like.device), len(like)).long()

    def _looked_up(self, labels: Any) -> Tensor:
        assert self._ids is not None  # noqa: S101 - asked before
        if isinstance(labels, Tensor):
            raise DataError(f"labels are {labels.dtype} and there is a label_vocabulary: give its words, as an array")
        texts = np.asarray(labels, dtype=object)
        try:
            ids = [self._ids[_bytes(word)] for word in texts.ravel()]
        except KeyError as error:
            raise DataError(f"label {error.args[0]!r} is not in label_vocabulary") from None
        return torch.tensor(ids).reshape(texts.shape)

    def names(self, ids: Tensor) -> dict[str, Any]:
        """The words, as bytes. An export has numbers only, and there the ids have no values."""
        if torch.compiler.is_exporting():
            return {}
        return {"classes": self._names[ids.cpu().numpy()]}


def _bytes(word: Any) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


class BinaryHead(Head):
    """Two classes, one logit."""

    logits_dimension = 1

    def __init__(self, vocabulary: Sequence[Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._classes = _Classes(2, vocabulary)

    def _labels(self, labels: Any, logits: Tensor) -> Tensor:
        if not isinstance(as_tensor(labels), Tensor) or self._classes._ids is not None:  # noqa: SLF001 - a friend
            return self._classes.ids(labels, logits).to(logits)
        return _checked(_column("labels", _to(labels, logits), len(logits)), 1)

    def _losses(self, truth: Tensor, logits: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")

    def _tensors(self, logits: Tensor) -> dict[str, Any]:
        chance = logits.sigmoid()
        return {
            "logits": logits,
            "logistic": chance,
            "probabilities": torch.cat([1 - chance, chance], dim=1),
            "class_ids": (logits > 0).long(),
        }

    def _predictions(self, logits: Tensor) -> dict[str, Any]:
        found = self._tensors(logits)
        return {**found, **self._classes.names(found["class_ids"])}

    def _metrics(self, truth: Tensor, logits: Tensor, weights: Tensor | None) -> dict[str, Measurement]:
        chance, chosen = logits.sigmoid(), (logits > 0).to(truth)
        return {
            "accuracy": metrics.accuracy(truth, chosen, weights),
            "accuracy_baseline": accuracy_baseline(truth, weights),
            "auc": metrics.auc(truth, chance, weights),
            "auc_precision_recall": auc_precision_recall(truth, chance, weights),
            "label/mean": metrics.mean(truth, weights),
            "precision": metrics.precision(truth, chosen, weights),
            "prediction/mean": metrics.mean(chance, weights),
            "recall": metrics.recall(truth, chosen, weights),
        }


class MultiClassHead(Head):
    """More than two classes, a logit each."""

    def __init__(self, n_classes: int, vocabulary: Sequence[Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.logits_dimension = n_classes
        self._classes = _Classes(n_classes, vocabulary)

    def _labels(self, labels: Any, logits: Tensor) -> Tensor:
        return _checked(self._classes.ids(labels, logits), self.logits_dimension - 1)

    def _losses(self, truth: Tensor, logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits, truth.squeeze(1), reduction="none").unsqueeze(1)

    def _tensors(self, logits: Tensor) -> dict[str, Any]:
        return {"logits": logits, "probabilities": logits.softmax(1), "class_ids": logits.argmax(1, keepdim=True)}

    def _predictions(self, logits: Tensor) -> dict[str, Any]:
        found = self._tensors(logits)
        return {**found, **self._classes.names(found["class_ids"])}

    def _metrics(self, truth: Tensor, logits: Tensor, weights: Tensor | None) -> dict[str, Measurement]:
        return {"accuracy": metrics.accuracy(truth, logits.argmax(1, keepdim=True), weights)}


class RegressionHead(Head):
    """Numbers, by their squared errors."""

    def __init__(self, label_dimension: int = 1, **options: Any) -> None:
        super().__init__(**options)
        if label_dimension < 1:
            raise ConfigError(f"label_dimension={label_dimension}: write a number from 1 on")
        self.logits_dimension = label_dimension

    def _labels(self, labels: Any, logits: Tensor) -> Tensor:
        return _column("labels", _to(labels, logits), len(logits), self.logits_dimension)

    def _losses(self, truth: Tensor, logits: Tensor) -> Tensor:
        return (logits - truth).square()

    def _tensors(self, logits: Tensor) -> dict[str, Any]:
        return {"predictions": logits}

    def _metrics(self, truth: Tensor, logits: Tensor, weights: Tensor | None) -> dict[str, Measurement]:
        return {"label/mean": metrics.mean(truth, weights), "prediction/mean": metrics.mean(logits, weights)}


def classification_head(n_classes: int, vocabulary: Sequence[Any] | None, **options: Any) -> Head:
    """The head for so many classes."""
    if isinstance(n_classes, bool) or not isinstance(n_classes, int) or n_classes < 2:
        raise ConfigError(f"n_classes={n_classes!r}: write a whole number from 2 on")
    return BinaryHead(vocabulary, **options) if n_classes == 2 else MultiClassHead(n_classes, vocabulary, **options)
