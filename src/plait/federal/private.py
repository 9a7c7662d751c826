"""What a private party does about the other one: noise on gradients that go back, and a look at its first step.

A row's gradient goes back clipped and noised by itself, since the other party knows whose it is. What is *sent* (not
returned) is made of rows, and goes as it is: against the other party, nothing here hides those rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, FunctionError
from plait.federal.contract import key_of
from plait.federal.exchange import Exchange, Hide
from plait.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from plait.engine.model import Model
    from plait.engine.private import PrivateTask

__all__ = ["PrivateParty"]

_MAX_SLOTS = 1 << 16
_CHUNK = 128
"""Noise is drawn for a multiple of so many rows: drawn batches have many sizes, and a buffer is kept for each."""


class PrivateParty:
    """The private tasks of one party's model, if it has any."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._noises: dict[str, float] = {}
        self._tasks: dict[str, PrivateTask] = {}

    def prepare(self, model: Model) -> None:
        """The build is over, and optimizers are known."""
        for task, private in model.private_tasks.items():
            key = key_of(TaskScope(MODE.TRAIN, task))
            self._tasks[key] = private
            self._exchange.watched.add(key)
            self._noises[key] = 0.0
            if model.opt_config["BACKEND_MODE"] == "noise" and key in self._exchange.gives:
                _check_groups(model, private)
                self._noises[key] = private.parts[0].living.multiplier
                self._exchange.hides[key] = _hider(model, private)

    def returned_noise(self, scope: TaskScope) -> float | None:
        """Of what the other party gets to see in a step, all together, and against it: 0 if anything is bare."""
        key = key_of(scope)
        if key in self._exchange.sends:
            return 0.0
        given = len(self._exchange.gives.get(key, ()))
        return self._noises[key] / math.sqrt(given) if given else None

    def look(self) -> None:
        """Look at the first steps of each task: whether rows mix, and variables are used where they are known.

        One is enough, unless gradients in it were zero: then the next is looked at, too.
        """
        for key in list(self._exchange.watched):
            losses, views = self._exchange.by_row(key), self._exchange.views.pop(key, {})
            if losses is None or len(losses) < 2:
                continue
            before = rng_state()
            enough = [self._tasks[key].recorder.check(losses), _rows_are_apart(losses, views)]
            set_rng_state(before)
            if all(enough):
                self._exchange.watched.discard(key)


def _check_groups(model: Model, task: PrivateTask) -> None:
    """Rows of one micro-batch may not meet before their gradients go back, each with the noise of one row."""
    count = task.parts[0].living.private.num_microbatches
    if count is not None and callable(model.opt_config["REDUCE"]):
        raise ConfigError(
            f"num_microbatches={count}, opt_config REDUCE is a function and BACKEND_MODE='noise': what the function "
            "makes of a row's loss may depend on others of its micro-batch, and noise for one row does not hide them; "
            "leave num_microbatches out, or write REDUCE='mean', REDUCE='sum' or BACKEND_MODE='unnoise'"
        )


def _rows_are_apart(losses: Tensor, views: Mapping[str, Tensor]) -> bool:
    """Refuse losses of some rows that reach others of what was received. False if it was too empty to tell."""
    rows, told = len(losses), set()
    random = torch.Generator().manual_seed(rows)
    half = (torch.randperm(rows, generator=random) < rows // 2).to(losses.device)
    weights = (torch.rand(rows, generator=random) + 0.5).to(losses)  # so that nothing cancels
    for some in (half, ~half) if views else ():
        found = torch.autograd.grad(losses, list(views.values()), weights * some, retain_graph=True, allow_unused=True)
        for name, gradient in zip(views, found, strict=True):
            has_rows = gradient is not None and gradient.shape[:1] == (rows,)  # else it is refused when it goes back
            if has_rows and gradient[~some].any():
                raise ConfigError(
                    f"the losses of some rows reach others of {name!r}, which came from the other party: a row's "
                    "gradient would tell of others, and goes back with the noise of one; compute each row's loss from "
                    "that row alone, or write BACKEND_MODE='unnoise', which promises nothing against the other party"
                )
            if not has_rows or gradient.any():
                told.add(name)
    return len(told) == len(views)


def _hider(model: Model, task: PrivateTask) -> Hide:
    """Clip and noise rows as the task's first optimizer does micro-batches, by the gradients of their own losses."""
    part, step, scale = task.parts[0], model.global_step, model.gradient.loss_scale
    private, noise, worker = part.living.private, part.living.noise, model.strategy.worker_id

    @torch.no_grad()
    def hide(gradient: Tensor, rows: int, slot: int) -> Tensor:
        if gradient.shape[:1] != (rows,):
            raise FunctionError(
                f"a gradient of shape {list(gradient.shape)} goes back in a step of {rows} rows, and optimizers are "
                "private: send tensors whose first dimension is the batch's, or write BACKEND_MODE='unnoise'"
            )
        unit = (private.num_microbatches or rows) / scale  # gradients that travel are of the mean over micro-batches
        flat = gradient.reshape(rows, -1).nan_to_num(0.0, 0.0, 0.0)  # no weight would take away what is not finite
        weights = (part.limit / (flat.norm(dim=1, keepdim=True) * unit)).clamp_max_(1.0)
        drawn = flat.new_zeros(-(-rows // _CHUNK) * _CHUNK, flat.shape[1])
        deviation = part.living.multiplier * part.limit / unit
        noise.add([drawn], deviation, step.value, -1 - worker * _MAX_SLOTS - slot)  # from 0 up, they are optimizers'
        return drawn[:rows].addcmul_(flat, weights).view_as(gradient)

    return hide
