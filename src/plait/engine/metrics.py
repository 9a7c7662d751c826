"""Metrics: what is measured at every step, and accumulated on the device without waiting for it.

Inside a `loss_fn` or an `eval_fn`, at every step:

    model.add_metric("auc", metrics.auc(labels, predictions))

A function such as `auc` checks shapes and returns a `Measurement`: this step's tensors, and how to accumulate them. The
model makes one `Metric` of the first measurement and updates it with each. No value is looked at, so none is waited
for: one outside of what a metric expects is not noticed. Rows with a label above 0 are the positive ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from plait.engine.auc import binned_auc, exact_auc, grouped_auc
from plait.errors import FunctionError, MismatchError

__all__ = [
    "Measurement",
    "Metric",
    "accuracy",
    "auc",
    "gauc",
    "group_auc",
    "in_top_k",
    "latest",
    "log_loss",
    "mean",
    "precision",
    "recall",
    "rmse",
    "root_mean_squared_error",
    "top_k",
]


class Metric(ABC):
    """An accumulator. Sums are in float64, or in float32 on a device without it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = _sum_dtype(device)

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take in one step's `Measurement.args`."""

    @abstractmethod
    def result(self) -> Tensor:
        """The value so far: no dimensions, on the device, nan when nothing was seen."""

    @abstractmethod
    def reset(self) -> None: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the state; a metric that loads it goes on bit for bit like this one."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...

    @abstractmethod
    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Replace the state by that of several workers together, in their order."""

    def _read(self, state: Mapping[str, Tensor], name: str, dtype: torch.dtype | None = None) -> Tensor:
        if name not in state:
            raise MismatchError(
                f"the state of a {type(self).__name__} metric needs {name!r} and has {sorted(state)}; "
                "give the state of a metric of the same kind"
            )
        return state[name].to(device=self.device, dtype=dtype)


class Measurement:
    """One step's tensors and the kind of metric that takes them.

    `value, update_op = metrics.auc(...)`, as TensorFlow has it, gives the measurement twice.
    """

    __slots__ = ("args", "check", "kind")

    def __init__(
        self,
        kind: Callable[[torch.device], Metric],
        args: tuple[Tensor | None, ...],
        check: Callable[[], None] | None = None,
    ) -> None:
        self.kind = kind
        self.args = args
        self.check = check
        """Looks at the values of the first step, which may be waited for."""

    def create(self) -> Metric:
        """A metric that has seen nothing yet, on the device of the first tensor."""
        device = next(arg.device for arg in self.args if arg is not None)
        return self.kind(device)

    def checked(self) -> Measurement:
        """The same, after a look at its values: for the first step only."""
        if self.check is not None:
            self.check()
        return self

    def __iter__(self) -> Iterator[Measurement]:
        return iter((self, self))


class Sums(Metric):
    """A metric whose state is one tensor of sums; workers' are added."""

    def __init__(self, device: torch.device, *shape: int) -> None:
        super().__init__(device)
        with torch.inference_mode(False):  # made in there, the state could not be written outside
            self.sums = torch.zeros(shape, dtype=self.dtype, device=device)

    def reset(self) -> None:
        self.sums.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        return {"sums": self.sums.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.sums.copy_(self._checked(state))

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        total = torch.zeros_like(self.sums)
        for state in states:
            total += self._checked(state)
        self.sums.copy_(total)

    def _checked(self, state: Mapping[str, Tensor]) -> Tensor:
        sums = self._read(state, "sums", self.dtype)
        if sums.shape != self.sums.shape:
            raise MismatchError(
                f"the state of this {type(self).__name__} metric has shape {_show(self.sums)} and the one given "
                f"{_show(sums)}; keep the metric's settings as they were when the state was saved"
            )
        return sums


class Mean(Sums):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device, 2)
        self.total, self.weight = self.sums.unbind()

    def update(self, values: Tensor, weights: Tensor | None = None) -> None:
        values = values.detach()  # a loss at every step: this is cheaper than to enter and leave no_grad
        if weights is None:
            self.total.add_(values.sum(dtype=self.dtype) if values.dim() else values)
            self.weight.add_(values.numel())
        else:
            weights = weights.detach().to(self.dtype).broadcast_to(values.shape)
            self.total.add_((values * weights).sum())
            self.weight.add_(weights.sum())

    def result(self) -> Tensor:
        return self.total / self.weight


