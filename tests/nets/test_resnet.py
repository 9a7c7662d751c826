from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.nn import functional

from plait import nets
from plait.errors import ConfigError
from plait.nets.blocks import BatchNorm, Net, Norm, Recipe, he_normal
from plait.nets.family import Shape
from plait.nets.resnet import VARIANTS, Bottleneck, CifarUnit, ResNet, Shortcut, Variant

RECIPE = Recipe(norm=Norm(), init=he_normal)

COUNTS = {
    "resnet_v1_18": (11_689_512, 1_814_073_344),
    "resnet_v1_50": (25_557_032, 3_482_255_360),
    "resnet_v1_50_8k": (25_557_032, 4_089_184_256),
    "resnet_v1_101": (44_549_160, 7_194_476_544),
    "resnet_v1_152": (60_192_808, 10_906_697_728),
    "resnet_v1_200": (64_673_832, 14_400_552_960),
    "resnet_v2_50": (25_568_360, 3_482_255_360),
    "resnet_v2_101": (44_577_896, 7_194_476_544),
    "resnet_v2_152": (60_236_904, 10_906_697_728),
    "resnet_v2_200": (64_726_120, 14_400_552_960),
    "resnext_c_50": (25_028_904, 4_230_479_872),
    "resnext_c_101": (44_177_704, 7_969_996_800),
    "resnet_v1_20": (334_072, 40_614_400),
    "resnet_v1_110": (1_792_312, 252_951_040),
}
"""Parameters and multiply-adds with 1000 classes."""


@functools.cache
def on_meta(name: str, **options: object) -> Net:
    with torch.device("meta"):
        return nets.build(name, **options)


@functools.cache
def points_of(name: str, **options: object) -> dict[str, tuple[int, ...]]:
    """The shapes of the end points for one picture."""
    size = nets.info(name).image_size
    with torch.no_grad():
        _, points = on_meta(name, **options).eval()(torch.zeros(1, 3, size, size, device="meta"))
    return {key: tuple(value.shape) for key, value in points.items()}


def small(variant: Variant, *, renorm: bool = False) -> ResNet:
    torch.manual_seed(0)
    recipe = Recipe(norm=Norm(renorm=renorm), init=he_normal)
    return ResNet("small", variant, Shape(channels=3, height=64, width=64, classes=5), recipe)


def variables_of(net: torch.nn.Module) -> set[str]:
    return {name.replace(".", "/") for name in net.state_dict()}


def sides(points: dict[str, tuple[int, ...]], name: str) -> list[int]:
    return [points[f"{name}/block{number}"][2] for number in (1, 2, 3, 4)]


def untouched(net: torch.nn.Module) -> list[str]:
    return [name for name, value in net.named_parameters() if value.grad is None or not value.grad.any()]


# What a network is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str):
    assert nets.card(name, 1000) == COUNTS[name]


@pytest.mark.parametrize(("name", "count"), [("resnet_v1_20", 269_722), ("resnet_v1_110", 1_727_962)])
def test_counts_with_the_classes_of_cifar(name: str, count: int):
    assert sum(value.numel() for value in on_meta(name).parameters()) == count


@pytest.mark.slow
@pytest.mark.parametrize("depth", [50, 101])
def test_branches_cost_what_groups_cost(depth: int):
    assert nets.card(f"resnext_b_{depth}") == COUNTS[f"resnext_c_{depth}"]


@pytest.mark.parametrize("name", ["resnet_v1_50", "resnet_v2_50"])
def test_slims_blocks_get_smaller_in_their_last_unit(name: str):
    points = points_of(name)
    kind = "bottleneck_v1" if "_v1_" in name else "bottleneck_v2"
    assert points[f"{name}/conv1"] == (1, 64, 112, 112)
    assert sides(points, name) == [28, 14, 7, 7]
    assert points[f"{name}/block1/unit_2/{kind}"] == (1, 256, 56, 56)
    assert points[f"{name}/block1/unit_3/{kind}"] == (1, 256, 28, 28)
    assert points[f"{name}/block4"] == (1, 2048, 7, 7)


@pytest.mark.parametrize("name", ["resnet_v1_18", "resnet_v1_50_8k", "resnext_c_50"])
def test_others_get_smaller_in_their_first_unit(name: str):
    assert sides(points_of(name), name) == [56, 28, 14, 7]


def test_official_puts_strides_where_slim_has_them(monkeypatch: pytest.MonkeyPatch):
    name = "resnet_v1_50_8k"
    assert sides(points_of(name, official=True), name) == [28, 14, 7, 7]
    assert variables_of(on_meta(name, official=True)) == variables_of(on_meta(name))
    monkeypatch.setitem(VARIANTS, name, VARIANTS[name]._replace(units=(1, 1, 1, 1)))
    gamma = nets.build(name, 2, official=True).block1.unit_1.bottleneck_v1.conv3.BatchNorm.gamma
    assert not gamma.any()


