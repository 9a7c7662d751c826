from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from plait.errors import ConfigError
from plait.nets import nasnet, pnasnet
from plait.nets.blocks import BatchNorm, Norm, Recipe, he_normal
from plait.nets.family import Shape
from plait.nets.nas_cells import Cell, CellNet, CellPlan, Place, Settings, _Map, drop_path, reduction_places

RECIPE = Recipe(norm=Norm(epsilon=1e-30), init=he_normal)
SMALL = Settings(
    cells=3,
    filters=4,
    stem=6,
    norm=Norm(decay=0.9, epsilon=1e-3),
    drop_path_keep_prob=0.5,
    dense_dropout_keep_prob=1.0,
    total_training_steps=10,
    for_cifar=True,
    skip_reduction=False,
)
SUM = CellPlan(steps=((0, "none", 1, "none"),), kept=(2,))


def small_net(settings: Settings = SMALL, *, family=nasnet, size: int = 12, renorm: bool = False, aux: bool = True):
    torch.manual_seed(0)
    shape = Shape(channels=3, height=size, width=size, classes=5)
    return CellNet("small", settings, family.places(settings), shape, renorm=renorm, use_aux_head=aux)


def make_cell(plan: CellPlan, last: _Map, before: _Map | None, *, stride: int = 1, drop: float = 0.0, filters: int = 4):
    torch.manual_seed(0)
    return Cell(Place("cell_0", "Cell_0", plan, 1.0, stride), last, before, filters, drop, RECIPE)


def parameters_of(module: torch.nn.Module) -> set[str]:
    return {name.replace(".", "/") for name, _ in module.named_parameters()}


@pytest.mark.parametrize(("cells", "places"), [(18, (6, 12)), (12, (4, 8)), (9, (3, 6)), (10, (3, 6)), (20, (6, 13))])
def test_maps_get_smaller_after_each_third(cells: int, places: tuple[int, int]):
    assert reduction_places(cells) == places


# Dropped paths --------------------------------------------------------------------------------------------------------


def test_a_dropped_path_is_zero_and_a_kept_one_larger():
    torch.manual_seed(0)
    found = drop_path(torch.ones(4000, 2, 1, 1), torch.tensor(0.75))
    assert torch.equal(found[:, 0], found[:, 1])
    assert found.unique().tolist() == pytest.approx([0, 4 / 3])
    assert found.mean().item() == pytest.approx(1, abs=0.03)


def test_with_probability_1_nothing_is_dropped():
    x = torch.randn(50, 3, 2, 2)
    assert torch.equal(drop_path(x, torch.tensor(1.0)), x)


def test_a_dropped_path_keeps_its_type():
    assert drop_path(torch.ones(2, 1, 1, 1, dtype=torch.bfloat16), torch.tensor(0.5)).dtype == torch.bfloat16


def test_draws_come_from_the_global_generator():
    x, keep = torch.ones(100, 1, 1, 1), torch.tensor(0.5)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = drop_path(x, keep)
    torch.set_rng_state(state)
    assert torch.equal(drop_path(x, keep), first)


def test_a_cell_drops_what_its_place_and_the_training_say():
    plan = CellPlan(steps=((0, "avg_3x3", 0, "none"),), kept=(2,))
    cell = make_cell(plan, _Map(4, 0), None, drop=0.5).eval()
    x = torch.rand(2000, 4, 1, 1)
    state = cell.beginning_bn(getattr(cell, "1x1")(x))
    assert torch.equal(cell(x, x), 2 * state)
    assert torch.equal(cell(x, x, torch.tensor(0.0)), 2 * state)
    for progress, keep in ((0.5, 0.75), (1.0, 0.5)):
        factors = (cell(x, x, torch.tensor(progress)) / state)[:, 0, 0, 0]
        dropped = torch.isclose(factors, torch.ones(()))
        assert torch.allclose(factors[~dropped], torch.tensor(1 + 1 / keep))  # "none" is never dropped
        assert dropped.float().mean().item() == pytest.approx(1 - keep, abs=0.04)


def test_later_cells_drop_more():
    net = small_net()
    drops = [getattr(net, place.scope).drop for place in net.places]
    assert drops == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_steps_in_training_are_counted_and_saved():
    net = small_net()
    net(torch.zeros(2, 3, 12, 12))
    net(torch.zeros(2, 3, 12, 12))
    net.eval()
    net(torch.zeros(2, 3, 12, 12))
    assert net.state_dict()["drop_path_steps"].item() == 2


def test_paths_are_dropped_more_often_until_the_training_ends():
    net = small_net()
    found = []
    for step in (0, 5, 10, 25):
        net.drop_path_steps.fill_(step)
        found.append(net._progress().item())
    assert found == [0, 0.5, 1, 1]


def test_the_first_step_drops_nothing_and_a_late_one_does():
    net = small_net()
    for module in net.modules():
        module.training = not isinstance(module, BatchNorm)  # as in evaluation, so that only paths differ
    x = torch.randn(2, 3, 12, 12)
    whole = net(x)[0]
    net.drop_path_steps.fill_(10)
    dropped = net(x)[0]
    net.eval()
    assert torch.equal(net(x)[0], whole)
    assert not torch.allclose(dropped, whole)