class RootMean(Mean):
    def result(self) -> Tensor:
        return super().result().sqrt()


class BinnedAuc(Sums):
    """Histograms of the negatives' and the positives' predictions: bin i holds those in (i/bins, (i + 1)/bins]."""

    def __init__(self, device: torch.device, num_thresholds: int) -> None:
        self.bins = num_thresholds - 1
        super().__init__(device, 2, self.bins)

    @torch.no_grad()
    def update(self, labels: Tensor, predictions: Tensor, weights: Tensor | None = None) -> None:
        place = (predictions.to(self.dtype) * self.bins).ceil().sub(1).clamp(0, self.bins - 1)
        amounts = place - place  # 0, or nan for what has no place: it shall be seen in the result
        amounts += 1 if weights is None else weights
        index = place.nan_to_num(0).long() + (labels > 0) * self.bins
        # index_put_ and not scatter_add_: on a GPU it adds in one order, so that weights give the same sums again
        self.sums.view(-1).index_put_((index.flatten(),), amounts.flatten(), accumulate=True)

    def result(self) -> Tensor:
        return binned_auc(*self.sums.unbind())


class Rows(Metric):
    """A metric that keeps a few columns of every row until the result is asked for; workers' are joined in order."""

    columns: ClassVar[dict[str, torch.dtype]]

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.parts: list[tuple[Tensor, ...]] = []

    def joined(self) -> tuple[Tensor, ...]:
        """Each column in one piece. They stay so: the next result need not join them again."""
        if not self.parts:
            return tuple(torch.zeros(0, dtype=dtype, device=self.device) for dtype in self.columns.values())
        if len(self.parts) > 1:
            self.parts = [tuple(torch.cat(column) for column in zip(*self.parts, strict=True))]
        return self.parts[0]

    def reset(self) -> None:
        self.parts = []

    def state_dict(self) -> dict[str, Tensor]:
        kept = zip(self.columns, self.joined(), strict=True)
        return {name: column.clone(memory_format=torch.contiguous_format) for name, column in kept}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.merge([state])

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self.parts = [tuple(self._read(state, name).clone() for name in self.columns) for state in states]


class ExactAuc(Rows):
    columns: ClassVar[dict[str, torch.dtype]] = {
        "scores": torch.float32,
        "positive": torch.bool,
        "weights": torch.float32,
    }

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.one = torch.ones((), dtype=self.dtype, device=device)

    @torch.no_grad()
    def update(self, labels: Tensor, predictions: Tensor, weights: Tensor | None = None) -> None:
        weights = self.one if weights is None else weights.to(self.dtype, copy=True)
        # copies: what the user hands in may be a buffer that the next step fills anew
        self.parts.append(
            (predictions.flatten().clone(), (labels > 0).flatten(), weights.broadcast_to(labels.shape).flatten())
        )

    def result(self) -> Tensor:
        scores, positive, weights = self.joined()
        return exact_auc(scores.to(self.dtype), positive, weights.to(self.dtype))


class GroupAuc(Rows):
    columns: ClassVar[dict[str, torch.dtype]] = {
        "scores": torch.float32,
        "positive": torch.bool,
        "groups": torch.int64,
    }

    @torch.no_grad()
    def update(self, labels: Tensor, predictions: Tensor, groups: Tensor) -> None:
        # copies, for the reason given in ExactAuc
        self.parts.append((predictions.flatten().clone(), (labels > 0).flatten(), groups.flatten().clone()))

    def result(self) -> Tensor:
        scores, positive, groups = self.joined()
        return grouped_auc(scores.to(self.dtype), positive, groups)


