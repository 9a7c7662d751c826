from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional

from plait import nets
from plait.errors import ConfigError
from plait.nets.blocks import BatchNorm
from plait.nets.nasnet import VARIANTS, places

COUNTS = {
    "nasnet_cifar": (3_346_538, 4_107_848, 545_093_632, 1_631_498),
    "nasnet_mobile": (5_291_035, 5_289_978, 563_638_816, 2_412_009),
    "nasnet_large": (88_757_183, 88_753_150, 23_783_414_658, 4_568_553),
}
"""Parameters with the paper's classes and with 1000; multiply-adds with 1000; the auxiliary head's, as the first."""

MAPS = {
    "nasnet_cifar": {
        "Stem": (96, 32),
        "Cell_0": (192, 32),
        "Cell_5": (192, 32),
        "Reduction_Cell_0": (256, 16),
        "Cell_6": (384, 16),
        "Reduction_Cell_1": (512, 8),
        "Cell_12": (768, 8),
        "Cell_17": (768, 8),
    },
    "nasnet_mobile": {
        "Stem": (88, 28),
        "Cell_0": (264, 28),
        "Reduction_Cell_0": (352, 14),
        "Cell_4": (528, 14),
        "Reduction_Cell_1": (704, 7),
        "Cell_8": (1056, 7),
        "Cell_11": (1056, 7),
    },
    "nasnet_large": {
        "Stem": (336, 42),
        "Cell_0": (1008, 42),
        "Reduction_Cell_0": (1344, 21),
        "Cell_6": (2016, 21),
        "Reduction_Cell_1": (2688, 11),
        "Cell_12": (4032, 11),
        "Cell_17": (4032, 11),
    },
}
CELLS = {"nasnet_cifar": 18, "nasnet_mobile": 12, "nasnet_large": 18}


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
    facts = nets.info(name)
    net = on_meta(name).eval()
    with torch.no_grad():
        logits, points = net(torch.zeros(2, 3, facts.image_size, facts.image_size, device="meta"))
    assert logits.shape == (2, facts.classes)
    assert points["Logits"] is logits
    for point, (channels, size) in MAPS[name].items():
        assert points[point].shape == (2, channels, size, size), point
    assert points["global_pool"].shape == (2, MAPS[name][f"Cell_{CELLS[name] - 1}"][0])
    assert points["Predictions"].shape == logits.shape
    cells = {f"Cell_{number}" for number in range(CELLS[name])} | {"Reduction_Cell_0", "Reduction_Cell_1"}
    assert set(points) == cells | {"Stem", "global_pool", "Logits", "Predictions"}


def test_names_are_those_of_slim_cifar():
    net = on_meta("nasnet_cifar")
    assert net.scope == "nasnet_cifar"
    assert names_of(net) > {
        "l1_stem_3x3/weights",
        "l1_stem_bn/moving_variance",
        "cell_0/1x1/weights",
        "cell_0/beginning_bn/gamma",
        "cell_0/cell_output/reduction_1/path_conv/weights",
        "cell_0/cell_output/reduction_1/path_bn/beta",
        "cell_0/comb_iter_0/left/separable_5x5_1/depthwise_weights",
        "cell_1/comb_iter_4/left/bn_sep_3x3_2/moving_mean",
        "cell_1/prev_1x1/weights",
        "cell_6/path2_conv/weights",
        "reduction_cell_0/comb_iter_0/right/separable_7x7_2/pointwise_weights",
        "aux_11/aux_logits/proj/weights",
        "aux_11/aux_logits/Conv/weights",
        "aux_11/aux_logits/aux_bn1/gamma",
        "aux_11/aux_logits/FC/biases",
        "final_layer/FC/weights",
    }
    assert len(names_of(net)) == 1436 + 1  # slim's, and the steps


def test_names_are_those_of_slim_imagenet():
    mobile, large = names_of(on_meta("nasnet_mobile")), names_of(on_meta("nasnet_large"))
    for names in (mobile, large):
        assert names > {
            "conv0/weights",
            "conv0_bn/beta",
            "cell_stem_0/1x1/weights",
            "cell_stem_1/path1_conv/weights",
            "cell_stem_1/final_path_bn/gamma",
            "reduction_cell_1/prev_bn/moving_mean",
        }
        assert not any("biases" in name for name in names if "FC" not in name)
    for names, behind in ((mobile, 4), (large, 6)):  # the cell behind a smaller map takes the larger one as well
        assert f"cell_{behind}/path1_conv/weights" in names
        assert f"cell_{behind + 1}/prev_1x1/weights" in names


def test_the_cell_behind_a_reduction_looks_further_back_in_the_large_network():
    backs = {name: [place.back for place in places(VARIANTS[name])] for name in VARIANTS}
    assert backs["nasnet_large"] == [2] * 2 + [2] * 6 + [2, 3] + [2] * 5 + [2, 3] + [2] * 5
    assert set(backs["nasnet_cifar"] + backs["nasnet_mobile"]) == {2}


def test_a_training_step_of_the_network_for_cifar():
    torch.manual_seed(0)
    net = nets.build("nasnet_cifar", height=16, width=16)
    x = torch.randn(4, 3, 16, 16)
    logits, points = net(x)
    target = torch.tensor([1, 2, 3, 4])
    (functional.cross_entropy(logits, target) + 0.4 * functional.cross_entropy(points["AuxLogits"], target)).backward()
    assert [name for name, value in net.named_parameters() if value.grad is None or not value.grad.any()] == []
    assert net.drop_path_steps.item() == 1
    net.eval()
    with torch.no_grad():
        later, points = net(x)
    assert "AuxLogits" not in points
    assert not torch.allclose(later, logits)
    assert torch.allclose(points["Predictions"].sum(1), torch.ones(4))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("nasnet_mobile", 97), ("nasnet_large", 96)])
def test_a_training_step_for_imagenet(name: str, size: int):
    torch.manual_seed(0)
    net = nets.build(name, 7, height=size, width=size)
    logits, points = net(torch.randn(2, 3, size, size))
    (logits.square().sum() + points["AuxLogits"].square().sum()).backward()
    assert [path for path, value in net.named_parameters() if value.grad is None] == []


@pytest.mark.parametrize(("name", "decay", "epsilon"), [("nasnet_cifar", 0.9, 1e-5), ("nasnet_mobile", 0.9997, 1e-3)])
def test_normalisation(name: str, decay: float, epsilon: float):
    norms = [module for module in on_meta(name, renorm=True).modules() if isinstance(module, BatchNorm)]
    assert {(round(1 - norm.momentum, 6), norm.epsilon, norm.renorm) for norm in norms} == {(decay, epsilon, True)}
    assert all(norm.gamma is not None for norm in norms)


def test_defaults_are_those_of_slim_and_can_be_changed():
    settings = on_meta("nasnet_large").settings
    assert (settings.drop_path_keep_prob, settings.dense_dropout_keep_prob) == (0.7, 0.5)
    assert settings.total_training_steps == 250_000
    assert on_meta("nasnet_cifar").settings.total_training_steps == 937_500
    assert on_meta("nasnet_mobile").settings.drop_path_keep_prob == 1
    changed = on_meta("nasnet_mobile", drop_path_keep_prob=0.8, total_training_steps=9, dense_dropout_keep_prob=1.0)
    assert changed.settings[4:7] == (0.8, 1.0, 9)
    assert not any("aux" in name for name in names_of(on_meta("nasnet_mobile", use_aux_head=False)))


def test_an_unknown_option():
    with pytest.raises(ConfigError, match="no option .dropout"):
        on_meta("nasnet_mobile", dropout=0.5)
