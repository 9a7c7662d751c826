from __future__ import annotations

import pytest
import torch

from plait import nets
from plait.nets.blocks import Net

POINTS = {
    "Conv2d_1a_3x3": (32, 149),
    "Conv2d_2a_3x3": (32, 147),
    "Conv2d_2b_3x3": (64, 147),
    "Mixed_3a": (160, 73),
    "Mixed_4a": (192, 71),
    **{f"Mixed_5{letter}": (384, 35) for letter in "abcde"},
    **{f"Mixed_6{letter}": (1024, 17) for letter in "abcdefgh"},
    **{f"Mixed_7{letter}": (1536, 8) for letter in "abcd"},
    "global_pool": (1536, 1),
}


@pytest.fixture(scope="module")
def small() -> Net:
    """For pictures of 107x107; training changes its statistics only."""
    torch.manual_seed(1)
    return nets.build("inception_v4", 5, height=107, width=107)


def test_counts():
    assert nets.card("inception_v4").parameters == 42649769
    assert nets.card("inception_v4", 1000) == (42648232, 12260477024)


def test_the_auxiliary_heads_count():
    with torch.device("meta"):
        net = nets.build("inception_v4", 1000)
    assert sum(value.numel() for value in net.AuxLogits.parameters()) == 3358568


def test_end_points():
    with torch.device("meta"):
        logits, points = nets.build("inception_v4").eval()(torch.zeros(2, 3, 299, 299))
    assert set(points) == {*POINTS, "PreLogitsFlatten", "AuxLogits", "Logits", "Predictions"}
    assert {name: tuple(points[name].shape) for name in POINTS} == {
        name: (2, channels, size, size) for name, (channels, size) in POINTS.items()
    }
    assert points["PreLogitsFlatten"].shape == (2, 1536)
    assert logits.shape == points["AuxLogits"].shape == points["Predictions"].shape == (2, 1001)


def test_names_are_tf_slims():
    with torch.device("meta"):
        net = nets.build("inception_v4")
    assert net.scope == "InceptionV4"
    names = {name.replace(".", "/"): tuple(value.shape) for name, value in net.state_dict().items()}
    assert len(names) == 608
    assert names["Mixed_3a/Branch_1/Conv2d_0a_3x3/weights"] == (96, 64, 3, 3)
    assert names["Mixed_4a/Branch_1/Conv2d_0c_7x1/BatchNorm/moving_variance"] == (64,)
    assert names["Mixed_5a/Branch_0/Conv2d_1a_3x3/weights"] == (192, 192, 3, 3)
    assert names["Mixed_5e/Branch_2/Conv2d_0c_3x3/BatchNorm/beta"] == (96,)
    assert names["Mixed_6h/Branch_2/Conv2d_0e_1x7/weights"] == (256, 224, 1, 7)
    assert names["Mixed_7d/Branch_2/Conv2d_0b_3x1/weights"] == (448, 384, 3, 1)
    assert names["Mixed_7d/Branch_2/Conv2d_0e_3x1/weights"] == (256, 512, 3, 1)
    assert names["AuxLogits/Conv2d_2a/weights"] == (768, 128, 5, 5)
    assert names["AuxLogits/Aux_logits/weights"] == (1001, 768)
    assert names["Logits/Logits/weights"] == (1001, 1536)
    assert names["Logits/Logits/biases"] == (1001,)


@pytest.mark.parametrize(("size", "sides"), [(224, [111, 54, 25, 12, 5]), (131, [65, 31, 14, 6, 2])])
def test_maps_of_odd_and_even_sizes(size: int, sides: list[int]):
    with torch.device("meta"):
        net = nets.build("inception_v4", 5, height=size, width=size).eval()
        logits, points = net(torch.zeros(1, 3, size, size))
    names = ["Conv2d_1a_3x3", "Mixed_3a", "Mixed_5a", "Mixed_6a", "Mixed_7a"]
    assert [points[name].shape[2] for name in names] == sides
    assert logits.shape == (1, 5)


def test_training_and_evaluation(small: Net):
    images = torch.randn(2, 3, 107, 107)
    with torch.no_grad():
        evaluated, points = small.eval()(images)
        assert points["AuxLogits"].shape == (2, 5)
        assert torch.equal(evaluated, small(images)[0])
        torch.manual_seed(1)
        (first, points), (second, again) = small.train()(images), small(images)
    assert not torch.equal(first, second)  # by dropout
    assert torch.equal(points["global_pool"], again["global_pool"])
    assert not torch.allclose(points["global_pool"], small.eval()(images)[1]["global_pool"])
    assert all(value.any() for name, value in small.state_dict().items() if name.endswith("moving_mean"))


def test_both_losses_reach_every_parameter(small: Net):
    logits, points = small.train()(torch.randn(2, 3, 107, 107))
    (logits.logsumexp(1) + 0.4 * points["AuxLogits"].logsumexp(1)).sum().backward()
    missed = [name for name, value in small.named_parameters() if value.grad is None or not value.grad.any()]
    small.zero_grad()
    assert missed == []


def test_weights_begin_as_in_tf_slim(small: Net):
    assert small.Mixed_6b.Branch_1.Conv2d_0b_1x7.weights.std().item() == pytest.approx((2 / 1344) ** 0.5, rel=0.02)
    limit = (6 / (1536 + 5)) ** 0.5  # the fully connected layers are Glorot's
    assert limit * 0.99 < small.Logits.Logits.weights.abs().max().item() <= limit
    assert (6 / (768 + 5)) ** 0.5 * 0.98 < small.AuxLogits.Aux_logits.weights.abs().max().item() <= (6 / 773) ** 0.5
