"""`efl.procedure_fn`: the ready procedures."""

from __future__ import annotations

from plait.engine.meta import fomaml, maml, maml_eval, reptile, reptile_eval
from plait.engine.procedures import cotrain, eval, train, train_and_eval, train_and_evaluate  # noqa: A004 - its name

__all__ = [
    "cotrain",
    "eval",
    "fomaml",
    "maml",
    "maml_eval",
    "reptile",
    "reptile_eval",
    "train",
    "train_and_eval",
    "train_and_evaluate",
]
