"""`efl.framework`: what usually stays behind the scenes."""

from __future__ import annotations

from plait.efl.framework import task_scope
from plait.engine.manager import StageContext, StageManager

__all__ = ["StageContext", "StageManager", "task_scope"]
