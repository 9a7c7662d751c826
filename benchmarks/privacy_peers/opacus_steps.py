"""Opacus' ways to make a private step, beside those of `plait_steps.py` in the same process.

`python opacus_steps.py` in an environment with opacus 1.6 and what it and plait need; see `nets.py` for what it
answers.
"""

from __future__ import annotations

import functools
import warnings

import nets
import plait_steps
import torch
from opacus.grad_sample import (
    GradSampleModule,
    GradSampleModuleExpandedWeights,
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn import functional as F

SETTINGS = {"max_grad_norm": nets.CLIP, "expected_batch_size": nets.BATCH}


def per_sample(wrap, net: nn.Module, batches, noise: float):
    wrapped = wrap(net)
    inner = torch.optim.SGD(wrapped.parameters(), lr=nets.RATE)
    optimizer = DPOptimizer(inner, noise_multiplier=noise, **SETTINGS)
    turn = nets.turns(batches)

    def step() -> None:
        x, y = turn()
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return net, step


def ghost(net: nn.Module, batches, noise: float):
    wrapped = GradSampleModuleFastGradientClipping(net, max_grad_norm=nets.CLIP, use_ghost_clipping=True)
    inner = torch.optim.SGD(wrapped.parameters(), lr=nets.RATE)
    optimizer = DPOptimizerFastGradientClipping(inner, noise_multiplier=noise, **SETTINGS)
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(reduction="mean"))
    turn = nets.turns(batches)

    def step() -> None:
        x, y = turn()
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()

    return net, step


WAYS = {
    "Opacus hooks": functools.partial(per_sample, GradSampleModule),
    "Opacus functorch": functools.partial(per_sample, functools.partial(GradSampleModule, force_functorch=True)),
    "Opacus ew": functools.partial(per_sample, GradSampleModuleExpandedWeights),
    "Opacus ghost": ghost,
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    plait_steps.main(WAYS)
