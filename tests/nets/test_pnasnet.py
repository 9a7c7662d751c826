from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional

from plait import nets
from plait.nets.blocks import BatchNorm
from plait.nets.pnasnet import VARIANTS, places

COUNTS = {
    "pnasnet_large": (86_061_989, 86_057_668, 24_937_395_792, 4_586_985),
    "pnasnet_mobile": (5_065_568, 5_064_487, 587_293_200, 2_413_545),
}
"""Parameters with 1001 classes and with 1000; multiply-adds with 1000; the auxiliary head's with 1001."""

MAPS = {
    "pnasnet_large": {"Stem": (540, 42), "Cell_0": (1080, 42), "Cell_4": (2160, 21), "Cell_8": (4320, 11)},
    "pnasnet_mobile": {"Stem": (135, 28), "Cell_0": (270, 28), "Cell_3": (540, 14), "Cell_6": (1080, 7)},
}
CELLS = {"pnasnet_large": 12, "pnasnet_mobile": 9}


@functools.cache
def on_meta(name: str, **options: object) -> nets.blocks.Net:
    with torch.device("meta"):
        return nets.build(name, **options)


def names_of(net: torch.nn.Module) -> set[str]:
    return {name.replace(".", "/") for name in net.state_dict()}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str):
    canonical, thousand, multiply_adds, aux = COUNTS[name]
    assert nets.card(name, 1000) == (thousand, multiply_adds)
    sizes = {path: value.numel() for path, value in on_meta(name).named_parameters()}
    assert sum(size for path, size in sizes.items() if "aux" not in path) == canonical
    assert sum(size for path, size in sizes.items() if "aux" in path) == aux


@pytest.mark.parametrize("name", MAPS)
def test_end_points(name: str):
    size = nets.info(name).image_size
    net = on_meta(name).eval()
    with torch.no_grad():
        logits, points = net(torch.zeros(2, 3, size, size, device="meta"))
    assert logits.shape == points["Predictions"].shape == (2, 1001)
    for point, (channels, side) in MAPS[name].items():
        assert points[point].shape == (2, channels, side, side), point
    cells = {f"Cell_{number}" for number in range(CELLS[name])}
    assert set(points) == cells | {"Stem", "global_pool", "Logits", "Predictions"}


def test_names_are_those_of_slim():
    for name, aux in (("pnasnet_large", "aux_7"), ("pnasnet_mobile", "aux_5")):
        net = on_meta(name)
        assert net.scope == name
        names = names_of(net)
        assert names > {
            "conv0/weights",
            "conv0_bn/moving_mean",
            "cell_stem_0/comb_iter_0/right/1x1/weights",
            "cell_stem_0/comb_iter_0/right/bn_1/gamma",
            "cell_stem_0/comb_iter_4/right/1x1/weights",
            "cell_stem_1/path2_conv/weights",
            "cell_0/comb_iter_1/left/separable_7x7_2/pointwise_weights",
            "cell_0/comb_iter_3/left/bn_sep_3x3_1/beta",
            "cell_1/prev_1x1/weights",
            f"{aux}/aux_logits/FC/weights",
            "final_layer/FC/biases",
        }
        assert not any(part in path for path in names for part in ("reduction", "cell_output"))
        # a cell with stride 1 takes its input as it is
        assert "cell_0/comb_iter_4/right/1x1/weights" not in names


def test_one_cell_everywhere():
    found = places(VARIANTS["pnasnet_mobile"])
    assert len({place.plan for place in found}) == 1
    assert [place.stride for place in found] == [2, 2, 1, 1, 1, 2, 1, 1, 2, 1, 1]
    assert [place.scaling for place in found] == [0.25, 0.5, 1, 1, 1, 2, 2, 2, 4, 4, 4]


def test_odd_channels_of_the_stem_are_rounded_down():
    net = on_meta("pnasnet_mobile")
    assert net.cell_stem_0.beginning_bn.beta.shape == (13,)
    assert (net.cell_stem_1.path1_conv.weights.shape[0], net.cell_stem_1.path2_conv.weights.shape[0]) == (13, 14)


def test_a_training_step():
    torch.manual_seed(0)
    net = nets.build("pnasnet_mobile", 7, height=96, width=81)
    x = torch.randn(4, 3, 96, 81)
    logits, points = net(x)
    target = torch.tensor([1, 2, 3, 4])
    (functional.cross_entropy(logits, target) + 0.4 * functional.cross_entropy(points["AuxLogits"], target)).backward()
    assert [name for name, value in net.named_parameters() if value.grad is None or not value.grad.any()] == []
    net.eval()
    with torch.no_grad():
        later, points = net(x)
    assert "AuxLogits" not in points
    assert not torch.allclose(later, logits)


@pytest.mark.slow
def test_a_training_step_of_the_large_network():
    net = nets.build("pnasnet_large", 7, height=96, width=96)
    logits, points = net(torch.randn(2, 3, 96, 96))
    (logits.square().sum() + points["AuxLogits"].square().sum()).backward()
    assert [path for path, value in net.named_parameters() if value.grad is None] == []


def test_normalisation():
    norms = [module for module in on_meta("pnasnet_mobile", renorm=True).modules() if isinstance(module, BatchNorm)]
    assert {(round(1 - norm.momentum, 6), norm.epsilon, norm.renorm) for norm in norms} == {(0.9997, 1e-3, True)}
    assert all(norm.gamma is not None for norm in norms)


def test_defaults_are_those_of_slim_and_can_be_changed():
    assert on_meta("pnasnet_large").settings.drop_path_keep_prob == 0.6
    assert on_meta("pnasnet_mobile").settings.drop_path_keep_prob == 1
    changed = on_meta("pnasnet_large", drop_path_keep_prob=0.8, total_training_steps=9, dense_dropout_keep_prob=1.0)
    assert changed.settings[4:7] == (0.8, 1.0, 9)
    assert changed.cell_11.drop == pytest.approx(0.2)
    assert not any("aux" in name for name in names_of(on_meta("pnasnet_large", use_aux_head=False)))
