"""`SyncReplicasOptimizer`: TensorFlow's way to say that workers move the variables together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.engine.hooks import SessionRunHook
from plait.errors import ConfigError
from plait.optim.assign import make_optimizer

__all__ = ["SyncReplicasOptimizer", "wanted_replicas"]

_WANTED = "replicas_to_aggregate"


class SyncReplicasOptimizer:
    """An optimizer factory whose steps take the gradients of `replicas_to_aggregate` workers.

    With fewer than there are workers, each step takes those that come first; late ones are dropped, and counted. That
    needs parameter servers. In one process it is the inner optimizer.

    >>> opt = SyncReplicasOptimizer(lambda params: torch.optim.SGD(params, lr=0.1), replicas_to_aggregate=2)
    >>> opt([torch.zeros(1, requires_grad=True)]).param_groups[0]["lr"]
    0.1
    """

    def __init__(
        self,
        opt: Any,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: None = None,
        variables_to_average: None = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
    ) -> None:
        del use_locking  # nothing here runs at the same time
        if variable_averages is not None or variables_to_average is not None:
            raise ConfigError("variable_averages is not supported: leave it out")
        total = replicas_to_aggregate if total_num_replicas is None else total_num_replicas
        if not 1 <= replicas_to_aggregate <= total:
            raise ConfigError(
                f"replicas_to_aggregate={replicas_to_aggregate}, total_num_replicas={total}: write 1 to the number of "
                "workers"
            )
        self.opt = opt
        self.replicas_to_aggregate = replicas_to_aggregate
        self.total_num_replicas = total
        self.name = name

    def __call__(self, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        made = make_optimizer(self.opt, params)
        setattr(made, _WANTED, self.replicas_to_aggregate)
        return made

    def make_session_run_hook(self, is_chief: bool, num_tokens: int = -1) -> SessionRunHook:
        """TensorFlow starts its queues of tokens with this hook; here it has nothing to do."""
        del is_chief, num_tokens
        return SessionRunHook()


def wanted_replicas(optimizers: Sequence[torch.optim.Optimizer], workers: int) -> int | None:
    """How many workers' gradients these optimizers want a step to take; None: as many as there are."""
    found = {getattr(one, _WANTED) for one in optimizers if hasattr(one, _WANTED)}
    if len(found) > 1:
        raise ConfigError(f"SyncReplicasOptimizer: {sorted(found)} replicas_to_aggregate; write the same for all")
    for wanted in found:
        if wanted > workers > 1:
            raise ConfigError(f"replicas_to_aggregate={wanted}: there are {workers} workers")
        return min(int(wanted), workers)
    return None