class Latest(Metric):
    """Of several workers, the last that has a value gives it."""

    value: Tensor | None = None
    """As it came: detached when it is shown, which is seldom."""

    def update(self, value: Tensor) -> None:
        self.value = value

    def result(self) -> Tensor:
        if self.value is None:
            return torch.full((), math.nan, device=self.device)
        return self.value.detach().reshape(())

    def reset(self) -> None:
        self.value = None

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.value is None else {"value": self.value.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.merge([state])

    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self.value = None
        for state in states:
            if state:
                self.value = self._read(state, "value").clone()


def mean(values: Tensor | float, weights: Tensor | None = None) -> Measurement:
    values = _as_tensor("mean", "values", values)
    _check_weights("mean", weights, values)
    return Measurement(Mean, (values, weights))


def latest(value: Tensor | float) -> Measurement:
    """The last value alone. It is not copied: do not write into it afterwards."""
    value = _as_tensor("latest", "value", value)
    if value.numel() != 1:
        raise FunctionError(f"metrics.latest: value has shape {_show(value)}; give one number, such as value.mean()")
    return Measurement(Latest, (value.detach(),))


@torch.no_grad()
def accuracy(labels: Tensor, predictions: Tensor, weights: Tensor | None = None) -> Measurement:
    """The share of rows that are right.

    Predictions are classes, or scores with the classes as one more, last dimension.
    """
    _check_classes("accuracy", labels, predictions, or_same=True)
    _check_weights("accuracy", weights, labels)
    if predictions.dim() > labels.dim():
        predictions = predictions.argmax(-1)
    return Measurement(Mean, (predictions == labels, weights))


@torch.no_grad()
def top_k(labels: Tensor, predictions: Tensor, k: int = 5) -> Measurement:
    """The share of rows whose class is among the `k` of highest score; `torch.topk` decides between equal ones."""
    _check_classes("top_k", labels, predictions, or_same=False)
    classes = predictions.shape[-1]
    if not 1 <= k <= classes:
        raise FunctionError(
            f"metrics.top_k: k is {k} and predictions are {_show(predictions)}; give a k of 1 to {classes}"
        )
    best = predictions.topk(k, dim=-1, sorted=False).indices
    return Measurement(Mean, ((best == labels.unsqueeze(-1)).any(-1), None))


@torch.no_grad()
def precision(
    labels: Tensor, predictions: Tensor, weights: Tensor | None = None, threshold: float = 0.5
) -> Measurement:
    """Of the rows predicted above `threshold`, the share that is positive; nan while there is none.

    Predictions are probabilities, bool, or 0 and 1.
    """
    _check_same("precision", labels, predictions)
    _check_weights("precision", weights, labels)
    predicted = predictions > threshold
    return Measurement(Mean, (labels > 0, predicted if weights is None else predicted * weights))


@torch.no_grad()
def recall(labels: Tensor, predictions: Tensor, weights: Tensor | None = None, threshold: float = 0.5) -> Measurement:
    """Of the positive rows, the share predicted above `threshold`; nan while there is none.

    Predictions are probabilities, bool, or 0 and 1.
    """
    _check_same("recall", labels, predictions)
    _check_weights("recall", weights, labels)
    positive = labels > 0
    return Measurement(Mean, (predictions > threshold, positive if weights is None else positive * weights))


@torch.no_grad()
def root_mean_squared_error(labels: Tensor, predictions: Tensor, weights: Tensor | None = None) -> Measurement:
    _check_same("root_mean_squared_error", labels, predictions)
    _check_weights("root_mean_squared_error", weights, labels)
    return Measurement(RootMean, ((_wide(predictions) - _wide(labels)).square(), weights))


@torch.no_grad()
def log_loss(labels: Tensor, predictions: Tensor, weights: Tensor | None = None, epsilon: float = 1e-7) -> Measurement:
    """The mean of -log(probability of what was true); probabilities are first held inside [epsilon, 1 - epsilon].

    Predictions have the labels' shape (the probability of the positive class; labels are 0, 1 or between) or the
    classes as one more, last dimension (labels are then whole numbers).
    """
    _check_classes("log_loss", labels, predictions, or_same=True)
    _check_weights("log_loss", weights, labels)
    chances = _wide(predictions)
    if predictions.dim() > labels.dim():
        if labels.is_floating_point():
            raise FunctionError(
                f"metrics.log_loss: labels are {labels.dtype} and predictions, {_show(predictions)}, have a dimension "
                "of classes; give labels of an integer dtype"
            )
        loss = -_log(chances.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1), epsilon)
    else:
        truth = _wide(labels)
        loss = -(truth * _log(chances, epsilon) + (1 - truth) * _log(1 - chances, epsilon))
    return Measurement(Mean, (loss, weights))