def test_end_points_of_a_network():
    points = points_of("resnet_v1_50")
    assert points["global_pool"] == (1, 2048, 1, 1)
    assert points["resnet_v1_50/logits"] == (1, 1000, 1, 1)
    assert points["resnet_v1_50/spatial_squeeze"] == points["predictions"] == (1, 1000)
    units = {
        f"resnet_v1_50/block{block}/unit_{unit}/bottleneck_v1"
        for block, units in enumerate((3, 4, 6, 3), 1)
        for unit in range(1, units + 1)
    }
    assert units < set(points)
    assert {f"{unit}/conv{number}" for unit in units for number in (1, 2, 3)} < set(points)
    assert "resnet_v1_50/block1/unit_1/bottleneck_v1/shortcut" in points
    assert "resnet_v1_50/block1/unit_2/bottleneck_v1/shortcut" not in points  # there is no layer
    assert len(points) == 16 * 4 + 4 + 4 + 5


def test_names_of_version_1_are_those_of_slim():
    net = on_meta("resnet_v1_50")
    assert net.scope == "resnet_v1_50"
    assert len(variables_of(net)) == 267
    assert variables_of(net) > {
        "conv1/weights",
        "conv1/BatchNorm/moving_mean",
        "block1/unit_1/bottleneck_v1/shortcut/weights",
        "block1/unit_1/bottleneck_v1/shortcut/BatchNorm/gamma",
        "block1/unit_1/bottleneck_v1/conv1/weights",
        "block3/unit_6/bottleneck_v1/conv2/BatchNorm/beta",
        "block4/unit_3/bottleneck_v1/conv3/BatchNorm/moving_variance",
        "logits/weights",
        "logits/biases",
    }
    assert "block1/unit_2/bottleneck_v1/shortcut/weights" not in variables_of(net)


def test_names_of_version_2_are_those_of_slim():
    net = on_meta("resnet_v2_50")
    names = variables_of(net)
    assert len(names) == 272
    assert names > {
        "conv1/weights",
        "conv1/biases",
        "block1/unit_1/bottleneck_v2/preact/beta",
        "block1/unit_1/bottleneck_v2/shortcut/biases",
        "block2/unit_4/bottleneck_v2/conv2/BatchNorm/gamma",
        "block4/unit_3/bottleneck_v2/conv3/biases",
        "postnorm/moving_variance",
        "logits/biases",
    }
    assert not {"conv1/BatchNorm/beta", "block1/unit_1/bottleneck_v2/conv3/BatchNorm/beta"} & names


@pytest.mark.parametrize(("name", "layers"), [("resnet_v1_18", 18), ("resnet_v1_101", 101), ("resnet_v2_200", 200)])
def test_the_number_in_a_name_is_that_of_its_layers(name: str, layers: int):
    names = variables_of(on_meta(name))
    assert sum(path.endswith("/weights") and "shortcut" not in path for path in names) == layers


def test_normalisation():
    for renorm in (False, True):
        norms = [part for part in on_meta("resnet_v2_50", renorm=renorm).modules() if isinstance(part, BatchNorm)]
        assert len(norms) == 1 + 16 * 3
        found = {(round(1 - norm.momentum, 6), norm.epsilon, norm.renorm) for norm in norms}
        assert found == {(0.997, 1e-5, renorm)}


# What it does ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    [
        Variant((2, 2, 1, 1)),
        Variant((1, 2, 1, 1), "bottleneck_v2"),
        Variant((2, 1, 1, 1), "basic_v1", stride_first=True),
        Variant((1, 1, 1, 1), stride_first=True, branches=32),
        Variant((1, 1, 1, 1), stride_first=True, branches=32, grouped=False),
    ],
    ids=["v1", "v2", "basic", "groups", "branches"],
)
def test_a_gradient_reaches_every_parameter(variant: Variant):
    net = small(variant)
    logits, _ = net(torch.randn(2, 3, 64, 64))
    functional.cross_entropy(logits, torch.tensor([0, 3])).backward()
    assert untouched(net) == []


@pytest.mark.parametrize("size", [63, 64, 65, 66])
@pytest.mark.parametrize("variant", [Variant((2, 1, 1, 1)), Variant((1, 2, 1, 1), stride_first=True)])
def test_odd_and_even_pictures(variant: Variant, size: int):
    net = small(variant).eval()
    with torch.no_grad():
        logits, points = net(torch.randn(1, 3, size, size))
    side = math.ceil(size / 4)
    smaller = (False, True, True, True) if variant.stride_first else (True, True, True, False)
    for number, halved in enumerate(smaller, 1):
        side = math.ceil(side / 2) if halved else side
        assert points[f"small/block{number}"].shape[2:] == (side, side)
    assert logits.shape == (1, 5)


def test_training_and_evaluation_differ():
    net = small(Variant((1, 1, 1, 1)))
    x = 3 * torch.randn(2, 3, 64, 64) + 1
    before = net.conv1.BatchNorm.moving_mean.clone()
    trained = net(x)[0]
    assert not torch.equal(net.conv1.BatchNorm.moving_mean, before)
    net.eval()
    logits, points = net(x)
    assert not torch.allclose(trained, logits)
    assert torch.equal(net(x)[0], logits)
    assert torch.allclose(points["predictions"], torch.softmax(logits, 1))


