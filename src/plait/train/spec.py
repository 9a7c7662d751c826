"""`EstimatorSpec` and what goes with it: what a `model_fn` says about one batch, in one mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.engine.hooks import SessionRunHook
from plait.engine.metrics import Measurement
from plait.errors import ConfigError, FunctionError

__all__ = ["EstimatorSpec", "ModeKeys"]


class ModeKeys:
    """What a call of a `model_fn` or an `input_fn` is for."""

    EVAL = "eval"
    PREDICT = "infer"
    TRAIN = "train"


class EstimatorSpec:
    """What a `model_fn` returns. It is made at every step, so its parts are looked at in the first one only.

    Args:
        mode: the mode that the `model_fn` was called in.
        predictions: a tensor, or tensors by name; needed in PREDICT.
        loss: one number; needed in TRAIN and EVAL.
        train_op: what moves the variables, needed in TRAIN: what an optimizer's `minimize(loss)` gives, a list of
            such, an optimizer factory for all variables, or {scope: factory}.
        eval_metric_ops: metrics by name: what `plait.metrics` gives.
        export_outputs: tensors by name, or such dicts by the name of a signature; without them, the predictions.
        training_chief_hooks: hooks of training that only the chief has.
        training_hooks: hooks of training.
        scaffold: must be None.
        evaluation_hooks: hooks of evaluations.
        prediction_hooks: hooks of predictions.

    """

    __slots__ = (
        "eval_metric_ops",
        "evaluation_hooks",
        "export_outputs",
        "loss",
        "mode",
        "prediction_hooks",
        "predictions",
        "train_op",
        "training_chief_hooks",
        "training_hooks",
    )

    def __init__(
        self,
        mode: str,
        predictions: Any = None,
        loss: Any = None,
        train_op: Any = None,
        eval_metric_ops: Mapping[str, Any] | None = None,
        export_outputs: Mapping[str, Any] | None = None,
        training_chief_hooks: Sequence[SessionRunHook] | None = None,
        training_hooks: Sequence[SessionRunHook] | None = None,
        scaffold: None = None,
        evaluation_hooks: Sequence[SessionRunHook] | None = None,
        prediction_hooks: Sequence[SessionRunHook] | None = None,
    ) -> None:
        if scaffold is not None:
            raise ConfigError("scaffold= has no meaning here: the Estimator saves and restores the model's variables")
        self.mode = mode
        self.predictions = predictions
        self.loss = loss
        self.train_op = train_op
        self.eval_metric_ops = eval_metric_ops
        self.export_outputs = export_outputs
        self.training_chief_hooks = training_chief_hooks
        self.training_hooks = training_hooks
        self.evaluation_hooks = evaluation_hooks
        self.prediction_hooks = prediction_hooks

    def check(self, mode: str) -> None:
        """Raise if a part is missing that `mode` needs, or has a form that nothing can be made of."""
        if self.mode != mode:
            raise FunctionError(f"the model_fn was called with mode {mode!r} and returned a spec of {self.mode!r}")
        needs = {ModeKeys.TRAIN: ("loss", "train_op"), ModeKeys.EVAL: ("loss",), ModeKeys.PREDICT: ("predictions",)}
        for name in needs[mode]:
            if getattr(self, name) is None:
                raise FunctionError(
                    f"the EstimatorSpec of mode {mode!r} has no {name}: write EstimatorSpec({name}=...)"
                )
        for name, metric in (self.eval_metric_ops or {}).items():
            measurement_of(name, metric)

    def hooks(self, mode: str, *, chief: bool) -> list[SessionRunHook]:
        """The hooks of one mode."""
        if mode == ModeKeys.TRAIN:
            return [*(self.training_hooks or ()), *((self.training_chief_hooks or ()) if chief else ())]
        return list((self.evaluation_hooks if mode == ModeKeys.EVAL else self.prediction_hooks) or ())


def measurement_of(name: str, metric: Any) -> Any:
    """What `Model.add_metric` takes, of a metric or of TensorFlow's pair (value, update)."""
    one = metric[1] if isinstance(metric, tuple) and len(metric) == 2 else metric
    if isinstance(metric, tuple) and not isinstance(one, Measurement):
        raise FunctionError(
            f"eval_metric_ops[{name!r}] is a pair with a {type(one).__name__}: give what a function of plait.metrics "
            "gives, such as plait.metrics.auc(labels, predictions)"
        )
    return one
