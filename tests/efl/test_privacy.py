"""`efl.privacy` is the privacy room's optimizers, under the document's names."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.errors import TaskError
from plait.privacy import labels, optimizers


def made(opt):
    model = efl.Model()
    model.net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    rows = {"x": torch.randint(0, 5, (8, 2))}
    model.input_fn(lambda model, mode: plait.data.TensorSource(rows, 4))
    model.loss_fn(lambda model, sample: model.net(sample.x).square().sum(1))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(opt))
    return model.compile()


def test_layers_tell_how_their_norms_are_found():
    model = made(efl.privacy.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0))
    assert efl.privacy.layers(model).split() == ["net.0", "Embedding", "-", "net.2", "Linear", "-"]
    model.fit(efl.procedure_fn.train(max_step=1))
    first, second = efl.privacy.layers(model).splitlines()
    assert first.split()[:2] == ["net.0", "Embedding"]
    assert first.split()[2] in ("ghost", "direct")
    assert second.split() == ["net.2", "Linear", "ghost"]


def test_layers_of_a_task_that_is_not_private():
    with pytest.raises(TaskError, match="task 'a' is not private, and these are: None"):
        efl.privacy.layers(made(efl.privacy.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0)), "a")


def test_the_names_are_the_rooms_own():
    for name in set(efl.privacy.__all__) - {"layers"}:
        room = optimizers if name in optimizers.__all__ else labels
        assert getattr(efl.privacy, name) is getattr(room, name)
    assert {"DPSGD", "DPMomentum", "DPAdam", "DPAdagrad", "DPRMSprop", "DPFtrl", "make_private"} <= set(
        efl.privacy.__all__
    )


def test_make_private_takes_what_is_written_down():
    found = [
        str(one.replace(annotation=one.empty))
        for one in inspect.signature(efl.privacy.make_private).parameters.values()
    ]
    assert found[:6] == [
        "factory", "l2_norm_clip", "noise_multiplier", "num_microbatches=None", "clipping='flat'", "secure_noise=False",
    ]  # fmt: skip
