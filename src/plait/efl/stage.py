"""`efl.stage`: the ready stages."""

from __future__ import annotations

from plait.engine.stage import LoopStage, ModelBank, Stage

__all__ = ["LoopStage", "ModelBank", "Stage"]
