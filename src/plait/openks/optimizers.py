"""Distributed optimizers: a backward pass, and a step that all workers, or the servers, take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.cluster.roles import Role
from plait.cluster.settings import Distributed
from plait.errors import ConfigError
from plait.openks.program import Program

__all__ = [
    "ASyncModelConfig",
    "BaseDistributedOptimizer",
    "GeneralDistributedOptimizer",
    "GeoSGDModelConfig",
    "HalfSyncModelConfig",
    "HeterogeneousDistributedOptimizer",
    "SyncModeConfig",
    "settings_of",
]

Pairs = list[tuple[Tensor, Tensor]]


def SyncModeConfig() -> Distributed:  # noqa: N802 - OpenKS's name
    """Parameter servers wait for all workers' gradients and take one step by their mean."""
    return Distributed(mode="sync")


def HalfSyncModelConfig() -> Distributed:  # noqa: N802 - same
    """Parameter servers apply each worker's gradients at once; a worker waits for its own."""
    return Distributed(mode="half_async")


def ASyncModelConfig() -> Distributed:  # noqa: N802 - same
    """The same, and a worker does not wait: it computes the next step meanwhile."""
    return Distributed(mode="async")


def GeoSGDModelConfig(push_nums: int = 100) -> Distributed:  # noqa: N802 - same
    """Workers train by themselves, and every `push_nums` steps send the servers how far they have moved."""
    return Distributed(mode="geo", geo_steps=push_nums)


def settings_of(strategy: Any) -> Distributed:
    """What a `strategy` argument means: None, a `Distributed`, or a dict of its fields."""
    if strategy is None:
        return Distributed()
    if isinstance(strategy, Distributed):
        return strategy
    known = [field.name for field in dataclasses.fields(Distributed)]
    if not isinstance(strategy, Mapping):
        raise ConfigError(
            f"strategy is a {type(strategy).__name__}: write plait.cluster.Distributed(...), or a dict of its fields,"
            f" {', '.join(known)}"
        )
    unknown = [str(name) for name in strategy if name not in known]
    if unknown:
        raise ConfigError(f"strategy has {unknown[0]!r}: it takes {', '.join(known)}")
    return Distributed(**strategy)


class BaseDistributedOptimizer:
    """Wraps an optimizer, so that a step is one of all workers; made by `algorithm.distributed_optimizer`.

    Args:
        optimizer: A `torch.optim.Optimizer`; or a function that makes one of variables, which then are the module's.
        strategy: `plait.cluster.Distributed`, or a dict of its fields; None: sync with servers, else all-reduce.
        module: What is trained. It gives the variables their names, and its buffers and sparse embeddings are known.

    """

    def __init__(self, optimizer: Any, strategy: Any = None, *, module: nn.Module | None = None) -> None:
        self._program = Program(optimizer, settings_of(strategy), module)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that is wrapped, such as for a scheduler of `torch.optim.lr_scheduler`."""
        return self._program.optimizer

    def backward(
        self,
        loss: Tensor,
        startup_program: Any = None,
        parameter_list: Iterable[Tensor | str] | None = None,
        no_grad_set: Iterable[Tensor | str] | None = None,
        callbacks: Sequence[Callable[[Tensor, Tensor], Any]] | None = None,
    ) -> Pairs:
        """Compute gradients; returns (variable, gradient) for each variable that the loss depends on.

        Gradients of embeddings on servers are rows that go there by themselves: they are not among these.

        Args:
            loss: One number.
            startup_program: Nothing has to be started; ignored.
            parameter_list: Variables, or their names; None: all that the optimizer moves.
            no_grad_set: Variables, or their names, to leave out.
            callbacks: Functions, each called with every variable and its gradient.

        """
        del startup_program
        self._program.check_ready()
        _check_loss(loss)
        chosen = self._program.chosen(parameter_list, no_grad_set)
        if not chosen:
            raise ConfigError("no variable is left to move: parameter_list and no_grad_set leave none")
        pairs = self._program.run_backward(loss, chosen)
        for callback in callbacks or ():
            for variable, gradient in pairs:
                callback(variable, gradient)
        return pairs

    def apply_gradients(self, params_grads: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Take one step by these gradients, together with the other workers.

        A variable that is not among them does not move. Returns the variables that this step was for; with
        `gradient_merge`, none until it is time.
        """
        self._program.check_ready()
        return self._program.move(_gradients(params_grads))

    def minimize(
        self,
        loss: Tensor,
        startup_program: Any = None,
        parameter_list: Iterable[Tensor | str] | None = None,
        no_grad_set: Iterable[Tensor | str] | None = None,
    ) -> tuple[list[Tensor], Pairs]:
        """One training step: `backward`, then `apply_gradients`; returns what both return, the second's first.

        Call it at every step. Old gradients are dropped by itself.
        """
        pairs = self.backward(loss, startup_program, parameter_list, no_grad_set)
        return self.apply_gradients(pairs), pairs

    def _start(self, role: Role) -> None:
        self._program.connect(role)


class GeneralDistributedOptimizer(BaseDistributedOptimizer):
    """The optimizer of `CPUDistributedAlgorithm`: gradients go to parameter servers, variables come back."""


class HeterogeneousDistributedOptimizer(BaseDistributedOptimizer):
    """The optimizer of `GPUDistributedAlgorithm`: workers without servers, on whatever devices they have."""

    def __init__(self, optimizer: Any, strategy: Any = None, *, module: nn.Module | None = None) -> None:
        super().__init__(optimizer, strategy, module=module)
        self._role = Role()

    def _start(self, role: Role) -> None:
        self._role = role
        self._try_to_compile(None, self._program.module)

    def _try_to_compile(self, startup_program: Any, main_program: Any) -> None:
        """Make the module a distributed one, once; settings that do not go together were refused before."""
        if self._program.refusal is not None:
            self._transpile(startup_program, main_program)

    def _transpile(self, startup_program: Any, main_program: Any) -> None:
        """Join the other workers, and take the first one's variables; a module is changed in place."""
        del startup_program, main_program
        self._program.connect(self._role)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise ConfigError(f"the loss is a {type(loss).__name__}: write a tensor of one number; add several up")
    if loss.numel() != 1:
        raise ConfigError(f"the loss has shape {tuple(loss.shape)}: write one number, such as loss.mean()")
    if not loss.requires_grad:
        raise ConfigError("the loss depends on no variable that can be moved: compute it outside of torch.no_grad()")


def _gradients(given: Any) -> dict[Tensor, Tensor]:
    try:
        found = dict(given)
    except (TypeError, ValueError):
        raise ConfigError(
            f"params_grads is a {type(given).__name__}: write a list of (variable, gradient), as backward() returns it"
        ) from None
    for variable, gradient in found.items():
        if not isinstance(variable, Tensor) or not (gradient is None or isinstance(gradient, Tensor)):
            raise ConfigError("params_grads has what is no pair of tensors: write (variable, gradient)")
    return {variable: gradient for variable, gradient in found.items() if gradient is not None}
