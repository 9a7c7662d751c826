"""`efl.privacy`: optimizers whose steps tell little of any one row, and gradients that tell less of labels."""

from __future__ import annotations

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
    "make_private",
    "marvell",
    "max_norm",
    "norm_attack",
]
