"""Inception-ResNet v2 (Szegedy et al. 2016): what the branches find is scaled down and added to their input."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from plait.nets.blocks import Conv, Net, glorot
from plait.nets.family import Shape
from plait.nets.inception import (
    STEM,
    AuxHead,
    Heads,
    Inception,
    Layer,
    Mixed,
    Part,
    Steps,
    Style,
    make_style,
    mixed,
    smaller,
    with_aux,
)

__all__ = ["create"]

BLOCK_35: tuple[Steps, ...] = (
    (Layer("Conv2d_1x1", 32),),
    (Layer("Conv2d_0a_1x1", 32), Layer("Conv2d_0b_3x3", 32)),
    (Layer("Conv2d_0a_1x1", 32), Layer("Conv2d_0b_3x3", 48), Layer("Conv2d_0c_3x3", 64)),
)
BLOCK_17: tuple[Steps, ...] = (
    (Layer("Conv2d_1x1", 192),),
    (Layer("Conv2d_0a_1x1", 128), Layer("Conv2d_0b_1x7", 160), Layer("Conv2d_0c_7x1", 192)),
)
BLOCK_8: tuple[Steps, ...] = (
    (Layer("Conv2d_1x1", 192),),
    (Layer("Conv2d_0a_1x1", 192), Layer("Conv2d_0b_1x3", 224), Layer("Conv2d_0c_3x1", 256)),
)


class Residual(Mixed):
    """Branches, a convolution of 1x1 back to the input's channels, and the sum."""

    def __init__(
        self, branches: tuple[Steps, ...], channels: int, style: Style, *, scale: float, last: bool = False
    ) -> None:
        super().__init__(branches, channels, style)
        self.scale, self.last = scale, last
        self.Conv2d_1x1 = Conv(self.outputs, channels, 1, style.recipe, norm=None, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.Conv2d_1x1(super().forward(x))
        return x if self.last else functional.relu(x)


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Blocks of one kind in a row."""

    name: str
    block: str
    count: int
    branches: tuple[Steps, ...]
    scale: float
    point: str | None = None

    def build(self, inputs: int, style: Style) -> tuple[nn.Module, int]:
        names = [f"{self.block}_{number}" for number in range(1, self.count + 1)]
        blocks = ((name, Residual(self.branches, inputs, style, scale=self.scale)) for name in names)
        return nn.Sequential(OrderedDict(blocks)), inputs


class Last:
    """The last block is added in full, without an activation."""

    name, point = "Block8", None

    def build(self, inputs: int, style: Style) -> tuple[nn.Module, int]:
        return Residual(BLOCK_8, inputs, style, scale=1.0, last=True), inputs


PARTS: tuple[Part, ...] = (
    *STEM,
    mixed(
        "Mixed_5b",
        (Layer("Conv2d_1x1", 96),),
        (Layer("Conv2d_0a_1x1", 48), Layer("Conv2d_0b_5x5", 64)),
        (Layer("Conv2d_0a_1x1", 64), Layer("Conv2d_0b_3x3", 96), Layer("Conv2d_0c_3x3", 96)),
        (Layer("AvgPool_0a_3x3"), Layer("Conv2d_0b_1x1", 64)),
    ),
    Repeat(name="Repeat", block="block35", count=10, branches=BLOCK_35, scale=0.17),
    mixed(
        "Mixed_6a",
        (smaller("Conv2d_1a_3x3", 384),),
        (Layer("Conv2d_0a_1x1", 256), Layer("Conv2d_0b_3x3", 256), smaller("Conv2d_1a_3x3", 384)),
        (smaller("MaxPool_1a_3x3"),),
    ),
    Repeat(name="Repeat_1", block="block17", count=20, branches=BLOCK_17, scale=0.10, point="PreAuxLogits"),
    mixed(
        "Mixed_7a",
        (Layer("Conv2d_0a_1x1", 256), smaller("Conv2d_1a_3x3", 384)),
        (Layer("Conv2d_0a_1x1", 256), smaller("Conv2d_1a_3x3", 288)),
        (Layer("Conv2d_0a_1x1", 256), Layer("Conv2d_0b_3x3", 288), smaller("Conv2d_1a_3x3", 320)),
        (smaller("MaxPool_1a_3x3"),),
    ),
    Repeat(name="Repeat_2", block="block8", count=9, branches=BLOCK_8, scale=0.20),
    Last(),
    Layer("Conv2d_7b_1x1", 1536),
)
AUX = AuxHead(source="PreAuxLogits", wide="Conv2d_2a_5x5", logits="Logits")
HEADS = Heads(logits="Logits", dense=True, pooled="global_pool", dropped="PreLogitsFlatten", aux=AUX)


class InceptionResnetV2(Inception):
    decayed = ("weights", "biases")
    """TF-Slim decays the biases of this network too."""


def create(
    name: str,
    shape: Shape,
    *,
    renorm: bool = False,
    dropout_keep_prob: float = 0.8,
    create_aux_logits: bool = True,
) -> Net:
    style, heads = make_style(renorm, init=glorot), with_aux(HEADS, create_aux_logits, name, shape)
    return InceptionResnetV2("InceptionResnetV2", PARTS, heads, shape, style, keep=dropout_keep_prob)
