"""What the engine needs of a cluster, and the one for a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

__all__ = ["HOW", "Local", "Strategy"]

HOW = Literal["sum", "mean", "min", "max", "concat"]


class Strategy(Protocol):
    """How several workers act as one. A way of distributing is a class with these methods, in a file of its own."""

    worker_id: int
    worker_num: int

    def reduce(self, value: Any, how: HOW) -> Any:
        """Combine a number, tensor or nesting of them over all workers; everybody gets the result."""

    def reduce_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make every worker's gradients of these parameters the mean of all."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite everybody's tensors with the chief's."""

    def tell(self, value: Any) -> Any:
        """The chief's value, on every worker."""

    def barrier(self, name: str, interval: float) -> None:
        """Wait until every worker is here, looking each `interval` seconds, and notice a dead one."""

    def is_saver(self) -> bool:
        """Whether this worker writes checkpoints."""


class Local:
    """One process: nothing to combine and nobody to wait for."""

    worker_id = 0
    worker_num = 1

    def reduce(self, value: Any, how: HOW) -> Any:
        return [value] if how == "concat" and not isinstance(value, (torch.Tensor, list, tuple)) else value

    def reduce_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        pass

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def tell(self, value: Any) -> Any:
        return value

    def barrier(self, name: str, interval: float) -> None:
        pass

    def is_saver(self) -> bool:
        return True
