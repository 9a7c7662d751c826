from __future__ import annotations

import pytest
import torch

from plait import nets

POINTS = {
    "Conv2d_1a_3x3": (32, 149),
    "Conv2d_2a_3x3": (32, 147),
    "Conv2d_2b_3x3": (64, 147),
    "MaxPool_3a_3x3": (64, 73),
    "Conv2d_3b_1x1": (80, 73),
    "Conv2d_4a_3x3": (192, 71),
    "MaxPool_5a_3x3": (192, 35),
    "Mixed_5b": (256, 35),
    "Mixed_5c": (288, 35),
    "Mixed_5d": (288, 35),
    "Mixed_6a": (768, 17),
    "Mixed_6b": (768, 17),
    "Mixed_6c": (768, 17),
    "Mixed_6d": (768, 17),
    "Mixed_6e": (768, 17),
    "Mixed_7a": (1280, 8),
    "Mixed_7b": (2048, 8),
    "Mixed_7c": (2048, 8),
    "AvgPool_1a": (2048, 1),
    "PreLogits": (2048, 1),
}


def test_counts():
    assert nets.card("inception_v3").parameters == 23819401
    assert nets.card("inception_v3", 1000) == (23817352, 5718899296)


def test_the_auxiliary_heads_count():
    with torch.device("meta"):
        net = nets.build("inception_v3", 1000)
        without = nets.build("inception_v3", 1000, create_aux_logits=False)
    assert sum(value.numel() for value in net.AuxLogits.parameters()) == 3325800
    assert sum(value.numel() for value in without.parameters()) == 23817352


def test_end_points():
    with torch.device("meta"):
        logits, points = nets.build("inception_v3").eval()(torch.zeros(2, 3, 299, 299))
    assert set(points) == {*POINTS, "AuxLogits", "Logits", "Predictions"}
    assert {name: tuple(points[name].shape) for name in POINTS} == {
        name: (2, channels, size, size) for name, (channels, size) in POINTS.items()
    }
    assert logits.shape == points["AuxLogits"].shape == points["Predictions"].shape == (2, 1001)


def test_names_are_tf_slims():
    with torch.device("meta"):
        net = nets.build("inception_v3")
    assert net.scope == "InceptionV3"
    names = {name.replace(".", "/"): tuple(value.shape) for name, value in net.state_dict().items()}
    assert len(names) == 388
    assert names["Conv2d_1a_3x3/weights"] == (32, 3, 3, 3)
    assert names["Mixed_5b/Branch_1/Conv2d_0b_5x5/BatchNorm/beta"] == (64,)
    assert names["Mixed_5c/Branch_1/Conv_1_0c_5x5/weights"] == (64, 48, 5, 5)
    assert names["Mixed_6a/Branch_0/Conv2d_1a_1x1/weights"] == (384, 288, 3, 3)  # 3x3, whatever it is called
    assert names["Mixed_6c/Branch_2/Conv2d_0d_7x1/weights"] == (160, 160, 7, 1)
    assert names["Mixed_7b/Branch_1/Conv2d_0b_3x1/weights"] == (384, 384, 3, 1)
    assert names["Mixed_7c/Branch_1/Conv2d_0c_3x1/weights"] == (384, 384, 3, 1)
    assert names["AuxLogits/Conv2d_1b_1x1/BatchNorm/moving_mean"] == (128,)
    assert names["AuxLogits/Conv2d_2a_5x5/weights"] == (768, 128, 5, 5)
    assert names["AuxLogits/Conv2d_2b_1x1/biases"] == (1001,)
    assert names["Logits/Conv2d_1c_1x1/weights"] == (1001, 2048, 1, 1)


@pytest.mark.parametrize(
    ("height", "width", "name"),
    [
        (299, 299, "Conv2d_2a_5x5"),
        (150, 150, "Conv2d_2a_1x1"),
        (224, 180, "Conv2d_2a_3x2"),
        (448, 448, "Conv2d_2a_8x8"),
    ],
)
def test_the_auxiliary_head_is_made_for_the_pictures(height: int, width: int, name: str):
    with torch.device("meta"):
        net = nets.build("inception_v3", 5, height=height, width=width).eval()
        _, points = net(torch.zeros(1, 3, height, width))
    assert hasattr(net.AuxLogits, name)
    assert points["AuxLogits"].shape == (1, 5)


