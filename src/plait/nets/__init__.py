"""Networks: 44 of them, a file for each family, made of the blocks in `blocks.py`."""

from __future__ import annotations

from plait.nets.registry import NETS, build, card, info, scope_of

__all__ = ["NETS", "build", "card", "info", "scope_of"]
