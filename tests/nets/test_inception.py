from __future__ import annotations

import numpy as np
import pytest
import torch

from plait import nets
from plait.errors import ConfigError
from plait.nets.blocks import BatchNorm, Conv, Net, constant
from plait.nets.family import Shape
from plait.nets.inception import STEM, Heads, Inception, Layer, Mixed, make_style, mixed, smaller

NAMES = ["inception_v1", "inception_v2", "inception_v3", "inception_v4", "inception_resnet_v2"]
WITH_AUX = NAMES[2:]

# what TF-Slim's networks give for two pictures, with weights as in `fill`
SLIM_LOGITS = {
    "inception_v1": [[1.68868, -14.63861, 4.93953], [1.08022, -14.10691, 4.85392]],
    "inception_v2": [[5.18759, -11.72892, -11.21004], [5.35897, -11.48583, -10.77976]],
    "inception_v3": [[0.56727, 0.60325, -1.97032], [0.46993, 0.48228, -2.05125]],
    "inception_v4": [[0.03686, 1.60231, -0.82757], [0.04908, 1.51651, -0.85791]],
    "inception_resnet_v2": [[1.14901, 18.94054, 9.63409], [0.18604, 19.27142, 9.97453]],
}
SLIM_AUX_LOGITS = {
    "inception_v3": [[-2.11782, 1.78207, -3.79055], [-2.04727, 1.67124, -3.70641]],
    "inception_v4": [[0.7813, -4.46878, -0.97394], [0.76233, -4.4957, -1.03271]],
    "inception_resnet_v2": [[-9.23301, -9.72738, 0.80567], [-8.96424, -9.49344, 1.18795]],
}


