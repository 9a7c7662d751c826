"""The follower of `plait demo`. It has the right half of each image, no labels, and so no loss of its own."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import efl
from plait.data import Sample, TensorSource
from plait.demo import agreed, digits

__all__ = ["build", "look"]


def input_fn(model: efl.Model, mode: efl.MODE, aligned: Path | None = None) -> TensorSource:
    """The same images as the leader's, in the same order; other pixels of them."""
    del model
    return digits.source(mode, "right", aligned=aligned)


def look(sample: Sample) -> torch.Tensor:
    """The party's own part of the network; the leader need not know what it is, only how wide its result is."""
    with plait.variable_scope("right"):
        hidden = plait.layer("conv1", nn.Conv2d, 1, 16, 3, padding=1)(sample.right).relu()
        hidden = plait.layer("conv2", nn.Conv2d, 16, 32, 3, padding=1)(hidden).relu()
        hidden = functional.max_pool2d(hidden, 2).flatten(1)
        seen: torch.Tensor = plait.layer("dense", nn.Linear, 32 * 4 * 2, 64)(hidden).relu()
    return seen


def loss_fn(model: efl.FederalModel, sample: Sample) -> None:
    """Send 64 numbers an image. Their gradients come back, and they are all that moves this party's variables."""
    model.send("right", look(sample), require_grad=True)


def eval_fn(model: efl.FederalModel, sample: Sample) -> None:
    """The leader measures."""
    model.send("right", look(sample))


def build(model: efl.FederalModel, aligned: Path | None = None) -> efl.Model:
    model.input_fn(functools.partial(input_fn, aligned=aligned))
    model.loss_fn(loss_fn)
    model.eval_fn(eval_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(agreed.ADAM))
    return model.compile()


def main(output: str = "demo-output", passes: str = str(agreed.PASSES)) -> None:
    torch.set_num_threads(1)
    aligned = Path(output) / "aligned" / "follower"
    model = build(efl.FederalModel(sample_id="id", aligned=aligned), aligned)
    agreed.fit(model, int(passes), Path(output) / "follower")


if __name__ == "__main__":
    main(*sys.argv[1:])
