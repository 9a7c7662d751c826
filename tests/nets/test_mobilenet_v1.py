import pytest
import torch
from torch.nn import functional

from plait import nets
from plait.errors import ConfigError
from plait.nets.blocks import BatchNorm

COUNTS = {
    "mobilenet_v1": (4_233_001, 4_231_976, 568_740_352),
    "mobilenet_v1_075": (2_586_329, 2_585_560, 325_400_448),
    "mobilenet_v1_050": (1_332_105, 1_331_592, 149_497_088),
    "mobilenet_v1_025": (470_329, 470_072, 41_030_272),
}
"""Parameters with 1001 classes and with 1000, and multiply-adds with 1000."""
PAIRS = [f"Conv2d_{number}_{kind}" for number in range(1, 14) for kind in ("depthwise", "pointwise")]
WIDTHS = [64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024]
SIDES = [112, 56, 56, 28, 28, 14, 14, 14, 14, 14, 14, 7, 7]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(5)


def small(**options):
    return nets.build("mobilenet_v1_025", 10, **options)


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    canonical, thousand, multiply_adds = COUNTS[name]
    assert nets.card(name).parameters == canonical
    assert nets.card(name, 1000) == (thousand, multiply_adds)


def test_count_of_the_base():
    with torch.device("meta"):
        net = nets.build("mobilenet_v1")
    counts = {key: value.numel() for key, value in net.state_dict().items() if "Logits" not in key}
    scales = sum(count for key, count in counts.items() if key.endswith("gamma"))
    assert sum(counts.values()) - scales == 3_217_920  # which TF-Slim's own test has, without scales


def test_end_points():
    with torch.device("meta"):
        logits, points = nets.build("mobilenet_v1")(torch.zeros(2, 3, 224, 224))
    assert list(points) == ["Conv2d_0", *PAIRS, "AvgPool_1a", "Logits", "Predictions"]
    assert points["Logits"] is logits
    assert logits.shape == points["Predictions"].shape == (2, 1001)
    assert points["Conv2d_0"].shape == (2, 32, 112, 112)
    for number, (width, side) in enumerate(zip(WIDTHS, SIDES, strict=True), 1):
        assert points[f"Conv2d_{number}_pointwise"].shape == (2, width, side, side)
        assert points[f"Conv2d_{number}_depthwise"].shape[2:] == (side, side)
    assert points["AvgPool_1a"].shape == (2, 1024, 1, 1)


def test_names_are_slim_s():
    net = small()
    assert net.scope == "MobilenetV1"
    norm = ["beta", "gamma", "moving_mean", "moving_variance"]
    wanted = {"Logits/Conv2d_1c_1x1/weights", "Logits/Conv2d_1c_1x1/biases"}
    for layer in ["Conv2d_0", *PAIRS]:
        wanted |= {f"{layer}/depthwise_weights" if layer.endswith("depthwise") else f"{layer}/weights"}
        wanted |= {f"{layer}/BatchNorm/{leaf}" for leaf in norm}
    assert {key.replace(".", "/") for key in net.state_dict()} == wanted


@pytest.mark.parametrize(("height", "width"), [(64, 64), (33, 97), (160, 31), (1, 1)])
def test_sizes_are_halved_upwards(height, width):
    logits, points = small(channels=1).eval()(torch.randn(1, 1, height, width))
    assert logits.shape == (1, 10)
    for layer, factor in (("Conv2d_0", 2), ("Conv2d_3_pointwise", 4), ("Conv2d_13_pointwise", 32)):
        assert points[layer].shape[2:] == (-(-height // factor), -(-width // factor))


@pytest.mark.parametrize(("size", "pads"), [(8, (0, 1, 0, 1)), (9, (1, 1, 1, 1))])
def test_padding_is_tensorflow_s(size, pads):
    net = small().eval()
    images = torch.randn(1, 3, size, size)
    points = net(images)[1]
    layer = net.Conv2d_0
    bare = functional.conv2d(functional.pad(images, pads), layer.weights, stride=2)
    torch.testing.assert_close(points["Conv2d_0"], functional.relu6(layer.BatchNorm(bare)))


def test_activations_end_at_six():
    net = small().eval()
    points = net(torch.randn(2, 3, 64, 64) * 1000)[1]
    assert points["Conv2d_0"].max() == 6
    assert points["Conv2d_0"].min() == 0


def test_pictures_of_other_sizes():
    net = small().eval()
    assert net(torch.randn(1, 3, 256, 256))[0].shape == (1, 10)  # 8x8 holds one window of 7x7, two apart
    with pytest.raises(ConfigError, match="mobilenet_v1_025 gives a map of 2x2"):
        net(torch.randn(1, 3, 288, 288))
    logits, points = small(global_pool=True).eval()(torch.randn(1, 3, 288, 288))
    assert logits.shape == (1, 10)
    assert "AvgPool_1a" not in points
    torch.testing.assert_close(points["global_pool"], points["Conv2d_13_pointwise"].mean((2, 3), keepdim=True))


def test_options():
    assert small(depth_multiplier=0.5).Conv2d_13_pointwise.weights.shape == (512, 512, 1, 1)
    thin = small(depth_multiplier=0.01)
    assert {layer.weights.shape[0] for layer in (thin.Conv2d_0, thin.Conv2d_3_pointwise)} == {8}
    assert small(depth_multiplier=0.01, min_depth=3).Conv2d_0.weights.shape == (3, 3, 3, 3)
    with pytest.raises(ConfigError, match="depth_multiplier=0"):
        small(depth_multiplier=0)


def test_first_values_and_norms():
    net = nets.build("mobilenet_v1")
    for weights in (net.Conv2d_5_pointwise.weights, net.Conv2d_13_depthwise.depthwise_weights):
        assert weights.std().item() == pytest.approx(0.8796 * 0.09, rel=0.05)
    norms = [module for module in net.modules() if isinstance(module, BatchNorm)]
    assert len(norms) == 27
    assert {(norm.epsilon, round(norm.momentum, 6), norm.renorm) for norm in norms} == {(1e-3, 0.0003, False)}


def test_renorm_reaches_every_norm():
    norms = [module for module in small(renorm=True).modules() if isinstance(module, BatchNorm)]
    assert len(norms) == 27
    assert all(norm.renorm for norm in norms)


def test_backward_reaches_every_variable():
    net = small()
    net(torch.randn(4, 3, 64, 64))[0].square().sum().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in net.parameters())
    assert all(value.grad.abs().sum() > 0 for value in net.decayed_variables())


def test_depthwise_weights_do_not_decay():
    net = small()
    assert len(net.decayed_variables()) == 15
    assert not any(value.shape[1] == 1 for value in net.decayed_variables())


def test_training_and_evaluation_differ():
    net = small(dropout_keep_prob=0.5)
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        first, second = (net(images)[1] for _ in range(2))
        assert torch.equal(first["AvgPool_1a"], second["AvgPool_1a"])
        assert not torch.equal(first["Logits"], second["Logits"])  # dropout
        third, fourth = (net.eval()(images)[1] for _ in range(2))
        assert torch.equal(third["Logits"], fourth["Logits"])
        assert not torch.allclose(first["AvgPool_1a"], third["AvgPool_1a"])  # moving statistics
