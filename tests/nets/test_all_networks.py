"""Every network: what it costs, at its own size and with real numbers forward and backward (slow)."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from plait import nets

with Path(__file__).with_name("networks.csv").open(encoding="utf-8") as file:
    ROWS = {row.pop("name"): {key: int(value) for key, value in row.items()} for row in csv.DictReader(file)}
"""Published counts, or those of the variant that docs/pictures.md says we chose; without auxiliary heads."""

ALIKE = {"lenet", "cifarnet", "alexnet_v2", "overfeat", "vgg_a", "vgg_16", "vgg_19"}
"""Networks that differ in training by dropout alone."""


def pictures(name, count):
    facts = nets.info(name)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, facts.channels, facts.image_size, facts.image_size, generator=generator)


@pytest.fixture(scope="module", params=ROWS)
def built(request):
    torch.manual_seed(0)
    return request.param, nets.build(request.param)


def test_there_are_44():
    assert list(nets.NETS) == list(ROWS)
    assert len(ROWS) == 44


@pytest.mark.parametrize("name", ROWS)
def test_what_it_costs(name):
    row = ROWS[name]
    card = nets.card(name, 1000)
    assert card.parameters == row["parameters_at_1000"]
    assert card.multiply_adds == pytest.approx(row["multiply_adds_at_1000"], rel=0.001)
    with torch.device("meta"):
        own = nets.build(name)
    trained = [value.numel() for path, value in own.named_parameters() if "aux" not in path.lower()]
    assert sum(trained) == row["parameters"]
    assert nets.info(name).classes == row["classes"]
    assert own.scope == nets.scope_of(name)


@pytest.mark.slow
def test_both_memory_formats_give_the_same_numbers(built):
    name, net = built
    net.eval()
    images = pictures(name, 1)
    with torch.no_grad():
        logits, points = net(images)
        other, _ = net(images.contiguous(memory_format=torch.channels_last))
    assert logits.shape == (1, nets.info(name).classes)
    assert torch.allclose(logits, other, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
    assert all(torch.isfinite(value).all() for value in points.values())


@pytest.mark.slow
def test_training_differs_and_a_backward_pass_reaches_everything(built):
    name, net = built
    images = pictures(name, 2)
    net.eval()
    with torch.no_grad():
        evaluated, _ = net(images)
    net.train()
    logits, points = net(images)
    assert not torch.allclose(logits, evaluated)
    loss = logits.square().mean() + sum(
        value.square().mean() for key, value in points.items() if "aux" in key.lower() and value.requires_grad
    )
    loss.backward()
    missing = [path for path, value in net.named_parameters() if value.grad is None]
    assert missing == []
    net.zero_grad(set_to_none=True)
    net.eval()
    with torch.no_grad():
        again, _ = net(images)
    assert torch.equal(again, evaluated) == (name in ALIKE)  # otherwise the moving means have moved
