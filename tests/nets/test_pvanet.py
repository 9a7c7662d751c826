import pytest
import torch
from torch.nn import functional

from plait import nets
from plait.errors import ConfigError
from plait.nets.blocks import BatchNorm, Norm, Recipe, he_normal
from plait.nets.pvanet import NARROW, BothSigns, InceptionUnit, ThinUnit

RECIPE, NORM = Recipe(init=he_normal), Norm(decay=0.9)
UNITS = [f"conv{block}_{unit}" for block, units in ((2, 3), (3, 4), (4, 4), (5, 4)) for unit in range(1, units + 1)]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(5)


def small(size=64, **options):
    return nets.build("pvanet", 10, height=size, width=size, **options)


def test_counts():
    assert nets.card("pvanet") == (80_357_272, 443_260_928)
    assert nets.card("pvanet", 10).parameters == 80_357_272 - 990 * 4097


def test_count_of_the_trunk():
    with torch.device("meta"):
        net = nets.build("pvanet")
    assert sum(v.numel() for key, v in net.named_parameters() if not key.startswith("fc")) == 2_835_376


def test_the_head_grows_with_the_pictures():
    with torch.device("meta"):
        net = nets.build("pvanet", height=224, width=224)
    assert sum(value.numel() for value in net.parameters()) == 100_804_504
    assert nets.build("pvanet", 3, height=33, width=64).fc6.kernel == (2, 2)


def test_end_points():
    net = small().eval()
    logits, points = net(torch.randn(2, 3, 64, 64))
    assert logits.shape == (2, 10)
    assert points["pvanet/fc8"] is logits
    assert list(points) == [f"pvanet/{key}" for key in ["conv1_1", "pool1", *UNITS, "fc6", "fc7", "fc8"]]
    shapes = {"conv1_1": (32, 32), "pool1": (32, 16), "conv2_3": (64, 16), "conv3_4": (128, 8)}
    shapes |= {"conv4_1": (256, 4), "conv4_4": (256, 4), "conv5_4": (384, 2), "fc7": (4096, 1)}
    for key, (width, side) in shapes.items():
        assert points[f"pvanet/{key}"].shape == (2, width, side, side)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (65, 33), (95, 50)])
def test_sizes_are_halved_upwards(height, width):
    net = nets.build("pvanet", 4, channels=1, height=height, width=width).eval()
    logits, points = net(torch.randn(1, 1, height, width))
    assert logits.shape == (1, 4)
    assert points["pvanet/conv5_4"].shape[2:] == (-(-height // 32), -(-width // 32))


def test_pictures_of_another_size_say_what_to_do():
    net = small().eval()
    with pytest.raises(ConfigError, match="pvanet has a map of 1x1 where its fc6 needs 2x2"):
        net(torch.randn(1, 3, 32, 32))
    with pytest.raises(ConfigError, match="pvanet gives a map of 2x2"):
        net(torch.randn(1, 3, 96, 96))


def test_names():
    state = small().state_dict()
    for name in (
        "conv1_1.conv.weights",
        "conv1_1.BatchNorm.moving_variance",
        "conv2_1.shortcut.biases",
        "conv3_2.both.BatchNorm.gamma",
        "conv4_1.pooled.BatchNorm.beta",
        "conv5_3.join.biases",
        "fc6.BatchNorm.gamma",
        "fc8.biases",
    ):
        assert name in state
    assert "conv4_2.pooled.weights" not in state
    assert "conv4_2.shortcut.weights" not in state


def test_both_signs():
    layer = BothSigns(3, 4, 7, RECIPE, NORM, stride=2).eval()
    x = torch.randn(2, 3, 9, 8)
    bare = functional.conv2d(x, layer.conv.weights, layer.conv.biases, 2, 3)
    torch.testing.assert_close(layer(x), torch.cat((bare, -bare), 1) / (1 + NORM.epsilon) ** 0.5)


def test_thin_unit_adds_to_what_came_in():
    unit = ThinUnit(8, 4, 8, 1, RECIPE, NORM).eval()
    x = torch.randn(2, 8, 5, 5)
    with torch.no_grad():
        unit.expand.weights.zero_()
    assert torch.equal(unit(x), x)  # not activated: the unit activates what it reads itself
    unit = ThinUnit(8, 4, 16, 2, RECIPE, NORM).eval()
    inner = functional.conv2d(x.relu(), unit.reduce.weights, unit.reduce.biases, 2).relu()
    want = unit.expand(unit.both(inner).relu()) + functional.conv2d(x, unit.shortcut.weights, unit.shortcut.biases, 2)
    torch.testing.assert_close(unit(x), want)


@pytest.mark.parametrize("stride", [1, 2])
def test_inception_unit_joins_its_branches(stride):
    unit = InceptionUnit(16, 32, stride, NARROW, RECIPE, NORM).eval()
    x = torch.randn(2, 16, 7, 7)
    ready = x.relu()
    side = 7 if stride == 1 else 4
    found = [branch(ready) for branch in unit.branches]
    assert [tuple(part.shape[1:]) for part in found] == [(64, side, side), (128, side, side), (48, side, side)]
    if stride == 2:
        found.append(unit.pooled(functional.max_pool2d(ready, 3, 2, 1)))
    torch.testing.assert_close(unit(x), unit.shortcut(x) + unit.join(torch.cat(found, 1)))
    assert (unit.pooled is None) == (stride == 1)


def test_backward_reaches_every_variable():
    net = small()
    net(torch.randn(4, 3, 64, 64))[0].square().sum().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in net.parameters())
    assert all(value.grad.abs().sum() > 0 for value in net.decayed_variables())


def test_training_and_evaluation_differ():
    net = small(dropout_keep_prob=1.0)
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        trained, again = net(images)[0], net(images)[0]
        assert torch.equal(trained, again)  # no dropout
        evaluated = net.eval()(images)[0]
        assert not torch.allclose(trained, evaluated)  # statistics of the batch, and moving ones
        assert torch.equal(evaluated, net(images)[0])
        net.keep = 0.5
        assert torch.equal(evaluated, net(images)[0])
        net.train()
        assert not torch.equal(net(images)[0], net(images)[0])


def test_renorm_reaches_every_norm():
    with torch.device("meta"):
        norms = [module for module in small(renorm=True).modules() if isinstance(module, BatchNorm)]
    assert len(norms) == 1 + 7 + 2 * (4 * 7 + 1) + 2
    assert all(norm.renorm for norm in norms)