def test_weights_begin_as_he_says():
    weights = small(Variant((1, 1, 1, 1))).block4.unit_1.bottleneck_v1.conv2.weights
    assert weights.std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)


def test_only_weights_decay():
    net = small(Variant((1, 1, 1, 1), "bottleneck_v2"))
    decayed = {id(value) for value in net.decayed_variables()}
    assert {name.rpartition(".")[2] for name, value in net.named_parameters() if id(value) in decayed} == {"weights"}


def test_a_unit_that_begins_with_zeros_is_the_identity():
    unit = Bottleneck(256, 256, 1, RECIPE, VARIANTS["resnet_v1_50_8k"])
    x = torch.randn(2, 256, 5, 5)
    assert torch.equal(unit(x), functional.relu(x))
    assert not torch.equal(Bottleneck(256, 256, 1, RECIPE, VARIANTS["resnet_v1_50"])(x), functional.relu(x))


def test_every_unit_of_the_8k_network_begins_with_zeros_and_learns():
    net = small(Variant((2, 1, 1, 1), stride_first=True, zero_last=True))
    zeros = {name for name, value in net.named_parameters() if name.endswith("gamma") and not value.any()}
    assert zeros == {f"{name}.conv3.BatchNorm.gamma" for name, part in net.named_modules() if "bottle" in name[-13:]}
    assert len(zeros) == 5
    net(torch.randn(2, 3, 64, 64))[0].square().sum().backward()
    assert not zeros & set(untouched(net))


def test_a_shortcut_takes_every_second_point():
    x = torch.arange(25.0).reshape(1, 1, 5, 5)
    assert Shortcut(1)(x) is x
    assert Shortcut(2)(x).flatten().tolist() == [0, 2, 4, 10, 12, 14, 20, 22, 24]


def test_the_sum_of_version_2_is_left_as_it_is():
    torch.manual_seed(0)
    first, second = small(Variant((1, 1, 1, 1))), small(Variant((1, 1, 1, 1), "bottleneck_v2"))
    x = torch.randn(1, 3, 64, 64)
    assert first.eval()(x)[1]["small/block1"].min() == 0
    assert second.eval()(x)[1]["small/block1"].min() < 0


def carried(branches: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The tensor `name` of the network with groups, out of one with branches."""
    if name in branches:
        return branches[name]
    scope, layer, leaf = name.partition(".conv1." if ".conv1." in name else ".conv2.")
    return torch.cat([branches[f"{scope}.branches.{number}{layer}{leaf}"] for number in range(32)])


def test_resnext_with_branches_is_that_with_groups():
    b = small(Variant((1, 2, 1, 1), stride_first=True, branches=32, grouped=False))
    c = small(Variant((1, 2, 1, 1), stride_first=True, branches=32))
    state = b.state_dict()
    c.load_state_dict({name: carried(state, name) for name in c.state_dict()})
    x = torch.randn(2, 3, 64, 64)
    assert torch.allclose(b(x)[0], c(x)[0], atol=1e-4)
    b.eval()
    c.eval()
    assert torch.allclose(b(x)[0], c(x)[0], atol=1e-4)


# CIFAR ----------------------------------------------------------------------------------------------------------------


def test_end_points_for_cifar():
    points = points_of("resnet_v1_20")
    blocks = [points[f"resnet_v1_20/block{number}"] for number in (1, 2, 3)]
    assert blocks == [(1, 16, 32, 32), (1, 32, 16, 16), (1, 64, 8, 8)]
    assert points["resnet_v1_20/block3/unit_3"] == (1, 64, 8, 8)
    assert points["resnet_v1_20/logits"] == points["predictions"] == (1, 10)


@pytest.mark.parametrize(("name", "layers"), [("resnet_v1_20", 20), ("resnet_v1_110", 110)])
def test_shortcuts_for_cifar_have_no_parameters(name: str, layers: int):
    names = variables_of(on_meta(name))
    assert sum(path.endswith("/weights") for path in names) == layers
    assert not any("shortcut" in path for path in names)


def test_new_channels_of_a_shortcut_are_zeros():
    unit = CifarUnit(4, 8, 2, RECIPE).eval()
    torch.nn.init.zeros_(unit.conv2.weights)
    x = torch.rand(1, 4, 6, 6)
    found = unit(x)
    assert torch.equal(found[:, 2:6], x[:, :, ::2, ::2])
    assert not found[:, :2].any()
    assert not found[:, 6:].any()


def test_a_training_step_for_cifar():
    torch.manual_seed(0)
    net = nets.build("resnet_v1_20")
    functional.cross_entropy(net(torch.randn(4, 3, 32, 32))[0], torch.tensor([0, 1, 2, 3])).backward()
    assert untouched(net) == []


def test_an_unknown_option():
    with pytest.raises(ConfigError, match="no option .depth."):
        on_meta("resnet_v1_50", depth=3)
