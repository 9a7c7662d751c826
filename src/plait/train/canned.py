"""Ready Estimators over feature columns: linear, deep, and both together."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ConfigError
from plait.feature_column import FeatureColumn, input_layer, linear_model
from plait.train.config import RunConfig, WarmStartSettings
from plait.train.estimator import Estimator
from plait.train.heads import Head, Reduction, RegressionHead, classification_head
from plait.train.optimizers import TrainOp, named_optimizer
from plait.train.spec import EstimatorSpec, ModeKeys
from plait.variables.scope import layer, variable_scope

__all__ = [
    "DNNClassifier",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "LinearClassifier",
    "LinearRegressor",
]

Path = str | os.PathLike[str]
Start = Path | WarmStartSettings | None
Logits = Callable[[Any, str], Tensor]

LINEAR_RATE = 0.2
DNN_RATE = 0.05
JOINT_LINEAR_RATE = 0.005
"""The highest learning rate of the linear part beside a deep one."""


class _Part:
    """One part of a model: how its logits come about, and what moves its variables."""

    def __init__(self, scope: str, logits: Logits, optimizer: Any) -> None:
        self.scope = scope
        self.logits = logits
        self.optimizer = optimizer


def _linear(columns: Iterable[Any], units: int, optimizer: Any, highest: float, sparse_combiner: str) -> _Part:
    listed = _listed(columns)

    def logits(features: Any, mode: str) -> Tensor:
        del mode
        with variable_scope("linear"):
            return linear_model(features, listed, units=units, sparse_combiner=sparse_combiner)

    return _Part("linear", logits, named_optimizer(optimizer, min(highest, 1 / math.sqrt(len(listed)))))


def _deep(
    columns: Iterable[Any],
    units: int,
    hidden_units: Sequence[int] | None,
    optimizer: Any,
    activation_fn: Callable[[Tensor], Tensor],
    dropout: float | None,
    batch_norm: bool,
) -> _Part:
    listed = _listed(columns)
    if not hidden_units or any(width < 1 for width in hidden_units):
        raise ConfigError(f"hidden_units={hidden_units!r}: write the widths of the layers, such as [128, 64]")
    if dropout is not None and not 0 <= dropout < 1:
        raise ConfigError(f"dropout={dropout}: write the share that is dropped, from 0 to below 1, or None")

    def logits(features: Any, mode: str) -> Tensor:
        with variable_scope("dnn"):
            with variable_scope("input_from_feature_columns"):
                net = input_layer(features, listed)
            for number, width in enumerate(hidden_units):
                net = activation_fn(layer(f"hiddenlayer_{number}", _dense, net.shape[1], width)(net))
                if dropout:
                    net = functional.dropout(net, dropout, training=mode == ModeKeys.TRAIN)
                if batch_norm:
                    net = layer(f"hiddenlayer_{number}_batchnorm", nn.BatchNorm1d, width, 1e-3, 1e-3)(net)
            found: Tensor = layer("logits", _dense, net.shape[1], units)(net)
            return found

    return _Part("dnn", logits, named_optimizer(optimizer, DNN_RATE))


def _listed(columns: Any) -> list[Any]:
    listed = [columns] if isinstance(columns, FeatureColumn) else list(columns)
    if not listed:
        raise ConfigError("feature_columns are empty: give at least one column of plait.feature_column")
    return listed


def _dense(width: int, units: int) -> nn.Linear:
    """A layer that begins as TensorFlow's do."""
    made = nn.Linear(width, units)
    with torch.no_grad():
        nn.init.xavier_uniform_(made.weight)
        made.bias.zero_()
    return made


def _model_fn(head: Head, parts: Sequence[_Part]) -> Callable[..., EstimatorSpec]:
    """The logits of all parts added up; each part's optimizer moves its own variables."""

    def train_op(loss: Tensor) -> list[TrainOp]:
        return [TrainOp(part.optimizer, loss, part.scope) for part in parts]

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        logits = parts[0].logits(features, mode)
        for part in parts[1:]:
            logits = logits + part.logits(features, mode)
        return head.spec(features, mode, logits, labels, train_op)

    return model_fn


class LinearClassifier(Estimator):
    """A linear model of classes: FTRL with a rate of min(0.2, 1 / sqrt(columns)), unless another is given."""

    def __init__(
        self,
        feature_columns: Iterable[Any],
        model_dir: Path | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        partitioner: None = None,
        warm_start_from: Start = None,
        loss_reduction: str = Reduction.SUM,
        sparse_combiner: str = "sum",
    ) -> None:
        del partitioner
        head = classification_head(
            n_classes, label_vocabulary, weight_column=weight_column, loss_reduction=loss_reduction
        )
        part = _linear(feature_columns, head.logits_dimension, optimizer, LINEAR_RATE, sparse_combiner)
        super().__init__(_model_fn(head, [part]), model_dir, config, warm_start_from=warm_start_from)


