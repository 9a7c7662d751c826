import pytest
import torch
from torch.nn import functional

from plait import nets
from plait.errors import ConfigError
from plait.nets.blocks import BatchNorm, Norm, Recipe, normal
from plait.nets.mobilenet_v2 import ExpandedConv

COUNTS = {
    "mobilenet_v2": (3_506_153, 3_504_872, 300_774_272),
    "mobilenet_v2_140": (6_110_569, 6_108_776, 582_195_824),
    "mobilenet_v2_035": (1_678_409, 1_677_128, 59_285_808),
}
"""Parameters with 1001 classes and with 1000, and multiply-adds with 1000."""
WIDTHS = [16, 24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320]
SIDES = [112, 56, 56, 28, 28, 28, 14, 14, 14, 14, 14, 14, 14, 7, 7, 7, 7]
RECIPE = Recipe(norm=Norm(epsilon=1e-3), activation=functional.relu6, init=normal(0.09))


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(5)


def small(**options):
    return nets.build("mobilenet_v2_035", 10, **options)


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    canonical, thousand, multiply_adds = COUNTS[name]
    assert nets.card(name).parameters == canonical
    assert nets.card(name, 1000) == (thousand, multiply_adds)


def test_end_points():
    with torch.device("meta"):
        logits, points = nets.build("mobilenet_v2")(torch.zeros(2, 3, 224, 224))
    wanted = {f"layer_{number}" for number in range(1, 20)} | {"global_pool", "Logits", "Predictions"}
    wanted |= {f"layer_{number}/{key}" for number in range(2, 19) for key in ("depthwise_output", "output")}
    wanted |= {f"layer_{number}/expansion_output" for number in range(3, 19)}
    assert set(points) == wanted
    assert points["Logits"] is logits
    assert logits.shape == points["Predictions"].shape == (2, 1001)
    assert points["layer_1"].shape == (2, 32, 112, 112)
    for number, (width, side) in enumerate(zip(WIDTHS, SIDES, strict=True), 2):
        assert points[f"layer_{number}"].shape == (2, width, side, side)
        assert points[f"layer_{number}/output"] is points[f"layer_{number}"]
    assert points["layer_15/expansion_output"].shape == (2, 576, 14, 14)
    assert points["layer_15/depthwise_output"].shape == (2, 576, 7, 7)
    assert points["layer_19"].shape == (2, 1280, 7, 7)
    assert points["global_pool"].shape == (2, 1280, 1, 1)


def test_names_are_slim_s():
    net = small()
    assert net.scope == "MobilenetV2"
    layers = {"Conv": "weights", "Conv_1": "weights"}
    for number in range(17):
        unit = f"expanded_conv_{number}" if number else "expanded_conv"
        layers |= {f"{unit}/depthwise": "depthwise_weights", f"{unit}/project": "weights"}
        if number:
            layers[f"{unit}/expand"] = "weights"
    norm = ["beta", "gamma", "moving_mean", "moving_variance"]
    wanted = {"Logits/Conv2d_1c_1x1/weights", "Logits/Conv2d_1c_1x1/biases"}
    for layer, leaf in layers.items():
        wanted |= {f"{layer}/{leaf}", *(f"{layer}/BatchNorm/{part}" for part in norm)}
    assert {key.replace(".", "/") for key in net.state_dict()} == wanted
    assert len(wanted) == 262


@pytest.mark.parametrize(
    ("name", "first", "units", "last"),
    [
        ("mobilenet_v2_140", 48, [24, 32, 32, 48, 48, 48, 88, 88, 88, 88, 136, 136, 136, 224, 224, 224, 448], 1792),
        ("mobilenet_v2_035", 16, [8, 8, 8, 16, 16, 16, 24, 24, 24, 24, 32, 32, 32, 56, 56, 56, 112], 1280),
    ],
)
def test_widths_are_multiples_of_eight(name, first, units, last):
    with torch.device("meta"):
        net = nets.build(name)
    assert net.Conv.weights.shape[0] == first
    assert [getattr(net, unit).project.weights.shape[0] for unit in net.units] == units
    assert net.Conv_1.weights.shape[0] == last


