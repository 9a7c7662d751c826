"""Inception v2 (Ioffe and Szegedy 2015), which brought batch normalisation."""

from __future__ import annotations

from torch import nn

from plait.nets.blocks import Net, SeparableConv, normal
from plait.nets.family import Shape
from plait.nets.inception import Heads, Inception, Layer, MixedPart, Part, Style, make_style, mixed

__all__ = ["create"]

NARROWING, AFTER_POOL = normal(0.09), normal(0.1)


class _First:
    """The first layer is separable, and the only one with biases instead of normalisation."""

    name = point = "Conv2d_1a_7x7"

    def build(self, inputs: int, style: Style) -> tuple[nn.Module, int]:
        outputs = style.depth(64)
        # no more channels between its two halves than it gives, for pictures of three
        multiplier = min(outputs // 3, 8)
        recipe = style.recipe.but(norm=None, init=normal(1.0))
        return SeparableConv(inputs, outputs, 7, recipe, stride=2, multiplier=multiplier), outputs


def _narrow(outputs: int) -> Layer:
    return Layer("Conv2d_0a_1x1", outputs, init=NARROWING)


def _mixed(
    name: str, plain: int, three: tuple[int, int], twice: tuple[int, int], pooled: int, *, pool: str = "AvgPool_0a_3x3"
) -> MixedPart:
    return mixed(
        name,
        (Layer("Conv2d_0a_1x1", plain),),
        (_narrow(three[0]), Layer("Conv2d_0b_3x3", three[1])),
        (_narrow(twice[0]), Layer("Conv2d_0b_3x3", twice[1]), Layer("Conv2d_0c_3x3", twice[1])),
        (Layer(pool), Layer("Conv2d_0b_1x1", pooled, init=AFTER_POOL)),
    )


def _reduction(name: str, three: tuple[int, int], twice: tuple[int, int]) -> MixedPart:
    last = Layer("Conv2d_1a_3x3", twice[1], stride=2)
    return mixed(
        name,
        (_narrow(three[0]), Layer("Conv2d_1a_3x3", three[1], stride=2)),
        (_narrow(twice[0]), Layer("Conv2d_0b_3x3", twice[1]), last),
        (Layer("MaxPool_1a_3x3", stride=2),),
    )


PARTS: tuple[Part, ...] = (
    _First(),
    Layer("MaxPool_2a_3x3", stride=2),
    Layer("Conv2d_2b_1x1", 64, init=normal(0.1)),
    Layer("Conv2d_2c_3x3", 192),
    Layer("MaxPool_3a_3x3", stride=2),
    _mixed("Mixed_3b", 64, (64, 64), (64, 96), 32),
    _mixed("Mixed_3c", 64, (64, 96), (64, 96), 64),
    _reduction("Mixed_4a", (128, 160), (64, 96)),
    _mixed("Mixed_4b", 224, (64, 96), (96, 128), 128),
    _mixed("Mixed_4c", 192, (96, 128), (96, 128), 128),
    _mixed("Mixed_4d", 160, (128, 160), (128, 160), 96),
    _mixed("Mixed_4e", 96, (128, 192), (160, 192), 96),
    _reduction("Mixed_5a", (128, 192), (192, 256)),
    _mixed("Mixed_5b", 352, (192, 320), (160, 224), 128),
    _mixed("Mixed_5c", 352, (192, 320), (192, 224), 128, pool="MaxPool_0a_3x3"),
)
HEADS = Heads(logits="Conv2d_1c_1x1", pooled="AvgPool_1a", dropped="PreLogits")


class InceptionV2(Inception):
    decayed = ("weights",)
    """TF-Slim does not decay the separable layer."""


def create(
    name: str,
    shape: Shape,
    *,
    renorm: bool = False,
    dropout_keep_prob: float = 0.8,
    min_depth: int = 16,
    depth_multiplier: float = 1.0,
) -> Net:
    del name  # there is one
    style = make_style(renorm, depth_multiplier=depth_multiplier, min_depth=min_depth)
    return InceptionV2("InceptionV2", PARTS, HEADS, shape, style, keep=dropout_keep_prob)
