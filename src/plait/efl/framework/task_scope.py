"""`efl.framework.task_scope`, the module that the document names."""

from __future__ import annotations

from plait.engine.task import TaskScope, current_task_scope, task_scope

__all__ = ["TaskScope", "current_task_scope", "task_scope"]