@pytest.mark.parametrize(("size", "sides"), [(224, [111, 54, 25, 12, 5]), (131, [65, 31, 14, 6, 2])])
def test_maps_of_odd_and_even_sizes(size: int, sides: list[int]):
    with torch.device("meta"):
        net = nets.build("inception_v3", 5, height=size, width=size).eval()
        logits, points = net(torch.zeros(1, 3, size, size))
    names = ["Conv2d_1a_3x3", "MaxPool_3a_3x3", "MaxPool_5a_3x3", "Mixed_6a", "Mixed_7a"]
    assert [points[name].shape[2] for name in names] == sides
    assert logits.shape == (1, 5)


def test_both_losses_reach_every_parameter_and_training_moves_the_statistics():
    torch.manual_seed(1)
    net = nets.build("inception_v3", 5, height=107, width=107, dropout_keep_prob=1.0, depth_multiplier=0.25)
    images = torch.randn(2, 3, 107, 107)
    with torch.no_grad():
        evaluated, points = net.eval()(images)
        assert points["AuxLogits"].shape == (2, 5)
        assert torch.equal(evaluated, net(images)[0])
    logits, points = net.train()(images)
    (logits.logsumexp(1) + 0.4 * points["AuxLogits"].logsumexp(1)).sum().backward()
    assert [name for name, value in net.named_parameters() if value.grad is None or not value.grad.any()] == []
    assert all(value.any() for name, value in net.state_dict().items() if name.endswith("moving_mean"))
    assert not torch.allclose(logits, evaluated)


def test_the_logits_do_not_depend_on_the_auxiliary_head():
    torch.manual_seed(1)
    net = nets.build("inception_v3", 5, height=107, width=107, depth_multiplier=0.1).eval()
    without = nets.build("inception_v3", 5, height=107, width=107, depth_multiplier=0.1, create_aux_logits=False).eval()
    without.load_state_dict({name: value for name, value in net.state_dict().items() if "Aux" not in name})
    images = torch.randn(2, 3, 107, 107)
    with torch.no_grad():
        assert torch.equal(net(images)[0], without(images)[0])


def test_dropout_acts_in_training_only():
    torch.manual_seed(3)
    net = nets.build("inception_v3", 5, height=107, width=107, dropout_keep_prob=0.5, depth_multiplier=0.1)
    images = torch.randn(2, 3, 107, 107)
    with torch.no_grad():
        (first, points), (second, again) = net.train()(images), net(images)
        assert not torch.equal(first, second)
        assert torch.equal(points["AvgPool_1a"], again["AvgPool_1a"])
        assert torch.equal(net.eval()(images)[0], net(images)[0])


def test_weights_begin_as_in_tf_slim():
    torch.manual_seed(2)
    net = nets.build("inception_v3", 10)
    cut = 0.8796
    assert net.Mixed_6b.Branch_1.Conv2d_0b_1x7.weights.std().item() == pytest.approx((2 / 896) ** 0.5, rel=0.02)
    assert net.AuxLogits.Conv2d_2a_5x5.weights.std().item() == pytest.approx(0.01 * cut, rel=0.02)
    assert net.AuxLogits.Conv2d_2b_1x1.weights.std().item() == pytest.approx(0.001 * cut, rel=0.05)
    assert net.Logits.Conv2d_1c_1x1.weights.std().item() == pytest.approx((2 / 2048) ** 0.5, rel=0.05)


def test_the_depth_multiplier_reaches_both_heads():
    with torch.device("meta"):
        net = nets.build("inception_v3", 5, depth_multiplier=0.5)
    assert net.AuxLogits.Conv2d_2a_5x5.weights.shape == (384, 64, 5, 5)
    assert net.Logits.Conv2d_1c_1x1.weights.shape == (5, 1024, 1, 1)
