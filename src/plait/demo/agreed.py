"""What both parties of the demo have agreed on: how long they train, and with what."""

from __future__ import annotations

import functools
import os

import torch

from plait import efl

__all__ = ["ADAM", "PASSES", "PROJECT", "fit"]

ADAM = functools.partial(torch.optim.Adam, lr=0.001)
"""A factory: it makes the optimizer when the variables are known."""
PASSES = 20
"""Iterations of training and evaluation; each sees all of its images once."""
PROJECT = "plait-demo"


def fit(model: efl.Model, passes: int = PASSES, checkpoint_dir: str | os.PathLike[str] | None = None) -> None:
    """Train and evaluate in turns. In a federation the leader's word decides when a pass ends and when to save."""
    procedure = efl.procedure_fn.train_and_eval(max_iter=passes)
    model.fit(procedure, log_step=450, project_name=PROJECT, checkpoint_dir=checkpoint_dir, save_steps=100)
