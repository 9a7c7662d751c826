"""What both parties of the demo have agreed on: how long they train, with what, and what they say meanwhile."""

from __future__ import annotations

import functools
import logging
import os

import torch

from plait import efl, train

__all__ = ["ADAM", "PASSES", "PROJECT", "Travelled", "fit"]

ADAM = functools.partial(torch.optim.Adam, lr=0.001)
"""A factory: it makes the optimizer when the variables are known."""
PASSES = 20
"""Iterations of training and evaluation; each sees all of its images once."""
PROJECT = "plait-demo"

log = logging.getLogger("plait")


def fit(model: efl.Model, passes: int = PASSES, checkpoint_dir: str | os.PathLike[str] | None = None) -> None:
    """Train and evaluate in turns. In a federation the leader's word decides when a pass ends and when to save."""
    if isinstance(model, efl.FederalModel):
        model.add_hooks([Travelled(model)], efl.MODE.EVAL)
    procedure = efl.procedure_fn.train_and_eval(max_iter=passes)
    model.fit(procedure, log_step=450, project_name=PROJECT, checkpoint_dir=checkpoint_dir, save_steps=100)


class Travelled(train.SessionRunHook):
    """Says at each evaluation how much has travelled between the parties; the view shows the last of it."""

    def __init__(self, model: efl.FederalModel) -> None:
        self._model = model

    def after_run(self, run_context: train.SessionRunContext, run_values: train.SessionRunValues) -> None:
        del run_context, run_values
        channel = self._model.communicator.channel
        sent, received = channel.sent_bytes / 1e6, channel.received_bytes / 1e6
        step = int(self._model.global_step)
        log.info("global step %d; on the wire: %.1f MB sent, %.1f MB received", step, sent, received)
