from __future__ import annotations

import pytest
import torch

from plait import nets
from plait.nets.blocks import Net

POINTS = {
    "Conv2d_1a_3x3": (32, 149),
    "Conv2d_2a_3x3": (32, 147),
    "Conv2d_2b_3x3": (64, 147),
    "MaxPool_3a_3x3": (64, 73),
    "Conv2d_3b_1x1": (80, 73),
    "Conv2d_4a_3x3": (192, 71),
    "MaxPool_5a_3x3": (192, 35),
    "Mixed_5b": (320, 35),
    "Mixed_6a": (1088, 17),
    "PreAuxLogits": (1088, 17),
    "Mixed_7a": (2080, 8),
    "Conv2d_7b_1x1": (1536, 8),
    "global_pool": (1536, 1),
}


@pytest.fixture(scope="module")
def small() -> Net:
    """For pictures of 107x107; training changes its statistics only."""
    torch.manual_seed(1)
    return nets.build("inception_resnet_v2", 5, height=107, width=107)


def test_counts():
    assert nets.card("inception_resnet_v2").parameters == 55814729
    assert nets.card("inception_resnet_v2", 1000) == (55813192, 13162501216)


def test_the_auxiliary_heads_count():
    with torch.device("meta"):
        net = nets.build("inception_resnet_v2", 1000)
    assert sum(value.numel() for value in net.AuxLogits.parameters()) == 3366760


def test_end_points():
    with torch.device("meta"):
        logits, points = nets.build("inception_resnet_v2").eval()(torch.zeros(2, 3, 299, 299))
    assert set(points) == {*POINTS, "PreLogitsFlatten", "AuxLogits", "Logits", "Predictions"}
    assert {name: tuple(points[name].shape) for name in POINTS} == {
        name: (2, channels, size, size) for name, (channels, size) in POINTS.items()
    }
    assert points["PreLogitsFlatten"].shape == (2, 1536)
    assert logits.shape == points["AuxLogits"].shape == points["Predictions"].shape == (2, 1001)


def test_names_are_tf_slims():
    with torch.device("meta"):
        net = nets.build("inception_resnet_v2")
    assert net.scope == "InceptionResnetV2"
    names = {name.replace(".", "/"): tuple(value.shape) for name, value in net.state_dict().items()}
    assert len(names) == 908
    assert names["Mixed_5b/Branch_0/Conv2d_1x1/weights"] == (96, 192, 1, 1)
    assert names["Repeat/block35_1/Branch_2/Conv2d_0c_3x3/BatchNorm/beta"] == (64,)
    assert names["Repeat/block35_10/Conv2d_1x1/weights"] == (320, 128, 1, 1)
    assert names["Repeat/block35_10/Conv2d_1x1/biases"] == (320,)
    assert names["Repeat_1/block17_20/Branch_1/Conv2d_0c_7x1/weights"] == (192, 160, 7, 1)
    assert names["Repeat_2/block8_9/Branch_1/Conv2d_0b_1x3/weights"] == (224, 192, 1, 3)
    assert names["Block8/Conv2d_1x1/biases"] == (2080,)
    assert names["Conv2d_7b_1x1/BatchNorm/moving_mean"] == (1536,)
    assert names["AuxLogits/Conv2d_2a_5x5/weights"] == (768, 128, 5, 5)
    assert names["AuxLogits/Logits/weights"] == (1001, 768)
    assert names["Logits/Logits/biases"] == (1001,)


@pytest.mark.parametrize(("size", "sides"), [(224, [111, 54, 25, 12, 5]), (131, [65, 31, 14, 6, 2])])
def test_maps_of_odd_and_even_sizes(size: int, sides: list[int]):
    with torch.device("meta"):
        net = nets.build("inception_resnet_v2", 5, height=size, width=size).eval()
        logits, points = net(torch.zeros(1, 3, size, size))
    names = ["Conv2d_1a_3x3", "MaxPool_3a_3x3", "MaxPool_5a_3x3", "Mixed_6a", "Mixed_7a"]
    assert [points[name].shape[2] for name in names] == sides
    assert logits.shape == (1, 5)
    # the name stays, whatever the kernel is
    assert net.AuxLogits.Conv2d_2a_5x5.weights.shape[2:] == ((sides[3] - 5) // 3 + 1,) * 2


@pytest.mark.parametrize(
    ("path", "channels", "scale"), [("Repeat.block35_3", 320, 0.17), ("Repeat_1.block17_9", 1088, 0.1)]
)
def test_a_block_adds_a_part_of_what_it_finds(small: Net, path: str, channels: int, scale: float):
    block = small.get_submodule(path).eval()
    x = torch.randn(1, channels, 5, 5)
    with torch.no_grad():
        found = block.Conv2d_1x1(
            torch.cat([branch(x) for name, branch in block.named_children() if "Branch" in name], 1)
        )
        torch.testing.assert_close(block(x), (x + scale * found).clamp(min=0))


def test_the_last_block_adds_all_of_it_and_may_be_negative(small: Net):
    block = small.Block8.eval()
    x = torch.randn(1, 2080, 2, 2)
    with torch.no_grad():
        found = block.Conv2d_1x1(torch.cat([block.Branch_0(x), block.Branch_1(x)], 1))
        out = block(x)
    torch.testing.assert_close(out, x + found)
    assert out.min() < 0


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
    """All of them as Glorot's."""
    limit = (6 / (9 * (192 + 80))) ** 0.5
    assert limit * 0.999 < small.Conv2d_4a_3x3.weights.abs().max().item() <= limit
    assert small.Conv2d_4a_3x3.weights.std().item() == pytest.approx(limit / 3**0.5, rel=0.01)
    assert small.Logits.Logits.weights.std().item() == pytest.approx((2 / (1536 + 5)) ** 0.5, rel=0.03)


def test_biases_are_decayed_too(small: Net):
    decayed = {id(value) for value in small.decayed_variables()}
    assert len(decayed) == 290
    assert id(small.Block8.Conv2d_1x1.biases) in decayed
    assert id(small.Conv2d_1a_3x3.BatchNorm.beta) not in decayed