def test_without_dropped_paths_no_numbers_are_drawn():
    net = small_net(SMALL.but(drop_path_keep_prob=1.0))
    net.drop_path_steps.fill_(10)
    before = torch.get_rng_state()
    net(torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), before)


# Cells ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "stride"), [(nasnet.NORMAL, 1), (nasnet.REDUCTION, 2), (pnasnet.CELL, 1), (pnasnet.CELL, 2)]
)
@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("before", [None, _Map(3, 0), _Map(4, 0)], ids=["first", "channels", "same"])
def test_cells_give_what_they_say(plan: CellPlan, stride: int, size: int, before: _Map | None):
    cell = make_cell(plan, _Map(6, 0), before, stride=stride).eval()
    last = torch.randn(2, 6, size, size)
    out = cell(last, last if before is None else torch.randn(2, before.channels, size, size))
    left = math.ceil(size / stride)
    assert out.shape == (2, 4 * len(plan.kept), left, left)
    assert cell.output == _Map(4 * len(plan.kept), stride - 1)


def test_operations_carry_the_names_of_slim():
    names = parameters_of(make_cell(nasnet.REDUCTION, _Map(6, 0), None, stride=2))
    assert {name for name in names if not name.startswith("comb_iter")} == {
        "1x1/weights",
        "beginning_bn/beta",
        "beginning_bn/gamma",
    }
    assert {name for name in names if name.startswith("comb_iter_1/")} == {
        *(f"comb_iter_1/right/separable_7x7_{n}/{kind}_weights" for n in (1, 2) for kind in ("depthwise", "pointwise")),
        *(f"comb_iter_1/right/bn_sep_7x7_{n}/{leaf}" for n in (1, 2) for leaf in ("beta", "gamma")),
    }


def test_the_first_cell_brings_its_other_state_to_its_own_channels():
    names = parameters_of(make_cell(nasnet.NORMAL, _Map(6, 0), None))
    for scope, bn in (("comb_iter_2/right", "bn_1"), ("comb_iter_3/left", "bn_1"), ("comb_iter_3/right", "bn_1")):
        assert {name for name in names if name.startswith(scope)} == {
            f"{scope}/1x1/weights",
            f"{scope}/{bn}/beta",
            f"{scope}/{bn}/gamma",
        }
    assert {name for name in names if name.startswith("cell_output")} == {
        f"cell_output/reduction_1/{leaf}" for leaf in ("path_conv/weights", "path_bn/beta", "path_bn/gamma")
    }


@pytest.mark.parametrize(
    ("before", "scopes"),
    [
        (_Map(4, 1), set()),
        (_Map(6, 1), {"prev_1x1", "prev_bn"}),
        (_Map(4, 0), {"path1_conv", "path2_conv", "final_path_bn"}),
    ],
    ids=["same", "channels", "size"],
)
def test_the_output_before_the_last_is_matched(before: _Map, scopes: set[str]):
    cell = make_cell(SUM, _Map(4, 1), before)
    found = {name.partition("/")[0] for name in parameters_of(cell)} - {"1x1", "beginning_bn"}
    assert found == scopes


@pytest.mark.parametrize("size", [4, 5])
def test_a_larger_map_is_halved_without_losing_points(size: int):
    cell = make_cell(SUM, _Map(2, 1), _Map(1, 0), filters=2).eval()
    for conv in (cell.path1_conv, cell.path2_conv):
        torch.nn.init.ones_(conv.weights)
    x = torch.arange(1.0, size * size + 1).reshape(1, 1, size, size)
    found = cell._matched(x)
    padded = functional.pad(x, (0, 1, 0, 1))
    assert torch.equal(found[:, :1], x[:, :, ::2, ::2])
    assert torch.equal(found[:, 1:], padded[:, :, 1::2, 1::2])


def test_an_odd_channel_goes_to_the_second_path():
    cell = make_cell(SUM, _Map(4, 1), _Map(4, 0), filters=5)
    assert (cell.path1_conv.weights.shape[0], cell.path2_conv.weights.shape[0]) == (2, 3)


def test_only_states_of_the_outside_are_read_with_a_stride():
    cell = make_cell(nasnet.REDUCTION, _Map(4, 0), _Map(4, 0), stride=2)
    assert cell.comb_iter_1.right.separable_7x7_1.stride == 2
    assert cell.comb_iter_1.right.separable_7x7_2.stride == 1
    assert cell.comb_iter_4.left.separable_3x3_1.stride == 1  # on state 2
    assert cell.comb_iter_4.right.pool.pool.keywords["stride"] == 2


def test_padding_does_not_count_in_means():
    plan = CellPlan(steps=((0, "none", 1, "avg_3x3"),), kept=(2,))
    cell = make_cell(plan, _Map(4, 0), _Map(4, 0)).eval()
    ones = torch.ones(1, 4, 5, 5)
    state = cell.beginning_bn(getattr(cell, "1x1")(ones))
    assert torch.allclose(cell(ones, ones), state + 1)


