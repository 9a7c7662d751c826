"""What the Inception networks share: parts built from tables, the way through them, and both heads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ConfigError
from plait.nets.blocks import (
    Conv,
    Dense,
    Init,
    Net,
    Norm,
    Padding,
    Recipe,
    average_pool,
    dropout,
    glorot,
    he_normal,
    max_pool,
    spatial_mean,
)
from plait.nets.family import Shape

__all__ = [
    "STEM",
    "AuxHead",
    "Heads",
    "Inception",
    "Layer",
    "Mixed",
    "MixedPart",
    "Part",
    "Steps",
    "Style",
    "make_style",
    "mixed",
    "smaller",
    "with_aux",
]

VALID_WINDOWS = ((3, 2), (3, 1), (3, 2), (3, 1), (3, 2), (3, 2))
"""Kernel and stride of what makes a map smaller before the auxiliary head of versions 3, 4 and ResNet v2."""
AUX_WINDOW = (5, 3)
LEAST, LEAST_WITH_AUX = 75, 107
"""Sides of the smallest pictures that leave these networks one point at the end."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """What all parts of one network are built with."""

    recipe: Recipe
    depth_multiplier: float = 1.0
    min_depth: int = 16

    def depth(self, channels: int) -> int:
        return max(int(channels * self.depth_multiplier), self.min_depth)


def make_style(renorm: bool, *, init: Init = he_normal, depth_multiplier: float = 1.0, min_depth: int = 16) -> Style:
    """All versions normalise alike, without a `gamma`."""
    if depth_multiplier <= 0:
        raise ConfigError(f"depth_multiplier={depth_multiplier}: write a number above 0, such as 0.5")
    if min_depth < 1:
        raise ConfigError(f"min_depth={min_depth}: write how many channels a layer has at least, such as 16")
    norm = Norm(decay=0.9997, epsilon=1e-3, scale=False, renorm=renorm)
    return Style(recipe=Recipe(norm=norm, init=init), depth_multiplier=depth_multiplier, min_depth=min_depth)


# Rows of tables -------------------------------------------------------------------------------------------------------


class Part(Protocol):
    """One row of a network's table."""

    @property
    def name(self) -> str:
        """Under which its variables are kept."""

    @property
    def point(self) -> str | None:
        """The end point that its output is, if any."""

    def build(self, inputs: int, style: Style) -> tuple[nn.Module, int]:
        """The module, and how many channels it gives."""


@dataclass(frozen=True)
class Layer:
    """A convolution or a pooling under TF-Slim's name, which tells what it does and its kernel: `Conv2d_0b_1x7`."""

    name: str
    outputs: int = 0
    """Channels; a pooling keeps those it is given."""
    stride: int = 1
    padding: Padding = "SAME"
    kernel: tuple[int, int] | None = None
    """For the layers that are not what their name says."""
    init: Init | None = None

    @property
    def point(self) -> str:
        return self.name

    def build(self, inputs: int, style: Style) -> tuple[nn.Module, int]:
        height, width = self.kernel or map(int, self.name.rpartition("_")[2].split("x"))
        if "Pool" in self.name:
            return Pool(self.name.startswith("Max"), height, self.stride, self.padding), inputs
        outputs, kernel, init = style.depth(self.outputs), (height, width), self.init or style.recipe.init
        conv = Conv(inputs, outputs, kernel, style.recipe, stride=self.stride, padding=self.padding, init=init)
        return conv, outputs


smaller = partial(Layer, stride=2, padding="VALID")

Steps = Sequence["Layer | tuple[Layer, ...]"]
"""Layers one after another; those in a tuple side by side."""


@dataclass(frozen=True)
class MixedPart:
    """Branches with their outputs put together."""

    name: str
    branches: tuple[Steps, ...]

    @property
    def point(self) -> str:
        return self.name

    def build(self, inputs: int, style: Style) -> tuple[nn.Module, int]:
        module = Mixed(self.branches, inputs, style)
        return module, module.outputs


def mixed(name: str, *branches: Steps) -> MixedPart:
    return MixedPart(name, branches)


STEM: tuple[Layer, ...] = (
    smaller("Conv2d_1a_3x3", 32),
    Layer("Conv2d_2a_3x3", 32, padding="VALID"),
    Layer("Conv2d_2b_3x3", 64),
    smaller("MaxPool_3a_3x3"),
    Layer("Conv2d_3b_1x1", 80),
    Layer("Conv2d_4a_3x3", 192, padding="VALID"),
    smaller("MaxPool_5a_3x3"),
)
"""How version 3 and ResNet v2 begin."""


# Modules --------------------------------------------------------------------------------------------------------------


class Pool(nn.Module):
    def __init__(self, largest: bool, kernel: int, stride: int, padding: Padding) -> None:
        super().__init__()
        self.pool = partial(max_pool if largest else average_pool, kernel=kernel, stride=stride, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x)


class Chain(nn.Module):
    """A branch."""

    def __init__(self, steps: Steps, inputs: int, style: Style) -> None:
        super().__init__()
        self.outputs = inputs
        self.steps: list[tuple[str, ...]] = []
        for step in steps:
            layers = step if isinstance(step, tuple) else (step,)
            built = [layer.build(self.outputs, style) for layer in layers]
            for layer, (module, _) in zip(layers, built, strict=True):
                self.add_module(layer.name, module)
            self.steps.append(tuple(layer.name for layer in layers))
            self.outputs = sum(outputs for _, outputs in built)

    def forward(self, x: Tensor) -> Tensor:
        for names in self.steps:
            found = [getattr(self, name)(x) for name in names]
            x = found[0] if len(found) == 1 else torch.cat(found, 1)
        return x


