"""What the processes of a cluster tell each other beside the tensors of training."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Control"]


class Control(Protocol):
    """How the processes of one cluster exchange small things; every call is bounded by a deadline.

    Values are trees: dicts with string keys, lists, None, bool, int, float, str, and tensors among the leaves.
    """

    def gather(self, name: str, value: Any, *, everyone: bool = False) -> list[Any]:
        """Every worker's value, in the order of workers; with `everyone`, the servers' after them.

        It returns when all have called it, so it is a barrier, too. `name` is for messages: who waits for what.
        Raises ClusterError, naming those who did not come, after the deadline or when one is known to be dead.
        """

    def close(self) -> None:
        """Leave; the others are told."""
