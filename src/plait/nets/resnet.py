"""Residual networks: v1 and v2 with bottlenecks, 18 layers, ResNeXt, and those for CIFAR."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ConfigError
from plait.nets.blocks import (
    BatchNorm,
    Conv,
    Net,
    Norm,
    Recipe,
    constant,
    he_normal,
    max_pool,
    spatial_mean,
)
from plait.nets.family import Shape

__all__ = ["create"]

NORM = Norm(decay=0.997, epsilon=1e-5)


class Variant(NamedTuple):
    """One network of this file."""

    units: tuple[int, ...]
    unit: str = "bottleneck_v1"
    stride_first: bool = False
    """Blocks make the map smaller in their first unit, as most do, not in their last, as TF-Slim does."""
    zero_last: bool = False
    """A unit's last normalisation begins at 0, so that the unit begins as the identity (Goyal et al. 2017)."""
    branches: int = 1
    """Of ResNeXt: how many, each with a width of 4 in the first block."""
    grouped: bool = True
    """Branches as one convolution with groups, or each by itself."""


VARIANTS = {
    "resnet_v1_18": Variant((2, 2, 2, 2), "basic_v1", stride_first=True),
    "resnet_v1_50": Variant((3, 4, 6, 3)),
    "resnet_v1_50_8k": Variant((3, 4, 6, 3), stride_first=True, zero_last=True),
    "resnet_v1_101": Variant((3, 4, 23, 3)),
    "resnet_v1_152": Variant((3, 8, 36, 3)),
    "resnet_v1_200": Variant((3, 24, 36, 3)),
    "resnet_v2_50": Variant((3, 4, 6, 3), "bottleneck_v2"),
    "resnet_v2_101": Variant((3, 4, 23, 3), "bottleneck_v2"),
    "resnet_v2_152": Variant((3, 8, 36, 3), "bottleneck_v2"),
    "resnet_v2_200": Variant((3, 24, 36, 3), "bottleneck_v2"),
    "resnext_b_50": Variant((3, 4, 6, 3), stride_first=True, branches=32, grouped=False),
    "resnext_b_101": Variant((3, 4, 23, 3), stride_first=True, branches=32, grouped=False),
    "resnext_c_50": Variant((3, 4, 6, 3), stride_first=True, branches=32),
    "resnext_c_101": Variant((3, 4, 23, 3), stride_first=True, branches=32),
}
CIFAR_UNITS = {"resnet_v1_20": 3, "resnet_v1_110": 18}


