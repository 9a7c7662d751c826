"""Optimizers with TensorFlow 1's names and arguments; each is a factory, and `minimize` makes it a `train_op`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from plait.errors import ConfigError
from plait.optim.factories import get_optimizer_fn

__all__ = [
    "AdadeltaOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "RMSPropOptimizer",
    "TrainOp",
    "named_optimizer",
]


class TrainOp(NamedTuple):
    """A loss, and what moves which variables by it: what `minimize` gives."""

    optimizer: Any
    """A factory: a function of a list of variables."""
    loss: torch.Tensor
    var_list: Sequence[torch.Tensor] | str | None = None
    """The variables, or the scope that they are in; None: all."""


class Optimizer:
    """The base of the optimizers here. It takes little to make one: a `model_fn` does it at every step.

    The torch optimizer is made once, from the first one; a rate that changes is a function of the step
    (`learning_rate=schedule`), not a number that the `model_fn` computes.
    """

    kind = ""
    """The name under which `plait.optim` has it."""

    def __init__(self, learning_rate: Any, **options: Any) -> None:
        self._learning_rate = learning_rate
        self._options = options

    def __call__(self, params: Any) -> torch.optim.Optimizer:
        factory = get_optimizer_fn(self.kind, self._learning_rate, None, **self._options)()
        return factory(params)

    def minimize(
        self,
        loss: torch.Tensor,
        global_step: Any = None,
        var_list: Sequence[torch.Tensor] | str | None = None,
        gate_gradients: Any = None,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: None = None,
    ) -> TrainOp:
        """The `train_op` that moves `var_list` (variables, or a scope; None: all) by the gradients of `loss`.

        The Estimator counts `global_step` by itself. The arguments after `var_list` have no meaning here.
        """
        del global_step, gate_gradients, aggregation_method, colocate_gradients_with_ops, name
        if grad_loss is not None:
            raise ConfigError("minimize(grad_loss=...) is not supported: multiply the loss by it")
        return TrainOp(self, loss, var_list)

    def __repr__(self) -> str:
        options = {"learning_rate": self._learning_rate, **self._options}
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in options.items())})"


class AdadeltaOptimizer(Optimizer):
    """ADADELTA."""

    kind = "adadelta"

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-08,
        use_locking: bool = False,
        name: str = "Adadelta",
    ) -> None:
        del use_locking, name
        super().__init__(learning_rate, rho=rho, epsilon=epsilon)


class AdagradOptimizer(Optimizer):
    """Adagrad."""

    kind = "adagrad"

    def __init__(
        self,
        learning_rate: Any,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        del use_locking, name
        super().__init__(learning_rate, initial_accumulator_value=initial_accumulator_value)


class AdamOptimizer(Optimizer):
    """Adam."""

    kind = "adam"

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-08,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        del use_locking, name
        super().__init__(learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon)


class FtrlOptimizer(Optimizer):
    """FTRL-proximal."""

    kind = "ftrl"

    def __init__(
        self,
        learning_rate: Any,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
    ) -> None:
        del use_locking, name, accum_name, linear_name
        super().__init__(
            learning_rate,
            learning_rate_power=learning_rate_power,
            initial_accumulator_value=initial_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
            l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
        )


class GradientDescentOptimizer(Optimizer):
    """Gradient descent."""

    kind = "sgd"

    def __init__(self, learning_rate: Any, use_locking: bool = False, name: str = "GradientDescent") -> None:
        del use_locking, name
        super().__init__(learning_rate)


class MomentumOptimizer(Optimizer):
    """Gradient descent with momentum."""

    kind = "momentum"

    def __init__(
        self,
        learning_rate: Any,
        momentum: float,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        del use_locking, name
        super().__init__(learning_rate, momentum=momentum, use_nesterov=use_nesterov)


class RMSPropOptimizer(Optimizer):
    """RMSProp."""

    kind = "rmsprop"

    def __init__(
        self,
        learning_rate: Any,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        del use_locking, name
        super().__init__(learning_rate, decay=decay, momentum=momentum, epsilon=epsilon, centered=centered)


_NAMED: dict[str, type[Optimizer]] = {
    "Adagrad": AdagradOptimizer,
    "Adam": AdamOptimizer,
    "Ftrl": FtrlOptimizer,
    "RMSProp": RMSPropOptimizer,
    "SGD": GradientDescentOptimizer,
}


def named_optimizer(optimizer: Any, learning_rate: float) -> Any:
    """A factory: one of TensorFlow's five names at `learning_rate`, a function that gives one, or itself."""
    if isinstance(optimizer, str):
        if optimizer not in _NAMED:
            raise ConfigError(f"optimizer={optimizer!r}: write one of {', '.join(_NAMED)}, or an optimizer")
        return _NAMED[optimizer](learning_rate)
    if not callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}: write a name, plait.train.AdamOptimizer(0.001), or a function "
            "of a list of variables, such as functools.partial(torch.optim.SGD, lr=0.1)"
        )
    return optimizer
