"""Stop training when an evaluation in the middle of it gets no better.

An evaluation after each epoch of training; when the accuracy has not risen three times in a row, training ends. The
first evaluation cannot tell, so there are at least four.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import mox


def input_fn(mode, **kwargs):
    """Rows to train on, where the sum of the features tells the label, and rows to evaluate on, where nothing does."""
    generator = torch.Generator().manual_seed(0)
    if mode == mox.ModeKeys.TRAIN:
        rows = torch.randn(640, 16, generator=generator)
        return torch.utils.data.TensorDataset(rows, (rows.sum(1) > 0).long())
    return torch.utils.data.TensorDataset(torch.zeros(32, 16), torch.randint(0, 2, (32,), generator=generator))


def model_fn(inputs, mode, **kwargs):
    images, labels = inputs
    hidden = plait.layer("hidden", nn.Linear, 16, 32)(images).relu()
    logits = plait.layer("logits", nn.Linear, 32, 2)(hidden)
    loss = functional.cross_entropy(logits, labels)
    accuracy = (logits.argmax(1) == labels).float().mean()

    early_stop_hook = mox.EarlyStoppingHook(
        monitor_info={"accuracy": accuracy},
        monitor="accuracy",
        batch_size=32,
        samples_in_train=640,
        samples_in_eval=32,
        evaluate_every_n_epochs=1,
        min_delta=0.01,
        patience=3,
        prefix="[EarlyStopping]",
    )

    return mox.ModelSpec(loss=loss, log_info={"loss": loss, "accuracy": accuracy}, hooks=[early_stop_hook])


def main():
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        optimizer_fn=mox.get_optimizer_fn("sgd", learning_rate=0.01),
        batch_size=32,
        run_mode=mox.ModeKeys.TRAIN,
        inter_mode=mox.ModeKeys.EVAL,
        max_number_of_steps=10000,
    )


if __name__ == "__main__":
    main()