def auc(
    labels: Tensor,
    predictions: Tensor,
    weights: Tensor | None = None,
    num_thresholds: int = 200,
    exact: bool = False,
) -> Measurement:
    """The area under the ROC curve; nan while there is but one class.

    Predictions are probabilities, 0 to 1. By default they are counted in `num_thresholds - 1` bins, and two rows of one
    bin count as a tie: little memory, and an error that grows as predictions crowd together. `exact=True` takes any
    score and keeps every row: 13 bytes for a float32 prediction, and several times that while the result is computed.
    """
    _check_same("auc", labels, predictions)
    _check_weights("auc", weights, labels)
    if num_thresholds < 2:
        raise FunctionError(f"metrics.auc: num_thresholds is {num_thresholds}; give 2 or more")
    if exact:
        return Measurement(ExactAuc, (labels, predictions, weights))
    kind = partial(BinnedAuc, num_thresholds=num_thresholds)
    return Measurement(kind, (labels, predictions, weights), partial(_check_probabilities, predictions))


def _check_probabilities(predictions: Tensor) -> None:
    if predictions.numel() and bool(((predictions < 0) | (predictions > 1)).any()):
        raise FunctionError(
            "metrics.auc: predictions go beyond 0 and 1; give probabilities, such as logits.sigmoid(), or exact=True"
        )


def group_auc(labels: Tensor, predictions: Tensor, groups: Tensor) -> Measurement:
    """The exact AUC inside each group (a user, say), averaged over the groups that have both classes, by their rows.

    Keeps every row: 13 bytes for a float32 prediction and an int64 group.
    """
    _check_same("group_auc", labels, predictions)
    _check_same("group_auc", labels, groups, "groups")
    return Measurement(GroupAuc, (labels, predictions, groups))


gauc = group_auc
in_top_k = top_k
rmse = root_mean_squared_error


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_sum_dtype(tensor.device))


def _log(chances: Tensor, epsilon: float) -> Tensor:
    return chances.clamp(epsilon, 1 - epsilon).log()


def _show(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _as_tensor(metric: str, what: str, value: Tensor | float) -> Tensor:
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    _check_tensor(metric, what, value)
    return value


def _check_tensor(metric: str, what: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise FunctionError(f"metrics.{metric}: {what} is a {type(value).__name__}; give a torch.Tensor")


def _check_same(metric: str, labels: Tensor, other: Tensor, what: str = "predictions") -> None:
    _check_tensor(metric, "labels", labels)
    _check_tensor(metric, what, other)
    if labels.shape != other.shape:
        raise FunctionError(
            f"metrics.{metric}: labels are {_show(labels)} and {what} {_show(other)}; give both the same shape"
        )


def _check_classes(metric: str, labels: Tensor, predictions: Tensor, *, or_same: bool) -> None:
    """Predictions have one more dimension than labels, of 2 or more classes (1 would make every row right)."""
    _check_tensor(metric, "labels", labels)
    _check_tensor(metric, "predictions", predictions)
    if or_same and labels.shape == predictions.shape:
        return
    if labels.shape != predictions.shape[:-1] or labels.dim() == predictions.dim() or predictions.shape[-1] < 2:
        same = f"{_show(labels)} or " if or_same else ""
        wanted = ", ".join([*map(str, labels.shape), "classes"])
        raise FunctionError(
            f"metrics.{metric}: labels are {_show(labels)} and predictions {_show(predictions)}; "
            f"give predictions of shape {same}[{wanted}], with 2 classes or more"
        )


def _check_weights(metric: str, weights: Tensor | None, rows: Tensor) -> None:
    if weights is None:
        return
    _check_tensor(metric, "weights", weights)
    sizes = zip(reversed(weights.shape), reversed(rows.shape), strict=False)
    if weights.dim() > rows.dim() or any(size not in (1, wanted) for size, wanted in sizes):
        raise FunctionError(
            f"metrics.{metric}: weights are {_show(weights)} for rows of shape {_show(rows)}; "
            "give weights of that shape, or of one that broadcasts to it"
        )
