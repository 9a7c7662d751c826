"""The leader of `plait demo`. It has the left half of each image, and it alone has the labels.

Read it as a tour of plait: these are the functions that one company writes, in the order in which plait needs them.
The other company's are in `follower.py`. `plait federate leader.py follower.py` starts both on one machine; with a
machine for each, it is `plait party --role leader --listen HOST:PORT --certs DIR leader.py` here.
"""

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

__all__ = ["answer", "build", "look"]


def input_fn(model: efl.Model, mode: efl.MODE, aligned: Path | None = None) -> TensorSource:
    """Where the data comes from: shuffled batches to train on, the held-out images to evaluate on."""
    del model
    return digits.source(mode, "left", "digit", aligned=aligned)


def look(sample: Sample) -> torch.Tensor:
    """The party's own part of the network. A layer is made where it is first called, and found there again later."""
    with plait.variable_scope("left"):
        hidden = plait.layer("conv1", nn.Conv2d, 1, 16, 3, padding=1)(sample.left).relu()
        hidden = plait.layer("conv2", nn.Conv2d, 16, 32, 3, padding=1)(hidden).relu()
        hidden = functional.max_pool2d(hidden, 2).flatten(1)
        seen: torch.Tensor = plait.layer("dense", nn.Linear, 32 * 4 * 2, 64)(hidden).relu()
    return seen


def answer(*seen: torch.Tensor) -> torch.Tensor:
    """What was seen, all of it together, becomes ten logits."""
    together = torch.cat(seen, dim=1)
    with plait.variable_scope("top"):
        hidden = plait.layer("joint", nn.Linear, together.shape[1], 64)(together).relu()
        logits: torch.Tensor = plait.layer("digit", nn.Linear, 64, 10)(hidden)
    return logits


def loss_fn(model: efl.FederalModel, sample: Sample) -> torch.Tensor:
    """What a training step minimises. `require_grad`: the gradient of what was received goes back to its sender."""
    theirs = model.recv("right", require_grad=True, shape=(None, 64))
    return functional.cross_entropy(answer(look(sample), theirs), sample.digit)


def eval_fn(model: efl.FederalModel, sample: Sample) -> None:
    """What an evaluation measures, over all of its batches together."""
    logits = answer(look(sample), model.recv("right"))
    model.add_metric("accuracy", efl.metrics.accuracy(sample.digit, logits))
    model.add_metric("loss", functional.cross_entropy(logits, sample.digit))


def build(model: efl.FederalModel, aligned: Path | None = None) -> efl.Model:
    """Give it its functions, then compile: it connects, and compares with the other party what both have built."""
    model.input_fn(functools.partial(input_fn, aligned=aligned))
    model.loss_fn(loss_fn)
    model.eval_fn(eval_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(agreed.ADAM))
    return model.compile()


def main(output: str = "demo-output", passes: str = str(agreed.PASSES)) -> None:
    torch.set_num_threads(1)  # the layers are small; and one order of adding makes the same bits everywhere
    # Which images both have was found before, by `plait psi`. Who this is and where the other one is stands in the
    # environment. By their ids, both parties make sure in each batch that they have the same images in the same order.
    aligned = Path(output) / "aligned" / "leader"
    model = build(efl.FederalModel(sample_id="id", aligned=aligned), aligned)
    agreed.fit(model, int(passes), Path(output) / "leader")


if __name__ == "__main__":
    main(*sys.argv[1:])
