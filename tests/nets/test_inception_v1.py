from __future__ import annotations

import pytest
import torch

from plait import nets
from plait.errors import ConfigError

POINTS = {
    "Conv2d_1a_7x7": (64, 112),
    "MaxPool_2a_3x3": (64, 56),
    "Conv2d_2b_1x1": (64, 56),
    "Conv2d_2c_3x3": (192, 56),
    "MaxPool_3a_3x3": (192, 28),
    "Mixed_3b": (256, 28),
    "Mixed_3c": (480, 28),
    "MaxPool_4a_3x3": (480, 14),
    "Mixed_4b": (512, 14),
    "Mixed_4c": (512, 14),
    "Mixed_4d": (512, 14),
    "Mixed_4e": (528, 14),
    "Mixed_4f": (832, 14),
    "MaxPool_5a_2x2": (832, 7),
    "Mixed_5b": (832, 7),
    "Mixed_5c": (1024, 7),
    "AvgPool_0a_7x7": (1024, 1),
}


def test_counts():
    assert nets.card("inception_v1") == (6618649, pytest.approx(1498376192, rel=1e-3))
    assert nets.card("inception_v1", 1000) == (6617624, 1498376192)


def test_end_points():
    with torch.device("meta"):
        logits, points = nets.build("inception_v1").eval()(torch.zeros(2, 3, 224, 224))
    assert list(points) == [*POINTS, "Logits", "Predictions"]
    assert {name: tuple(points[name].shape) for name in POINTS} == {
        name: (2, channels, size, size) for name, (channels, size) in POINTS.items()
    }
    assert logits.shape == points["Predictions"].shape == (2, 1001)


def test_names_are_tf_slims():
    with torch.device("meta"):
        net = nets.build("inception_v1")
    assert net.scope == "InceptionV1"
    names = {name.replace(".", "/"): tuple(value.shape) for name, value in net.state_dict().items()}
    assert len(names) == 230
    assert names["Conv2d_1a_7x7/weights"] == (64, 3, 7, 7)
    assert names["Conv2d_2c_3x3/BatchNorm/moving_variance"] == (192,)
    assert names["Mixed_3b/Branch_2/Conv2d_0b_3x3/BatchNorm/beta"] == (32,)
    assert names["Mixed_4f/Branch_3/Conv2d_0b_1x1/weights"] == (128, 528, 1, 1)
    assert names["Mixed_5b/Branch_2/Conv2d_0a_3x3/weights"] == (128, 32, 3, 3)  # its one odd name
    assert names["Mixed_5c/Branch_2/Conv2d_0b_3x3/weights"] == (128, 48, 3, 3)
    assert names["Logits/Conv2d_0c_1x1/weights"] == (1001, 1024, 1, 1)
    assert names["Logits/Conv2d_0c_1x1/biases"] == (1001,)
    assert not any("gamma" in name or "aux" in name.lower() for name in names)


@pytest.mark.parametrize(
    ("size", "sides"), [(224, [112, 56, 28, 14, 7]), (299, [150, 75, 38, 19, 10]), (33, [17, 9, 5, 3, 2])]
)
def test_maps_of_odd_and_even_sizes(size: int, sides: list[int]):
    with torch.device("meta"):
        logits, points = nets.build("inception_v1", 5).eval()(torch.zeros(1, 3, size, size))
    names = ["Conv2d_1a_7x7", "MaxPool_2a_3x3", "MaxPool_3a_3x3", "MaxPool_4a_3x3", "MaxPool_5a_2x2"]
    assert [points[name].shape[2] for name in names] == sides
    assert logits.shape == (1, 5)


def test_a_loss_reaches_every_parameter_and_training_moves_the_statistics():
    torch.manual_seed(1)
    net = nets.build("inception_v1", 5, dropout_keep_prob=1.0)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        evaluated = net.eval()(images)[0]
        assert torch.equal(evaluated, net(images)[0])
    logits, _ = net.train()(images)
    logits.logsumexp(1).sum().backward()
    assert [name for name, value in net.named_parameters() if value.grad is None or not value.grad.any()] == []
    assert all(value.any() for name, value in net.state_dict().items() if name.endswith("moving_mean"))
    assert not torch.allclose(logits, evaluated)


def test_weights_begin_as_in_tf_slim():
    torch.manual_seed(2)
    net = nets.build("inception_v1", 10)
    assert net.Mixed_4b.Branch_1.Conv2d_0b_3x3.weights.std().item() == pytest.approx(0.0088, rel=0.02)
    assert net.Mixed_4b.Branch_1.Conv2d_0b_3x3.weights.abs().max() <= 0.02
    assert net.Logits.Conv2d_0c_1x1.weights.std().item() == pytest.approx((2 / 1024) ** 0.5, rel=0.05)
    assert not net.Logits.Conv2d_0c_1x1.biases.any()


def test_dropout_acts_in_training_only():
    torch.manual_seed(3)
    net = nets.build("inception_v1", 5, dropout_keep_prob=0.5)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert not torch.equal(net.train()(images)[0], net(images)[0])
        assert torch.equal(net.eval()(images)[0], net(images)[0])


def test_an_unknown_option():
    with pytest.raises(ConfigError, match="no option .depth_multiplier."):
        nets.build("inception_v1", depth_multiplier=0.5)
