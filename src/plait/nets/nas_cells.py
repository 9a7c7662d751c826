"""What NASNet and PNASNet share: cells made by a plan, dropped paths, the auxiliary head, and a network of cells."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ConfigError
from plait.nets.blocks import (
    BatchNorm,
    Conv,
    Dense,
    Net,
    Norm,
    Recipe,
    SeparableConv,
    average_pool,
    dropout,
    he_normal,
    max_pool,
)
from plait.nets.family import Shape

__all__ = ["Cell", "CellNet", "CellPlan", "Place", "Settings", "creator", "drop_path", "reduction_places"]


class CellPlan(NamedTuple):
    """A cell that a search has found.

    States 0 and 1 are the outputs of the last cell and of the one before it. Each step puts the sum of two operations
    on earlier states behind them.
    """

    steps: tuple[tuple[int, str, int, str], ...]
    """(state, operation, state, operation); an operation is `separable_5x5`, `avg_3x3`, `max_3x3` or `none`."""
    kept: tuple[int, ...]
    """The states that are the cell's output, one behind the other."""


class Place(NamedTuple):
    """A cell's place in a network."""

    scope: str
    point: str
    """The end point that it is; empty: none."""
    plan: CellPlan
    scaling: float
    """Its channels, as a multiple of the network's."""
    stride: int = 1
    back: int = 2
    """Which output is its state 1, counted from the last: 2 is the one before the last."""


class Settings(NamedTuple):
    """What makes one network of these families."""

    cells: int
    """Those called `cell_0` and so on."""
    filters: int
    stem: int
    """Channels of the first convolution."""
    norm: Norm
    drop_path_keep_prob: float
    """Of the last cell, at the end of training."""
    dense_dropout_keep_prob: float
    total_training_steps: int
    for_cifar: bool = False
    """The first convolution keeps the size of the map, and no cells belong to the stem."""
    skip_reduction: bool = True
    """The cell behind a reduction gets the same state 1 as the reduction, not its state 0."""

    def but(self, **changes: Any) -> Settings:
        """With everything that is not None."""
        return self._replace(**{name: value for name, value in changes.items() if value is not None})


def reduction_places(cells: int) -> tuple[int, int]:
    """The cells at which the map gets smaller: after each third of them."""
    return cells // 3, 2 * cells // 3


def drop_path(x: Tensor, keep: Tensor) -> Tensor:
    """Zero for some of the examples; what is left is made larger, so that the mean stays."""
    kept = torch.rand(x.shape[0], 1, 1, 1, device=x.device) < keep
    return x * (kept / keep).to(x.dtype)


# Cells ----------------------------------------------------------------------------------------------------------------


def _norm(channels: int, recipe: Recipe) -> BatchNorm:
    assert recipe.norm is not None  # noqa: S101 - `CellNet` made the recipe
    return BatchNorm(channels, recipe.norm)


def _conv(inputs: int, outputs: int, recipe: Recipe, kernel: int | tuple[int, int] = 1, **more: Any) -> Conv:
    """Weights alone: here normalisation has a name of its own beside the convolution, not below it."""
    return Conv(inputs, outputs, kernel, recipe, norm=None, activation=None, bias=False, **more)


class _Pool(nn.Module):
    def __init__(self, kind: str, kernel: int, stride: int) -> None:
        super().__init__()
        self.pool = partial(average_pool if kind == "avg" else max_pool, kernel=kernel, stride=stride, padding="SAME")

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x)