def tensorflow_shape(name: str, shape: torch.Size) -> tuple[int, ...]:
    if name.endswith("depthwise_weights"):
        return (*shape[2:], 3, shape[0] // 3)
    return (*shape[2:], shape[1], shape[0]) if len(shape) > 1 else tuple(shape)


def as_torch(values: np.ndarray, shape: torch.Size) -> torch.Tensor:
    tensor = torch.from_numpy(values.astype(np.float32))
    if tensor.ndim == 2:
        return tensor.T
    if tensor.ndim == 4 and shape[1] == 1:
        return tensor.permute(2, 3, 0, 1).reshape(shape)
    return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor


def fill(net: Net, draw: np.random.RandomState) -> None:
    """Draw every variable in the order of their names, in TensorFlow's order of dimensions."""
    state = {name.replace(".", "/"): tensor for name, tensor in net.state_dict().items()}
    for name in sorted(state):
        shape = tensorflow_shape(name, state[name].shape)
        values = draw.uniform(-1, 1, shape)
        if name.endswith("moving_variance"):
            values = 1 + values / 2
        elif name.endswith("weights"):
            fan = np.prod(shape[:2]) if name.endswith("depthwise_weights") else np.prod(shape[:-1])
            values = values * np.sqrt(6 / fan)
        else:
            values = values / 10
        state[name].copy_(as_torch(values, state[name].shape))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_tf_slim(name: str):
    height, width = (180, 131) if name in WITH_AUX else (97, 120)  # neither square nor all even
    draw = np.random.RandomState(7)
    images = torch.from_numpy(draw.uniform(-1, 1, (2, height, width, 3)).astype(np.float32)).permute(0, 3, 1, 2)
    with torch.device("meta"):
        net = nets.build(name, 3, height=height, width=width).eval()
    net.to_empty(device="cpu")
    with torch.no_grad():
        fill(net, draw)
        logits, points = net(images)
    torch.testing.assert_close(logits, torch.tensor(SLIM_LOGITS[name]), rtol=1e-3, atol=1e-3)
    if name in WITH_AUX:
        torch.testing.assert_close(points["AuxLogits"], torch.tensor(SLIM_AUX_LOGITS[name]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_every_normalisation_is_of_the_family_and_takes_renorm(name: str):
    with torch.device("meta"):
        net = nets.build(name, renorm=True)
    found = [module for module in net.modules() if isinstance(module, BatchNorm)]
    assert len(found) > 50
    assert all(norm.renorm and norm.gamma is None and norm.epsilon == 1e-3 for norm in found)
    assert {round(norm.momentum, 6) for norm in found} == {0.0003}


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_channels_and_classes(name: str):
    with torch.device("meta"):
        net = nets.build(name, 7, channels=1).eval()
        size = nets.info(name).image_size
        logits, points = net(torch.zeros(2, 1, size, size))
    assert logits.shape == points["Predictions"].shape == (2, 7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep", [0, -0.1, 1.5])
def test_what_dropout_keeps_is_a_part(name: str, keep: float):
    with torch.device("meta"), pytest.raises(ConfigError, match=f"dropout_keep_prob={keep}"):
        nets.build(name, dropout_keep_prob=keep)


@pytest.mark.parametrize("name", ["inception_v2", "inception_v3"])
def test_the_depth_is_checked(name: str):
    with pytest.raises(ConfigError, match="depth_multiplier=0:"):
        nets.build(name, depth_multiplier=0)
    with pytest.raises(ConfigError, match="min_depth=0:"):
        nets.build(name, min_depth=0)


@pytest.mark.parametrize("name", WITH_AUX)
def test_the_smallest_pictures(name: str):
    with torch.device("meta"):
        for size, aux in ((107, True), (75, False)):
            net = nets.build(name, 4, height=size, width=size, create_aux_logits=aux).eval()
            logits, points = net(torch.zeros(1, 3, size, size))
            assert logits.shape == (1, 4)
            assert ("AuxLogits" in points) is aux
            assert any("aux" in path.lower() for path in net.state_dict()) is aux
        with pytest.raises(ConfigError, match=f"106x200 are too small for {name}: .* 107x107; .* 75x75 are enough"):
            nets.build(name, height=106, width=200)
        with pytest.raises(ConfigError, match=f"74x74 are too small for {name}: write at least 75x75$"):
            nets.build(name, height=74, width=74, create_aux_logits=False)


@pytest.mark.parametrize("name", WITH_AUX)
def test_pictures_of_another_size_than_the_auxiliary_head_was_built_for(name: str):
    with torch.device("meta"):
        net = nets.build(name).eval()
        with pytest.raises(ConfigError, match=r"a map of 5x5 and got 1x2: .*create_aux_logits=False"):
            net(torch.zeros(1, 3, 131, 180))
        plain = nets.build(name, create_aux_logits=False).eval()
        assert plain(torch.zeros(1, 3, 131, 180))[0].shape == (1, 1001)


STYLE = make_style(renorm=False, init=constant(1.0), min_depth=1)


@pytest.mark.parametrize(
    ("layer", "kernel"),
    [
        (Layer("Conv2d_0b_1x7", 2), (1, 7)),
        (Layer("Conv2d_0c_7x1", 2), (7, 1)),
        (Layer("Conv_1_0c_5x5", 2), (5, 5)),
        (Layer("Conv2d_1x1", 2), (1, 1)),
        (Layer("Conv2d_1a_1x1", 2, kernel=(3, 3)), (3, 3)),
    ],
)
def test_a_layers_name_tells_its_kernel(layer: Layer, kernel: tuple[int, int]):
    conv, outputs = layer.build(3, STYLE)
    assert isinstance(conv, Conv)
    assert outputs == 2
    assert conv.weights.shape == (2, 3, *kernel)


def test_a_pooling_keeps_its_channels():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    for layer, expected in (
        (Layer("MaxPool_0a_3x3"), [[5, 6, 7, 7], [9, 10, 11, 11], [13, 14, 15, 15], [13, 14, 15, 15]]),
        (Layer("MaxPool_5a_2x2", stride=2), [[5, 7], [13, 15]]),
        (smaller("MaxPool_1a_3x3"), [[10]]),
        (Layer("AvgPool_0a_3x3", stride=2), [[5, 6.5], [11, 12.5]]),  # what lies outside does not count
    ):
        pool, outputs = layer.build(1, STYLE)
        assert outputs == 1
        assert pool(x)[0, 0].tolist() == expected


def test_layers_in_a_tuple_stand_side_by_side():
    step = Layer("a_1x1", 1, init=constant(2.0)), Layer("b_1x1", 2, init=constant(3.0))
    module = Mixed([(step,), (Layer("MaxPool_0a_3x3"),)], 1, STYLE).eval()
    assert module.outputs == 4
    out = module(torch.ones(1, 1, 2, 2))
    assert out[0, :, 0, 0].tolist() == pytest.approx([2, 3, 3, 1], rel=1e-3)
    assert [name for name, _ in module.named_parameters()] == [
        f"Branch_0.{name}.{leaf}" for name in ("a_1x1", "b_1x1") for leaf in ("weights", "BatchNorm.beta")
    ]


def test_a_network_from_a_table_of_two_parts():
    parts = (
        Layer("Conv2d_1a_3x3", 2, stride=2),
        mixed("Mixed_2a", [Layer("Conv2d_0a_1x1", 3)], [Layer("MaxPool_0a_3x3")]),
    )
    heads = Heads(logits="Conv2d_0c_1x1", pooled="mean", dropped="kept")
    net = Inception("Scope", parts, heads, Shape(channels=1, height=8, width=8, classes=4), STYLE, keep=0.5).eval()
    logits, points = net(torch.ones(2, 1, 8, 8))
    shapes = {name: list(point.shape[1:]) for name, point in points.items()}
    assert shapes == {
        "Conv2d_1a_3x3": [2, 4, 4],
        "Mixed_2a": [5, 4, 4],
        "mean": [5, 1, 1],
        "kept": [5, 1, 1],
        "Logits": [4],
        "Predictions": [4],
    }
    assert points["Logits"] is logits


def test_the_stem_makes_35_of_299():
    x, channels = torch.zeros(1, 3, 299, 299, device="meta"), 3
    with torch.device("meta"):
        for layer in STEM:
            module, channels = layer.build(channels, make_style(renorm=False))
            x = module.eval()(x)
    assert x.shape == (1, 192, 35, 35)
