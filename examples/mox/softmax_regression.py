"""Softmax regression: an input, a model, an optimizer, and the command that trains them; then an evaluation.

Started again with the same directory, it has nothing left to train and says so.

    python examples/mox/softmax_regression.py log_dir
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch.nn import functional

import plait
from plait import mox


def input_fn(run_mode, **kwargs):
    """Pictures of 784 pixels, ten kinds of them; other ones for training than for evaluation."""
    kinds = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 if run_mode == mox.ModeKeys.TRAIN else 2)
    labels = torch.randint(0, 10, (2000,), generator=generator)
    pictures = kinds[labels] + 8 * torch.randn(2000, 784, generator=generator)
    return torch.utils.data.TensorDataset(pictures, functional.one_hot(labels, 10).float())


def model_fn(inputs, run_mode, **kwargs):
    x, y_ = inputs
    w = plait.get_variable("W", initializer=torch.zeros(784, 10))
    b = plait.get_variable("b", initializer=torch.zeros(10))
    y = x @ w + b
    cross_entropy = functional.cross_entropy(y, y_)
    accuracy = (y.argmax(1) == y_.argmax(1)).float().mean()
    return mox.ModelSpec(loss=cross_entropy, log_info={"loss": cross_entropy, "accuracy": accuracy})


def main():
    log_dir = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("sgd", learning_rate=0.01),
        run_mode=mox.ModeKeys.TRAIN,
        batch_size=50,
        max_number_of_steps=200,
        log_every_n_steps=50,
        log_dir=log_dir,
    )
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        run_mode=mox.ModeKeys.EVAL,
        batch_size=50,
        log_every_n_steps=39,
        checkpoint_path=log_dir,
    )


if __name__ == "__main__":
    main()
