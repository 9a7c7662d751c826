"""A SavedModel gives what the module gives: all networks, and plain TensorFlow without plait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from plait import nets  # noqa: E402 - after it is known to be there
from plait.errors import ConfigError  # noqa: E402 - same
from plait.export import export, load  # noqa: E402 - same
from plait.export.check import TOLERANCE, difference  # noqa: E402 - same
from plait.nets.blocks import BatchNorm  # noqa: E402 - same

BATCHES = {"lenet": 32, "resnet_v1_18": 32, "mobilenet_v2": 32}
"""The networks that are tried with more than three pictures at a time."""


class Logits(nn.Module):
    """A network with its logits only."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, images):
        return {"logits": self.net(images)[0]}


def trained(module, example):
    """As if it had been trained: norms that fit the signal, but not quite, with scales and offsets of all kinds."""
    norms = [one for one in module.modules() if isinstance(one, (BatchNorm, nn.BatchNorm2d))]
    for one in norms:
        one.usual, one.momentum = one.momentum, 1.0
        for name, value in one.named_parameters():
            (value.data.uniform_(0.7, 1.3) if name in {"gamma", "weight"} else value.data.normal_(0, 0.1))
    with torch.no_grad():
        module.train()(example)
    for one in norms:
        one.momentum = one.usual
        mean, variance = (value for value in one.buffers() if value.is_floating_point())
        mean += 0.1 * variance.sqrt() * torch.randn_like(mean)
        variance *= torch.empty_like(variance).uniform_(0.8, 1.25)
    return module.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", nets.NETS)
def test_all_networks(tmp_path, name):
    torch.manual_seed(0)
    facts = nets.info(name)
    shape = (facts.channels, facts.image_size, facts.image_size)
    module = trained(Logits(nets.build(name, 10)), torch.randn(4, *shape))
    where = export(module, {"images": torch.randn(2, *shape)}, tmp_path, formats=["tf"])
    loaded = load(where, format="tf")
    assert loaded.about["outputs"] == [{"name": "logits", "dtype": "float32", "shape": [None, 10]}]
    for rows in sorted({1, 3, BATCHES.get(name, 3)}):
        images = torch.randn(rows, *shape)
        with torch.no_grad():
            expected = module(images)["logits"].numpy()
        found = loaded.run({"images": images.numpy()})["logits"]
        assert difference(expected, found) < TOLERANCE
        assert (found.argmax(1) == expected.argmax(1)).all()
        assert np.ptp(expected, axis=1).min() > 1e-3, "the logits are all alike: the test tests nothing"
