"""Two losses and their scopes: a generator learns to put points onto a circle, a discriminator to tell them apart.

Both losses come from one pass over one batch; each moves only the variables of its own scope.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import plait
from plait import mox

BATCH_SIZE = 64


def input_fn(mode, **kwargs):
    """Noise, and points on a circle of radius 2."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4096, 4, generator=generator)
    angle = 2 * torch.pi * torch.rand(4096, generator=generator)
    circle = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)
    return plait.data.TensorSource((noise, circle), batch_size=BATCH_SIZE, shuffle=True)


def mlp(x, outputs):
    hidden = plait.layer("fc1", nn.Linear, x.shape[1], 64)(x).relu()
    hidden = plait.layer("fc2", nn.Linear, 64, 64)(hidden).relu()
    return plait.layer("fc3", nn.Linear, 64, outputs)(hidden)


def model_fn(inputs, mode, **kwargs):
    noise, real = inputs

    def generator(x, is_training, reuse):
        with plait.variable_scope("generator", reuse=reuse):
            return mlp(x, 2)

    def discriminator(x, is_training, reuse):
        with plait.variable_scope("discriminator", reuse=reuse):
            return mlp(x, 1)

    is_training = mode == mox.ModeKeys.TRAIN
    fake = generator(noise, is_training, reuse=False)
    d_real = discriminator(real, is_training, reuse=False)
    d_fake = discriminator(fake, is_training, reuse=True)
    D_loss = functional.softplus(-d_real).mean() + functional.softplus(d_fake).mean()  # noqa: N806 - the field's name
    G_loss = functional.softplus(-d_fake).mean()  # noqa: N806 - same
    distance = (fake.detach().norm(dim=1) - 2).abs().mean()

    return mox.ModelSpec(
        loss=[D_loss, G_loss],
        var_scopes=[["discriminator"], ["generator"]],
        log_info={"D_loss": D_loss, "G_loss": G_loss, "distance": distance},
        output_info={"distance": distance},
    )


def output_fn(outputs, **kwargs):
    distances = [float(step["distance"]) for step in outputs]
    print(f"distance from the circle over {len(distances)} steps: {sum(distances) / len(distances):.3f}")


def main():
    mox.run(
        input_fn=input_fn,
        model_fn=model_fn,
        output_fn=output_fn,
        output_every_n_steps=200,
        optimizer_fn=[
            mox.get_optimizer_fn("adam", learning_rate=0.002, beta1=0.5),
            mox.get_optimizer_fn("adam", learning_rate=0.002, beta1=0.5),
        ],
        run_mode=mox.ModeKeys.TRAIN,
        batch_size=BATCH_SIZE,
        max_number_of_steps=1000,
        log_every_n_steps=200,
    )


if __name__ == "__main__":
    main()