class Mixed(nn.Module):
    """Branches `Branch_0`, `Branch_1`, ... over the same input, their channels in this order."""

    def __init__(self, branches: Sequence[Steps], inputs: int, style: Style) -> None:
        super().__init__()
        chains = [Chain(steps, inputs, style) for steps in branches]
        for number, chain in enumerate(chains):
            self.add_module(f"Branch_{number}", chain)
        self.count = len(chains)
        self.outputs = sum(chain.outputs for chain in chains)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([getattr(self, f"Branch_{number}")(x) for number in range(self.count)], 1)


# Heads ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AuxHead:
    """The names in an auxiliary head."""

    source: str
    """The end point that it looks at."""
    wide: str
    """The convolution over the whole map; `{}x{}` becomes its size."""
    logits: str
    wide_init: Init | None = None
    logits_init: Init = he_normal
    """Of a convolution."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What comes after the last map: names, and what they stand for."""

    logits: str
    dense: bool = False
    """Logits from a fully connected layer, not from a convolution of 1x1."""
    pooled: str
    dropped: str | None
    """End points for the map's mean, and for what dropout leaves of it."""
    aux: AuxHead | None = None


def with_aux(heads: Heads, wanted: bool, name: str, shape: Shape) -> Heads:
    """`heads` with or without the auxiliary one, once the pictures are large enough for it."""
    least = LEAST_WITH_AUX if wanted else LEAST
    if min(shape.height, shape.width) < least:
        smaller_too = f"; with create_aux_logits=False {LEAST}x{LEAST} are enough" if wanted else ""
        raise ConfigError(
            f"pictures of {shape.height}x{shape.width} are too small for {name}:"
            f" write at least {least}x{least}{smaller_too}"
        )
    return heads if wanted else replace(heads, aux=None)


def _classifier(inputs: int, classes: int, recipe: Recipe, dense: bool, init: Init = he_normal) -> nn.Module:
    if dense:
        return Dense(inputs, classes, recipe, activation=None, init=glorot)
    return Conv(inputs, classes, 1, recipe, norm=None, activation=None, init=init)


class Aux(nn.Module):
    """Logits from the middle of the network, for a second loss; its last convolution takes a map of one size only."""

    def __init__(self, head: AuxHead, inputs: int, dense: bool, shape: Shape, style: Style) -> None:
        super().__init__()
        recipe, self.size = style.recipe, (_aux_side(shape.height), _aux_side(shape.width))
        narrow, wide = style.depth(128), style.depth(768)
        self.Conv2d_1b_1x1 = Conv(inputs, narrow, 1, recipe)
        init = head.wide_init or recipe.init
        self.wide, self.last, self.dense = head.wide.format(*self.size), head.logits, dense
        self.add_module(self.wide, Conv(narrow, wide, self.size, recipe, padding="VALID", init=init))
        self.add_module(self.last, _classifier(wide, shape.classes, recipe, dense, head.logits_init))

    def forward(self, x: Tensor) -> Tensor:
        x = self.Conv2d_1b_1x1(average_pool(x, *AUX_WINDOW))
        if x.shape[2:] != self.size:
            raise ConfigError(
                "the auxiliary head was built for a map of {}x{} and got {}x{}:".format(*self.size, *x.shape[2:])
                + " build the network with the pictures' height and width, or with create_aux_logits=False"
            )
        x = getattr(self, self.wide)(x)
        logits: Tensor = getattr(self, self.last)(x.flatten(1) if self.dense else x)
        return logits.flatten(1)


def _aux_side(size: int) -> int:
    for kernel, stride in (*VALID_WINDOWS, AUX_WINDOW):
        size = (size - kernel) // stride + 1
    return size


class Inception(Net):
    """A way through named parts, the mean of the last map, dropout, logits."""

    def __init__(
        self, scope: str, parts: Sequence[Part], heads: Heads, shape: Shape, style: Style, *, keep: float
    ) -> None:
        super().__init__()
        if not 0 < keep <= 1:
            raise ConfigError(f"dropout_keep_prob={keep}: write how much is kept, above 0 and at most 1")
        self.scope, self.keep, self.dense = scope, keep, heads.dense
        self.pooled, self.dropped = heads.pooled, heads.dropped
        self.way: list[tuple[str, str | None]] = []
        channels, seen = shape.channels, {}
        for part in parts:
            module, channels = part.build(channels, style)
            self.add_module(part.name, module)
            self.way.append((part.name, part.point))
            seen[part.point] = channels
        self.AuxLogits = None
        if heads.aux is not None:
            self.aux_source = heads.aux.source
            self.AuxLogits = Aux(heads.aux, seen[self.aux_source], heads.dense, shape, style)
        logits = _classifier(channels, shape.classes, style.recipe, heads.dense)
        self.Logits = nn.Sequential(OrderedDict({heads.logits: logits}))

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, points = images, self.new_points()
        for name, point in self.way:
            x = getattr(self, name)(x)
            if point is not None:
                points[point] = x
            if self.AuxLogits is not None and point == self.aux_source and points.wants("AuxLogits"):
                points["AuxLogits"] = self.AuxLogits(x)
        points[self.pooled] = x = spatial_mean(x)
        x = dropout(x.flatten(1) if self.dense else x, self.keep, self.training)
        if self.dropped is not None:
            points[self.dropped] = x
        points["Logits"] = logits = self.Logits(x).flatten(1)
        points["Predictions"] = functional.softmax(logits, 1)
        return logits, points