class Shortcut(nn.Module):
    """What a unit's input is added as, when its shape does not change: itself, or every second point of it."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return x if self.stride == 1 else x[:, :, :: self.stride, :: self.stride]


def _shortcut(inputs: int, outputs: int, stride: int, recipe: Recipe) -> Shortcut | Conv:
    return Shortcut(stride) if inputs == outputs else Conv(inputs, outputs, 1, recipe, stride=stride, padding=0)


Note = Callable[[str, Tensor], Tensor]
"""Takes the end point of a layer, and gives it back."""


def _note(points: dict[str, Tensor], unit: str, layer: str, value: Tensor) -> Tensor:
    points[f"{unit}/{layer}"] = value
    return value


def _unnoted(layer: str, value: Tensor) -> Tensor:
    del layer
    return value


def _noted_shortcut(shortcut: nn.Module, x: Tensor, note: Note) -> Tensor:
    kept: Tensor = shortcut(x)
    return kept if isinstance(shortcut, Shortcut) else note("shortcut", kept)


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, then the sum (version 1)."""

    def __init__(self, inputs: int, outputs: int, stride: int, recipe: Recipe, variant: Variant) -> None:
        super().__init__()
        width = outputs // 4 if variant.branches == 1 else outputs // 2
        plain = recipe.but(activation=None)
        self.shortcut = _shortcut(inputs, outputs, stride, plain)
        if variant.branches > 1 and not variant.grouped:
            self.branches = nn.ModuleList(
                Branch(inputs, width // variant.branches, stride, recipe) for _ in range(variant.branches)
            )
        else:
            self.conv1 = Conv(inputs, width, 1, recipe)
            self.conv2 = Conv(width, width, 3, recipe, stride=stride, padding=1, groups=variant.branches)
        self.conv3 = Conv(width, outputs, 1, plain)
        if variant.zero_last and self.conv3.BatchNorm is not None and self.conv3.BatchNorm.gamma is not None:
            constant(0)(self.conv3.BatchNorm.gamma)

    def forward(self, x: Tensor, note: Note = _unnoted) -> Tensor:
        kept = _noted_shortcut(self.shortcut, x, note)
        if hasattr(self, "branches"):
            inner = torch.cat([branch(x) for branch in self.branches], 1)
        else:
            inner = note("conv2", self.conv2(note("conv1", self.conv1(x))))
        return functional.relu(kept + note("conv3", self.conv3(inner)))


class Branch(nn.Module):
    """One of ResNeXt's branches, as in the paper's figure 3 (b)."""

    def __init__(self, inputs: int, width: int, stride: int, recipe: Recipe) -> None:
        super().__init__()
        self.conv1 = Conv(inputs, width, 1, recipe)
        self.conv2 = Conv(width, width, 3, recipe, stride=stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv2(self.conv1(x))
        return out


class PreActivation(nn.Module):
    """The bottleneck of version 2: normalised first, the sum left as it is."""

    def __init__(self, inputs: int, outputs: int, stride: int, recipe: Recipe, variant: Variant) -> None:
        super().__init__()
        del variant
        assert recipe.norm is not None  # noqa: S101 - this file's own recipe
        width = outputs // 4
        plain = recipe.but(norm=None, activation=None)
        self.preact = BatchNorm(inputs, recipe.norm)
        self.shortcut = _shortcut(inputs, outputs, stride, plain)
        self.conv1 = Conv(inputs, width, 1, recipe)
        self.conv2 = Conv(width, width, 3, recipe, stride=stride, padding=1)
        self.conv3 = Conv(width, outputs, 1, plain)

    def forward(self, x: Tensor, note: Note = _unnoted) -> Tensor:
        ready = functional.relu(self.preact(x))
        kept = _noted_shortcut(self.shortcut, x if isinstance(self.shortcut, Shortcut) else ready, note)
        inner = note("conv2", self.conv2(note("conv1", self.conv1(ready))))
        return kept + note("conv3", self.conv3(inner))


class Basic(nn.Module):
    """Two 3x3 convolutions, then the sum."""

    def __init__(self, inputs: int, outputs: int, stride: int, recipe: Recipe, variant: Variant) -> None:
        super().__init__()
        del variant
        plain = recipe.but(activation=None)
        self.shortcut = _shortcut(inputs, outputs, stride, plain)
        self.conv1 = Conv(inputs, outputs, 3, recipe, stride=stride, padding=1)
        self.conv2 = Conv(outputs, outputs, 3, plain, padding=1)

    def forward(self, x: Tensor, note: Note = _unnoted) -> Tensor:
        kept = _noted_shortcut(self.shortcut, x, note)
        return functional.relu(kept + note("conv2", self.conv2(note("conv1", self.conv1(x)))))


UNITS = {"bottleneck_v1": Bottleneck, "bottleneck_v2": PreActivation, "basic_v1": Basic}


class ResNet(Net):
    """Blocks of units; end points `<scope>/block1/unit_1/bottleneck_v1` and so on, `<scope>/block1` to `block4`."""

    def __init__(self, name: str, variant: Variant, shape: Shape, recipe: Recipe) -> None:
        super().__init__()
        self.scope = name
        self.kind = variant.unit
        second = variant.unit == "bottleneck_v2"
        root = recipe.but(norm=None, activation=None) if second else recipe
        self.conv1 = Conv(shape.channels, 64, 7, root, stride=2, padding=3)
        channels, width = 64, 64 if variant.unit == "basic_v1" else 256
        self.blocks: list[str] = []
        for number, units in enumerate(variant.units, 1):
            smaller = 2 if (number > 1 if variant.stride_first else number < len(variant.units)) else 1
            at = 1 if variant.stride_first else units
            block = nn.Module()
            for unit in range(1, units + 1):
                stride = smaller if unit == at else 1
                cell = nn.Module()
                cell.add_module(self.kind, UNITS[self.kind](channels, width, stride, recipe, variant))
                block.add_module(f"unit_{unit}", cell)
                channels = width
            self.add_module(f"block{number}", block)
            self.blocks.append(f"block{number}")
            width *= 2
        self.postnorm = BatchNorm(channels, recipe.norm) if second and recipe.norm is not None else None
        self.logits = Conv(channels, shape.classes, 1, recipe, norm=None, activation=None)

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.new_points()
        points[f"{self.scope}/conv1"] = x = self.conv1(images)
        x = max_pool(x, 3, 2, "SAME")
        for block in self.blocks:
            for unit, cell in getattr(self, block).named_children():
                name = f"{self.scope}/{block}/{unit}/{self.kind}"
                points[name] = x = getattr(cell, self.kind)(x, partial(_note, points, name))
            points[f"{self.scope}/{block}"] = x
        if self.postnorm is not None:
            x = functional.relu(self.postnorm(x))
        points["global_pool"] = x = spatial_mean(x)
        points[f"{self.scope}/logits"] = x = self.logits(x)
        logits = x.flatten(1)
        points[f"{self.scope}/spatial_squeeze"] = logits
        points["predictions"] = functional.softmax(logits, 1)
        return logits, points


class CifarUnit(nn.Module):
    """Two 3x3 convolutions; new channels of the shortcut are zeros (the paper's option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int, recipe: Recipe) -> None:
        super().__init__()
        self.shortcut = Shortcut(stride)
        self.more = (outputs - inputs) // 2
        self.conv1 = Conv(inputs, outputs, 3, recipe, stride=stride, padding=1)
        self.conv2 = Conv(outputs, outputs, 3, recipe, padding=1, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.shortcut(x)
        if self.more:
            kept = functional.pad(kept, (0, 0, 0, 0, self.more, self.more))
        return functional.relu(kept + self.conv2(self.conv1(x)))


class CifarResNet(Net):
    """Three blocks of 16, 32 and 64 channels for pictures of 32x32."""

    def __init__(self, name: str, units: int, shape: Shape, recipe: Recipe) -> None:
        super().__init__()
        self.scope = name
        self.conv1 = Conv(shape.channels, 16, 3, recipe)
        channels = 16
        for number, width in enumerate((16, 32, 64), 1):
            block = nn.Module()
            for unit in range(1, units + 1):
                stride = 2 if unit == 1 and number > 1 else 1
                block.add_module(f"unit_{unit}", CifarUnit(channels, width, stride, recipe))
                channels = width
            self.add_module(f"block{number}", block)
        self.logits = Conv(channels, shape.classes, 1, recipe, norm=None, activation=None)

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.new_points()
        points[f"{self.scope}/conv1"] = x = self.conv1(images)
        for number in (1, 2, 3):
            for unit, cell in getattr(self, f"block{number}").named_children():
                points[f"{self.scope}/block{number}/{unit}"] = x = cell(x)
            points[f"{self.scope}/block{number}"] = x
        points["global_pool"] = x = spatial_mean(x)
        logits = self.logits(x).flatten(1)
        points[f"{self.scope}/logits"] = logits
        points["predictions"] = functional.softmax(logits, 1)
        return logits, points


def create(name: str, shape: Shape, *, renorm: bool = False, official: bool = False) -> Net:
    """`official` is for resnet_v1_50_8k: strides where TF-Slim has them."""
    if official and name != "resnet_v1_50_8k":
        raise ConfigError(f"official=True is for resnet_v1_50_8k, and {name} has no such choice: leave it out")
    recipe = Recipe(norm=Norm(decay=NORM.decay, epsilon=NORM.epsilon, renorm=renorm), init=he_normal)
    if name in CIFAR_UNITS:
        return CifarResNet(name, CIFAR_UNITS[name], shape, recipe)
    variant = VARIANTS[name]
    return ResNet(name, variant._replace(stride_first=False) if official else variant, shape, recipe)
