from __future__ import annotations

import pytest
import torch

from plait import nets

POINTS = {
    "Conv2d_1a_7x7": (64, 112),
    "MaxPool_2a_3x3": (64, 56),
    "Conv2d_2b_1x1": (64, 56),
    "Conv2d_2c_3x3": (192, 56),
    "MaxPool_3a_3x3": (192, 28),
    "Mixed_3b": (256, 28),
    "Mixed_3c": (320, 28),
    "Mixed_4a": (576, 14),
    "Mixed_4b": (576, 14),
    "Mixed_4c": (576, 14),
    "Mixed_4d": (576, 14),
    "Mixed_4e": (576, 14),
    "Mixed_5a": (1024, 7),
    "Mixed_5b": (1024, 7),
    "Mixed_5c": (1024, 7),
    "AvgPool_1a": (1024, 1),
    "PreLogits": (1024, 1),
}


def test_counts():
    assert nets.card("inception_v2").parameters == 11179361
    assert nets.card("inception_v2", 1000) == (11178336, 1934857216)


def test_end_points():
    with torch.device("meta"):
        logits, points = nets.build("inception_v2").eval()(torch.zeros(2, 3, 224, 224))
    assert list(points) == [*POINTS, "Logits", "Predictions"]
    assert {name: tuple(points[name].shape) for name in POINTS} == {
        name: (2, channels, size, size) for name, (channels, size) in POINTS.items()
    }
    assert logits.shape == points["Predictions"].shape == (2, 1001)


def test_names_are_tf_slims():
    with torch.device("meta"):
        net = nets.build("inception_v2")
    assert net.scope == "InceptionV2"
    names = {name.replace(".", "/"): tuple(value.shape) for name, value in net.state_dict().items()}
    assert len(names) == 277
    assert {name: shape for name, shape in names.items() if name.startswith("Conv2d_1a_7x7/")} == {
        "Conv2d_1a_7x7/depthwise_weights": (24, 1, 7, 7),
        "Conv2d_1a_7x7/pointwise_weights": (64, 24, 1, 1),
        "Conv2d_1a_7x7/biases": (64,),  # TF-Slim normalises convolutions that are not separable
    }
    assert names["Conv2d_2b_1x1/BatchNorm/moving_mean"] == (64,)
    assert names["Mixed_4a/Branch_0/Conv2d_1a_3x3/weights"] == (160, 128, 3, 3)
    assert names["Mixed_5b/Branch_2/Conv2d_0c_3x3/BatchNorm/beta"] == (224,)
    assert names["Logits/Conv2d_1c_1x1/weights"] == (1001, 1024, 1, 1)
    assert not any("gamma" in name or "aux" in name.lower() for name in names)


@pytest.mark.parametrize(
    ("size", "sides"), [(224, [112, 56, 28, 14, 7]), (299, [150, 75, 38, 19, 10]), (33, [17, 9, 5, 3, 2])]
)
def test_maps_of_odd_and_even_sizes(size: int, sides: list[int]):
    with torch.device("meta"):
        logits, points = nets.build("inception_v2", 5).eval()(torch.zeros(1, 3, size, size))
    names = ["Conv2d_1a_7x7", "MaxPool_2a_3x3", "MaxPool_3a_3x3", "Mixed_4a", "Mixed_5a"]
    assert [points[name].shape[2] for name in names] == sides
    assert logits.shape == (1, 5)


def test_a_loss_reaches_every_parameter_and_training_moves_the_statistics():
    torch.manual_seed(1)
    net = nets.build("inception_v2", 5, dropout_keep_prob=1.0, depth_multiplier=0.25)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        evaluated = net.eval()(images)[0]
        assert torch.equal(evaluated, net(images)[0])
    logits, _ = net.train()(images)
    logits.logsumexp(1).sum().backward()
    assert [name for name, value in net.named_parameters() if value.grad is None or not value.grad.any()] == []
    assert all(value.any() for name, value in net.state_dict().items() if name.endswith("moving_mean"))
    assert not torch.allclose(logits, evaluated)


def test_dropout_acts_in_training_only():
    torch.manual_seed(3)
    net = nets.build("inception_v2", 5, dropout_keep_prob=0.5, depth_multiplier=0.1)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert not torch.equal(net.train()(images)[0], net(images)[0])
        assert torch.equal(net.eval()(images)[0], net(images)[0])


@pytest.mark.parametrize(
    ("options", "first", "between"),
    [
        ({}, 64, 24),
        ({"depth_multiplier": 0.5}, 32, 24),
        ({"depth_multiplier": 0.1}, 16, 15),
        ({"depth_multiplier": 2}, 128, 24),
    ],
)
def test_the_depth_multiplier(options: dict, first: int, between: int):
    with torch.device("meta"):
        net = nets.build("inception_v2", 5, **options)
    assert net.Conv2d_1a_7x7.pointwise_weights.shape == (first, between, 1, 1)
    wide = max(16, int(1024 * options.get("depth_multiplier", 1)))
    assert net.Logits.Conv2d_1c_1x1.weights.shape[1] == pytest.approx(wide, abs=3)  # each branch is rounded by itself


def test_a_smaller_least_depth():
    with torch.device("meta"):
        net = nets.build("inception_v2", 5, depth_multiplier=0.1, min_depth=4)
    assert net.Conv2d_2c_3x3.weights.shape == (19, 6, 3, 3)
    assert net.Mixed_3b.Branch_3.Conv2d_0b_1x1.weights.shape[0] == 4


def test_weights_begin_as_in_tf_slim():
    torch.manual_seed(2)
    net = nets.build("inception_v2", 10)
    cut = 0.8796
    assert net.Conv2d_1a_7x7.depthwise_weights.std().item() == pytest.approx(cut, rel=0.1)
    assert net.Conv2d_1a_7x7.pointwise_weights.std().item() == pytest.approx(cut, rel=0.1)
    assert net.Mixed_4d.Branch_2.Conv2d_0a_1x1.weights.std().item() == pytest.approx(0.09 * cut, rel=0.03)
    assert net.Mixed_4d.Branch_3.Conv2d_0b_1x1.weights.std().item() == pytest.approx(0.1 * cut, rel=0.03)
    assert net.Mixed_4d.Branch_0.Conv2d_0a_1x1.weights.std().item() == pytest.approx((2 / 576) ** 0.5, rel=0.03)


def test_the_separable_layer_is_not_decayed():
    with torch.device("meta"):
        net = nets.build("inception_v2")
    decayed = {id(value) for value in net.decayed_variables()}
    assert len(decayed) == 69
    assert id(net.Conv2d_1a_7x7.pointwise_weights) not in decayed
    assert id(net.Logits.Conv2d_1c_1x1.weights) in decayed
