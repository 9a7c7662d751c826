"""PVANet: thin layers that use both signs of what they find, then Inception units, then a head as in AlexNet."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.nets.blocks import BatchNorm, Conv, Net, Norm, Recipe, glorot, he_normal, max_pool
from plait.nets.family import Shape
from plait.nets.simple import HeadedNet

__all__ = ["create"]

NARROW = ((64,), (48, 128), (24, 48, 48))
WIDE = ((64,), (96, 192), (32, 64, 64))
"""The widths along each branch of an Inception unit: 1x1 first, then 3x3."""
POOLED = 128
"""The width of the branch that pools; units that make the map smaller have one."""


class BothSigns(nn.Module):
    """A convolution, its output and the negative of it, normalised together (the paper's mC.ReLU, before the ReLU)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, recipe: Recipe, norm: Norm, stride: int = 1) -> None:
        super().__init__()
        self.conv = Conv(inputs, outputs, kernel, recipe, stride=stride, padding=kernel // 2, activation=None)
        self.BatchNorm = BatchNorm(2 * outputs, norm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        both: Tensor = self.BatchNorm(torch.cat((x, -x), 1))
        return both


class ThinUnit(nn.Module):
    """1x1, 3x3 with both signs, 1x1, then the sum; only the middle is normalised."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, recipe: Recipe, norm: Norm) -> None:
        super().__init__()
        self.reduce = Conv(inputs, width, 1, recipe, stride=stride, padding=0)
        self.both = BothSigns(width, width, 3, recipe, norm)
        self.expand = Conv(2 * width, outputs, 1, recipe, activation=None)
        self.shortcut = _shortcut(inputs, outputs, stride, recipe)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.both(self.reduce(functional.relu(x))))
        return torch.add(self.shortcut(x), self.expand(inner))


class InceptionUnit(nn.Module):
    """Branches of one, two and three convolutions, joined by a 1x1, then the sum."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, branches: tuple[tuple[int, ...], ...], recipe: Recipe, norm: Norm
    ) -> None:
        super().__init__()
        normed = recipe.but(norm=norm)
        self.stride = stride
        self.branches = nn.ModuleList()
        for widths in branches:
            branch, channels = nn.Sequential(), inputs
            for depth, width in enumerate(widths):
                kernel, step = (3, 1) if depth else (1, stride)
                branch.append(Conv(channels, width, kernel, normed, stride=step, padding=kernel // 2))
                channels = width
            self.branches.append(branch)
        self.pooled = Conv(inputs, POOLED, 1, normed, bias=True) if stride > 1 else None
        total = sum(widths[-1] for widths in branches) + (POOLED if stride > 1 else 0)
        self.join = Conv(total, outputs, 1, normed, activation=None, bias=True)
        self.shortcut = _shortcut(inputs, outputs, stride, recipe)

    def forward(self, x: Tensor) -> Tensor:
        ready = functional.relu(x)
        found = [branch(ready) for branch in self.branches]
        if self.pooled is not None:
            found.append(self.pooled(max_pool(ready, 3, self.stride, 1)))
        return torch.add(self.shortcut(x), self.join(torch.cat(found, 1)))


def _shortcut(inputs: int, outputs: int, stride: int, recipe: Recipe) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return Conv(inputs, outputs, 1, recipe, stride=stride, padding=0, activation=None)


class PvaNet(HeadedNet):
    """End points `pvanet/conv1_1` to `pvanet/conv5_4`, and those of the head."""

    def __init__(self, name: str, shape: Shape, norm: Norm, keep: float) -> None:
        super().__init__(name, keep)
        recipe = Recipe(init=partial(he_normal, mode="out"))
        self.conv1_1 = BothSigns(shape.channels, 16, 7, recipe, norm, stride=2)
        channels = 32
        for number, (width, outputs, units) in enumerate(((24, 64, 3), (48, 128, 4)), 2):
            for unit in range(1, units + 1):
                stride = 2 if number > 2 and unit == 1 else 1
                self.add_module(f"conv{number}_{unit}", ThinUnit(channels, width, outputs, stride, recipe, norm))
                channels = outputs
        for number, (branches, outputs) in enumerate(((NARROW, 256), (WIDE, 384)), 4):
            for unit in range(1, 5):
                stride = 2 if unit == 1 else 1
                cell = InceptionUnit(channels, outputs, stride, branches, recipe, norm)
                self.add_module(f"conv{number}_{unit}", cell)
                channels = outputs
        self.units = [key for key, _ in self.named_children() if key != "conv1_1"]
        size = (-(-shape.height // 32), -(-shape.width // 32))
        self.add_head(channels, size, 4096, shape.classes, Recipe(norm=norm, init=glorot))

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.new_points()
        points[f"{self.scope}/conv1_1"] = x = self.conv1_1(images)
        points[f"{self.scope}/pool1"] = x = max_pool(x, 3, 2, 1)
        for unit in self.units:
            points[f"{self.scope}/{unit}"] = x = getattr(self, unit)(x)
        return self.head(functional.relu(x), points), points


def create(name: str, shape: Shape, *, renorm: bool = False, dropout_keep_prob: float = 0.5) -> Net:
    return PvaNet(name, shape, Norm(decay=0.9, epsilon=1e-5, renorm=renorm), dropout_keep_prob)