def _operation(name: str, inputs: int, outputs: int, stride: int, recipe: Recipe) -> nn.Sequential:
    """`separable` is there twice, with the stride in the first; others get a 1x1 only where shapes ask for one."""
    kind, _, size = name.partition("_")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if kind == "separable":
        for number in (1, 2):
            # slim counts one output for each depthwise filter, which is what `he_normal` takes for its inputs
            conv = SeparableConv(
                inputs,
                outputs,
                int(size[0]),
                recipe,
                stride=stride,
                norm=None,
                activation=None,
                bias=False,  # the normalisation beside it has them
                depthwise_init=he_normal,
            )
            layers[f"relu_{number}"] = nn.ReLU()
            layers[f"separable_{size}_{number}"] = conv
            layers[f"bn_sep_{size}_{number}"] = _norm(outputs, recipe)
            inputs, stride = outputs, 1
        return nn.Sequential(layers)
    if kind != "none":
        layers["pool"] = _Pool(kind, int(size[0]), stride)
    if inputs != outputs or (kind == "none" and stride > 1):
        if kind == "none":
            layers["relu"] = nn.ReLU()
        layers["1x1"] = _conv(inputs, outputs, recipe, stride=stride if kind == "none" else 1)
        layers["bn_1"] = _norm(outputs, recipe)
    return nn.Sequential(layers)


class _Map(NamedTuple):
    """What is known of an output before there is one."""

    channels: int
    halvings: int


