"""What a family of networks is given, and what it has to have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from plait.nets.blocks import Net

__all__ = ["Create", "Shape"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What goes in and comes out."""

    channels: int
    height: int
    width: int
    classes: int


class Create(Protocol):
    """`create` of a family's file: the network `name`, with weights as its paper begins them."""

    def __call__(self, name: str, shape: Shape, *, renorm: bool = False, **options: Any) -> Net:
        """Build it.

        Args:
            name: one of the family's keys.
            shape: of the pictures and the logits; height and width matter where layers depend on them, in
                fully connected layers and auxiliary heads.
            renorm: batch renormalisation instead of batch normalisation.
            **options: the family's own; an unknown one is a TypeError.

        """
