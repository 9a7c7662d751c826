"""What tensors are made of, found by walking autograd's graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["leaves"]


def leaves(tensors: Sequence[Tensor], stop: Iterable[Any] = ()) -> set[Tensor]:
    """The leaves that a backward pass from the tensors would give a gradient, as far as the nodes in `stop`."""
    found: set[Tensor] = set()
    done: set[Any] = set(stop)
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is None or node in done:
            continue
        done.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        todo.extend(following for following, _ in node.next_functions)
    return found
