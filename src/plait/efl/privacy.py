"""`efl.privacy`: optimizers whose steps tell little of any one row, and gradients that tell less of labels."""

from __future__ import annotations

from plait.engine.model import Model
from plait.errors import TaskError
from plait.privacy.labels import direction_attack, marvell, max_norm, norm_attack
from plait.privacy.optimizers import DPSGD, DPAdagrad, DPAdam, DPFtrl, DPMomentum, DPRMSprop, make_private

__all__ = [
    "DPSGD",
    "DPAdagrad",
    "DPAdam",
    "DPFtrl",
    "DPMomentum",
    "DPRMSprop",
    "direction_attack",
    "layers",
    "make_private",
    "marvell",
    "max_norm",
    "norm_attack",
]


def layers(model: Model, task: str | None = None) -> str:
    """How the norms of each layer's gradients were found in the last private step: a line for each layer.

    "ghost" makes no gradient of a row, "direct" makes them all, "vmap" is for layers that plait has no rule for; "-"
    means that the layer was not called.
    """
    if task not in model.private_tasks:
        private = ", ".join(map(repr, model.private_tasks)) or "none"
        raise TaskError(f"task {task!r} is not private, and these are: {private}; compile() with a private optimizer")
    rows = [(one.layer, one.kind, one.path) for one in model.private_tasks[task].recorder.report()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {kind:{widths[1]}}  {path}" for name, kind, path in rows)