@pytest.mark.parametrize(("height", "width"), [(64, 64), (33, 97), (288, 31), (1, 1)])
def test_any_size_will_do(height, width):
    logits, points = small(channels=1).eval()(torch.randn(1, 1, height, width))
    assert logits.shape == (1, 10)
    for layer, factor in (("layer_1", 2), ("layer_4", 4), ("layer_19", 32)):
        assert points[layer].shape[2:] == (-(-height // factor), -(-width // factor))


@pytest.mark.parametrize(("size", "pads"), [(8, (0, 1, 0, 1)), (9, (1, 1, 1, 1))])
def test_unit_by_hand(size, pads):
    unit = ExpandedConv(8, 48, 16, 2, RECIPE).eval()
    x = torch.randn(2, 8, size, size)
    scale = 1.001**-0.5  # what a fresh norm does in evaluation
    inner = functional.relu6(functional.conv2d(x, unit.expand.weights) * scale)
    deep = functional.conv2d(functional.pad(inner, pads), unit.depthwise.depthwise_weights, stride=2, groups=48)
    deep = functional.relu6(deep * scale)
    want = functional.conv2d(deep, unit.project.weights) * scale
    found = unit(x)
    torch.testing.assert_close(found["expansion_output"], inner)
    torch.testing.assert_close(found["depthwise_output"], deep)
    torch.testing.assert_close(found["output"], want)
    assert found["output"].min() < 0  # the bottleneck is linear


def test_units_add_only_where_shapes_stay():
    x = torch.randn(2, 8, 5, 5)
    unit = ExpandedConv(8, 48, 8, 1, RECIPE).eval()
    with torch.no_grad():
        unit.project.weights.zero_()
    assert torch.equal(unit(x)["output"], x)
    net = small()
    flags = [getattr(net, name).residual for name in net.units]
    assert [number for number, flag in enumerate(flags) if flag] == [2, 4, 5, 7, 8, 9, 11, 12, 14, 15]
    # in the narrow network units 0 and 1 are equally wide, but unit 1 halves the picture


def test_the_first_unit_does_not_expand():
    net = small()
    assert net.expanded_conv.expand is None
    assert net.expanded_conv_1.expand.weights.shape == (48, 8, 1, 1)


def test_options():
    assert small(depth_multiplier=0.5).expanded_conv_16.project.weights.shape[0] == 160
    with pytest.raises(ConfigError, match="depth_multiplier=-1"):
        small(depth_multiplier=-1)


def test_first_values_and_norms():
    net = nets.build("mobilenet_v2")
    for weights in (net.Conv_1.weights, net.expanded_conv_16.depthwise.depthwise_weights):
        assert weights.std().item() == pytest.approx(0.8796 * 0.09, rel=0.05)
    norms = [module for module in net.modules() if isinstance(module, BatchNorm)]
    assert len(norms) == 52
    assert {(norm.epsilon, round(norm.momentum, 6), norm.renorm) for norm in norms} == {(1e-3, 0.003, False)}


def test_renorm_reaches_every_norm():
    norms = [module for module in small(renorm=True).modules() if isinstance(module, BatchNorm)]
    assert len(norms) == 52
    assert all(norm.renorm for norm in norms)


def test_backward_reaches_every_variable():
    net = small()
    net(torch.randn(4, 3, 64, 64))[0].square().sum().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in net.parameters())
    assert all(value.grad.abs().sum() > 0 for value in net.decayed_variables())


def test_training_and_evaluation_differ():
    net = small()
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        first, second = (net(images)[1] for _ in range(2))
        assert torch.equal(first["global_pool"], second["global_pool"])
        assert not torch.equal(first["Logits"], second["Logits"])  # dropout
        third, fourth = (net.eval()(images)[1] for _ in range(2))
        assert torch.equal(third["Logits"], fourth["Logits"])
        assert not torch.allclose(first["global_pool"], third["global_pool"])  # moving statistics