class LinearRegressor(Estimator):
    """A linear model of numbers; optimizers as in `LinearClassifier`."""

    def __init__(
        self,
        feature_columns: Iterable[Any],
        model_dir: Path | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        partitioner: None = None,
        warm_start_from: Start = None,
        loss_reduction: str = Reduction.SUM,
        sparse_combiner: str = "sum",
    ) -> None:
        del partitioner
        head = RegressionHead(label_dimension, weight_column=weight_column, loss_reduction=loss_reduction)
        part = _linear(feature_columns, label_dimension, optimizer, LINEAR_RATE, sparse_combiner)
        super().__init__(_model_fn(head, [part]), model_dir, config, warm_start_from=warm_start_from)


class DNNClassifier(Estimator):
    """A deep model of classes: Adagrad with a rate of 0.05, unless another is given."""

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Iterable[Any],
        model_dir: Path | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[Any] | None = None,
        optimizer: Any = "Adagrad",
        activation_fn: Callable[[Tensor], Tensor] = torch.relu,
        dropout: float | None = None,
        input_layer_partitioner: None = None,
        config: RunConfig | None = None,
        warm_start_from: Start = None,
        loss_reduction: str = Reduction.SUM,
        batch_norm: bool = False,
    ) -> None:
        del input_layer_partitioner
        head = classification_head(
            n_classes, label_vocabulary, weight_column=weight_column, loss_reduction=loss_reduction
        )
        units = head.logits_dimension
        part = _deep(feature_columns, units, hidden_units, optimizer, activation_fn, dropout, batch_norm)
        super().__init__(_model_fn(head, [part]), model_dir, config, warm_start_from=warm_start_from)


class DNNRegressor(Estimator):
    """A deep model of numbers; optimizers as in `DNNClassifier`."""

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Iterable[Any],
        model_dir: Path | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Any = "Adagrad",
        activation_fn: Callable[[Tensor], Tensor] = torch.relu,
        dropout: float | None = None,
        input_layer_partitioner: None = None,
        config: RunConfig | None = None,
        warm_start_from: Start = None,
        loss_reduction: str = Reduction.SUM,
        batch_norm: bool = False,
    ) -> None:
        del input_layer_partitioner
        head = RegressionHead(label_dimension, weight_column=weight_column, loss_reduction=loss_reduction)
        part = _deep(feature_columns, label_dimension, hidden_units, optimizer, activation_fn, dropout, batch_norm)
        super().__init__(_model_fn(head, [part]), model_dir, config, warm_start_from=warm_start_from)


def _joint(
    units: int,
    linear: tuple[Iterable[Any] | None, Any, str],
    deep: tuple[Iterable[Any] | None, Sequence[int] | None, Any, Callable[[Tensor], Tensor], float | None, bool],
) -> list[_Part]:
    """The parts that have columns."""
    columns, optimizer, combiner = linear
    parts = []
    deep_columns, *rest = deep
    if deep_columns is not None:
        parts.append(_deep(deep_columns, units, *rest))
    if columns is not None:
        parts.append(_linear(columns, units, optimizer, JOINT_LINEAR_RATE, combiner))
    if not parts:
        raise ConfigError("give linear_feature_columns=, dnn_feature_columns= or both")
    return parts


class DNNLinearCombinedClassifier(Estimator):
    """Wide and deep, classes: the wide part moves by FTRL, the deep one by Adagrad, unless others are given."""

    def __init__(
        self,
        model_dir: Path | None = None,
        linear_feature_columns: Iterable[Any] | None = None,
        linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: Iterable[Any] | None = None,
        dnn_optimizer: Any = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Callable[[Tensor], Tensor] = torch.relu,
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[Any] | None = None,
        input_layer_partitioner: None = None,
        config: RunConfig | None = None,
        warm_start_from: Start = None,
        loss_reduction: str = Reduction.SUM,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        del input_layer_partitioner
        head = classification_head(
            n_classes, label_vocabulary, weight_column=weight_column, loss_reduction=loss_reduction
        )
        parts = _joint(
            head.logits_dimension,
            (linear_feature_columns, linear_optimizer, linear_sparse_combiner),
            (dnn_feature_columns, dnn_hidden_units, dnn_optimizer, dnn_activation_fn, dnn_dropout, batch_norm),
        )
        super().__init__(_model_fn(head, parts), model_dir, config, warm_start_from=warm_start_from)


class DNNLinearCombinedRegressor(Estimator):
    """Wide and deep, numbers; optimizers as in `DNNLinearCombinedClassifier`."""

    def __init__(
        self,
        model_dir: Path | None = None,
        linear_feature_columns: Iterable[Any] | None = None,
        linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: Iterable[Any] | None = None,
        dnn_optimizer: Any = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Callable[[Tensor], Tensor] = torch.relu,
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        input_layer_partitioner: None = None,
        config: RunConfig | None = None,
        warm_start_from: Start = None,
        loss_reduction: str = Reduction.SUM,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        del input_layer_partitioner
        head = RegressionHead(label_dimension, weight_column=weight_column, loss_reduction=loss_reduction)
        parts = _joint(
            label_dimension,
            (linear_feature_columns, linear_optimizer, linear_sparse_combiner),
            (dnn_feature_columns, dnn_hidden_units, dnn_optimizer, dnn_activation_fn, dnn_dropout, batch_norm),
        )
        super().__init__(_model_fn(head, parts), model_dir, config, warm_start_from=warm_start_from)