class Cell(nn.Module):
    """One cell; `output` says what comes out of it.

    `drop` is how likely a path is dropped at the end of training; `before` is None for the first cell, whose states
    0 and 1 come from the same map.
    """

    def __init__(
        self, place: Place, last: _Map, before: _Map | None, filters: int, drop: float, recipe: Recipe
    ) -> None:
        super().__init__()
        plan, stride = place.plan, place.stride
        self.plan, self.drop = plan, drop
        self.matching = self._match(last, before, filters, recipe)
        self.add_module("1x1", _conv(last.channels, filters, recipe))
        self.beginning_bn = _norm(filters, recipe)
        second = last.channels if before is None else filters
        for number, (left, left_name, right, right_name) in enumerate(plan.steps):
            pair = nn.Module()
            for side, state, name in (("left", left, left_name), ("right", right, right_name)):
                inputs = second if state == 1 else filters
                pair.add_module(side, _operation(name, inputs, filters, stride if state < 2 else 1, recipe))
            self.add_module(f"comb_iter_{number}", pair)
        self.cell_output = nn.Module()
        if 1 in plan.kept and second != filters:
            reduction = nn.Sequential(
                OrderedDict(path_conv=_conv(second, filters, recipe), path_bn=_norm(filters, recipe))
            )
            self.cell_output.add_module("reduction_1", reduction)
        self.output = _Map(len(plan.kept) * filters, last.halvings + (stride == 2))

    def _match(self, last: _Map, before: _Map | None, filters: int, recipe: Recipe) -> str:
        """How state 1 gets the shape of state 0; the layers for it are the cell's own."""
        if before is None:
            return "same"
        if before.halvings != last.halvings:
            self.path1_conv = _conv(before.channels, filters // 2, recipe)
            self.path2_conv = _conv(before.channels, filters - filters // 2, recipe)
            self.final_path_bn = _norm(filters, recipe)
            return "halved"
        if before.channels != filters:
            self.prev_1x1 = _conv(before.channels, filters, recipe)
            self.prev_bn = _norm(filters, recipe)
            return "projected"
        return "same"

    def _matched(self, x: Tensor) -> Tensor:
        if self.matching == "same":
            return x
        x = functional.relu(x)
        if self.matching == "projected":
            projected: Tensor = self.prev_bn(self.prev_1x1(x))
            return projected
        # every second point, and those in between: the last of these may lie outside, where zeros are
        between = functional.pad(x, (0, 1, 0, 1))[:, :, 1::2, 1::2]
        paths = [self.path1_conv(x[:, :, ::2, ::2]), self.path2_conv(between)]
        halved: Tensor = self.final_path_bn(torch.cat(paths, 1))
        return halved

    def forward(self, last: Tensor, before: Tensor, progress: Tensor | None = None) -> Tensor:
        """`progress` is the part of the training that is done; None drops no paths."""
        states = [self.beginning_bn(getattr(self, "1x1")(functional.relu(last))), self._matched(before)]
        keep = None if progress is None else 1 - progress * self.drop
        for number, (left, left_name, right, right_name) in enumerate(self.plan.steps):
            pair = getattr(self, f"comb_iter_{number}")
            one, other = pair.left(states[left]), pair.right(states[right])
            if keep is not None:
                one = one if left_name == "none" else drop_path(one, keep)
                other = other if right_name == "none" else drop_path(other, keep)
            states.append(one + other)
        for name, layer in self.cell_output.named_children():
            state = int(name.rpartition("_")[2])
            states[state] = layer(states[state])
        return torch.cat([states[state] for state in self.plan.kept], 1)


# The network ----------------------------------------------------------------------------------------------------------


class AuxHead(nn.Module):
    """Logits from the middle of the network, whose loss helps training; its second convolution covers the whole map."""

    def __init__(self, name: str, inputs: int, size: tuple[int, int], classes: int, recipe: Recipe) -> None:
        super().__init__()
        if min(size) < 5:
            raise ConfigError(
                f"the auxiliary head needs a map of 5x5, these pictures leave one of {size[0]}x{size[1]}: give larger"
                " height and width, or use_aux_head=False"
            )
        self.net, self.size = name, size
        self.proj = _conv(inputs, 128, recipe)
        self.aux_bn0 = _norm(128, recipe)
        self.Conv = _conv(128, 768, recipe, _pooled(*size), padding="VALID")
        self.aux_bn1 = _norm(768, recipe)
        self.FC = Dense(768, classes, recipe, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        if _pooled(height, width) != self.Conv.kernel:
            raise ConfigError(
                f"the auxiliary head of {self.net} was made for a map of {self.size[0]}x{self.size[1]}, these pictures"
                f" leave one of {height}x{width}: build the network with their height and width, or use_aux_head=False"
            )
        x = average_pool(functional.relu(x), 5, 3)
        x = functional.relu(self.aux_bn0(self.proj(x)))
        x = functional.relu(self.aux_bn1(self.Conv(x)))
        logits: Tensor = self.FC(x.flatten(1))
        return logits


def _pooled(height: int, width: int) -> tuple[int, int]:
    """What windows of 5 with a stride of 3 leave of a map."""
    return (height - 2) // 3, (width - 2) // 3


class CellNet(Net):
    """A first convolution, cells, and one layer of logits.

    End points `Stem`, `Cell_0` and so on, `Reduction_Cell_0`, `global_pool`, `Logits`, `Predictions`; in training also
    `AuxLogits`.
    """

    decayed = ("weights", "depthwise_weights", "pointwise_weights")
    drop_path_steps: Tensor
    """How often the network has run in training: paths are dropped the more, the longer it is trained."""

    def __init__(
        self, name: str, settings: Settings, places: list[Place], shape: Shape, *, renorm: bool, use_aux_head: bool
    ) -> None:
        super().__init__()
        _check(name, settings)
        self.scope, self.settings, self.places = name, settings, places
        recipe = Recipe(norm=replace(settings.norm, renorm=renorm), init=partial(he_normal, mode="out"))
        self.register_buffer("drop_path_steps", torch.zeros((), dtype=torch.int64))
        self.first = "l1_stem_3x3" if settings.for_cifar else "conv0"
        self.first_norm = "l1_stem_bn" if settings.for_cifar else "conv0_bn"
        kind: dict[str, Any] = {} if settings.for_cifar else {"stride": 2, "padding": "VALID"}
        self.add_module(self.first, _conv(shape.channels, settings.stem, recipe, 3, **kind))
        self.add_module(self.first_norm, _norm(settings.stem, recipe))
        maps = self._add_cells(recipe)
        self.aux_cell = f"cell_{reduction_places(settings.cells)[1] - 1}"
        self.aux = f"aux_{self.aux_cell.removeprefix('cell_')}" if use_aux_head else ""
        if use_aux_head:
            at = maps[self.aux_cell]
            size = _side(shape.height, settings, at), _side(shape.width, settings, at)
            head = AuxHead(name, at.channels, size, shape.classes, recipe)
            self.add_module(self.aux, nn.Sequential(OrderedDict(aux_logits=head)))
        fc = Dense(maps[places[-1].scope].channels, shape.classes, recipe, activation=None)
        self.final_layer = nn.Sequential(OrderedDict(FC=fc))

    def _add_cells(self, recipe: Recipe) -> dict[str, _Map]:
        last = _Map(self.settings.stem, 0)
        maps: list[_Map | None] = [None, last]
        found: dict[str, _Map] = {}
        for number, place in enumerate(self.places, 1):
            drop = number / len(self.places) * (1 - self.settings.drop_path_keep_prob)
            filters = int(self.settings.filters * place.scaling)
            cell = Cell(place, last, maps[-place.back], filters, drop, recipe)
            self.add_module(place.scope, cell)
            found[place.scope] = last = cell.output
            maps.append(last)
        return found

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.new_points()
        x: Tensor = getattr(self, self.first_norm)(getattr(self, self.first)(images))
        if self.settings.for_cifar:
            points["Stem"] = x
        outputs = [x, x]
        progress = self._progress()
        for place in self.places:
            x = getattr(self, place.scope)(x, outputs[-place.back], progress)
            outputs.append(x)
            if place.point:
                points[place.point] = x
            if self.training and self.aux and place.scope == self.aux_cell:
                points["AuxLogits"] = getattr(self, self.aux)(x)
        points["global_pool"] = x = functional.relu(x).mean((2, 3))
        x = dropout(x, self.settings.dense_dropout_keep_prob, self.training)
        points["Logits"] = logits = self.final_layer(x)
        points["Predictions"] = functional.softmax(logits, 1)
        return logits, points

    def _progress(self) -> Tensor | None:
        """The part of the training that lies behind; counts this step. None where no path is dropped."""
        if not self.training:
            return None
        with torch.no_grad():
            progress = (self.drop_path_steps / self.settings.total_training_steps).clamp(max=1)
            self.drop_path_steps += 1
        return progress if self.settings.drop_path_keep_prob < 1 else None


def _side(pixels: int, settings: Settings, at: _Map) -> int:
    """Of a side of the map: the first convolution has no padding, what follows rounds up."""
    size = pixels if settings.for_cifar else (pixels - 1) // 2
    for _ in range(at.halvings):
        size = (size + 1) // 2
    return size


def _check(name: str, settings: Settings) -> None:
    for option in ("drop_path_keep_prob", "dense_dropout_keep_prob"):
        value = getattr(settings, option)
        if not 0 < value <= 1:
            raise ConfigError(f"{name}: {option}={value!r} is no probability to keep; write one above 0, at most 1")
    if settings.total_training_steps < 1:
        raise ConfigError(f"{name}: total_training_steps={settings.total_training_steps!r}; write at least 1")


def creator(variants: Mapping[str, Settings], places: Callable[[Settings], list[Place]]) -> Callable[..., Net]:
    """The `create` of a family with these networks."""

    def create(
        name: str,
        shape: Shape,
        *,
        renorm: bool = False,
        drop_path_keep_prob: float | None = None,
        dense_dropout_keep_prob: float | None = None,
        total_training_steps: int | None = None,
        use_aux_head: bool = True,
    ) -> Net:
        """What is None is as in TF-Slim; `total_training_steps` is when paths are dropped as often as they ever are."""
        settings = variants[name].but(
            drop_path_keep_prob=drop_path_keep_prob,
            dense_dropout_keep_prob=dense_dropout_keep_prob,
            total_training_steps=total_training_steps,
        )
        return CellNet(name, settings, places(settings), shape, renorm=renorm, use_aux_head=use_aux_head)

    return create