def test_weights_begin_with_the_variance_of_their_outputs():
    net = small_net(SMALL.but(filters=32))
    separable = net.cell_2.comb_iter_0.left.separable_5x5_1
    assert separable.depthwise_weights.std().item() == pytest.approx(math.sqrt(2 / 25), rel=0.05)
    assert separable.pointwise_weights.std().item() == pytest.approx(math.sqrt(2 / 128), rel=0.05)
    assert net.final_layer.FC.weights.std().item() == pytest.approx(math.sqrt(2 / 5), rel=0.05)
    assert not net.final_layer.FC.biases.any()


# The network ----------------------------------------------------------------------------------------------------------


def test_the_auxiliary_head_runs_in_training_only():
    net = small_net(size=16)
    x = torch.zeros(2, 3, 16, 16)
    assert net(x)[1]["AuxLogits"].shape == (2, 5)
    assert "AuxLogits" not in net.eval()(x)[1]
    assert "AuxLogits" not in small_net(size=16, aux=False)(x)[1]
    aux = {name for name in parameters_of(net) if "aux" in name}
    assert aux == {
        f"aux_1/aux_logits/{leaf}"
        for leaf in ("proj/weights", "Conv/weights", "FC/weights", "FC/biases")
        + tuple(f"aux_bn{n}/{leaf}" for n in (0, 1) for leaf in ("beta", "gamma"))
    }


@pytest.mark.parametrize(("size", "kernel"), [(32, 4), (30, 4), (27, 4), (26, 3), (9, 1)])
def test_the_auxiliary_head_covers_its_whole_map(size: int, kernel: int):
    net = small_net(size=size)
    assert net.aux_1.aux_logits.Conv.weights.shape[2:] == (kernel, kernel)
    assert net(torch.zeros(2, 3, size, size))[1]["AuxLogits"].shape == (2, 5)


def test_pictures_too_small_for_the_auxiliary_head():
    with pytest.raises(ConfigError, match=r"map of 5x5, .* 4x4.*use_aux_head=False"):
        small_net(size=8)
    assert small_net(size=8, aux=False)(torch.zeros(2, 3, 8, 8))[0].shape == (2, 5)


@pytest.mark.parametrize(("size", "side"), [(16, 8), (6, 3)])
def test_pictures_of_another_size_in_training(size: int, side: int):
    net = small_net(size=12)
    with pytest.raises(ConfigError, match=f"small was made for a map of 6x6, .* leave one of {side}x{side}"):
        net(torch.zeros(2, 3, size, size))
    assert net.eval()(torch.zeros(2, 3, size, size))[0].shape == (2, 5)


@pytest.mark.parametrize(
    ("option", "value"),
    [("drop_path_keep_prob", 0.0), ("drop_path_keep_prob", 1.5), ("dense_dropout_keep_prob", -1.0)],
)
def test_what_is_no_probability(option: str, value: float):
    with pytest.raises(ConfigError, match=f"small: {option}={value}.*above 0, at most 1"):
        small_net(SMALL.but(**{option: value}))


def test_training_has_at_least_a_step():
    with pytest.raises(ConfigError, match="total_training_steps=0; write at least 1"):
        small_net(SMALL.but(total_training_steps=0))


def test_settings_but_for_what_is_given():
    assert SMALL.but(filters=None, cells=6) == SMALL._replace(cells=6)


@pytest.mark.parametrize("renorm", [False, True])
def test_renormalisation_reaches_every_layer(renorm: bool):
    norms = [module for module in small_net(renorm=renorm).modules() if isinstance(module, BatchNorm)]
    assert len(norms) > 50
    assert all(norm.renorm is renorm and norm.epsilon == 1e-3 for norm in norms)


def test_dropout_is_for_training():
    net = small_net(SMALL.but(dense_dropout_keep_prob=0.5, drop_path_keep_prob=1.0))
    for module in net.modules():
        module.training = not isinstance(module, BatchNorm)
    x = torch.randn(2, 3, 12, 12)
    assert not torch.allclose(net(x)[0], net(x)[0])
    net.eval()
    assert torch.equal(net(x)[0], net(x)[0])


def test_weights_of_every_kind_decay_and_nothing_else_does():
    net = small_net()
    decayed = {id(value) for value in net.decayed_variables()}
    for name, value in net.named_parameters():
        assert (id(value) in decayed) == name.endswith("weights"), name


@pytest.mark.parametrize(
    ("family", "for_cifar", "size"), [(nasnet, True, 24), (nasnet, False, 80), (pnasnet, False, 80)]
)
def test_a_gradient_reaches_every_parameter(family, for_cifar: bool, size: int):
    settings = SMALL.but(filters=8, for_cifar=for_cifar, skip_reduction=True)
    net = small_net(settings, family=family, size=size)
    logits, points = net(torch.randn(2, 3, size, size))
    (functional.cross_entropy(logits, torch.tensor([0, 3])) + points["AuxLogits"].square().sum()).backward()
    without = [name for name, value in net.named_parameters() if value.grad is None or not value.grad.any()]
    assert not without
