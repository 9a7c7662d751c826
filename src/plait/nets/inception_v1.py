"""Inception v1, GoogLeNet (Szegedy et al. 2014): as in TF-Slim batch-normalised and without auxiliary heads."""

from __future__ import annotations

from plait.nets.blocks import Net, normal
from plait.nets.family import Shape
from plait.nets.inception import Heads, Inception, Layer, MixedPart, Part, make_style, mixed

__all__ = ["create"]


def _mixed(
    name: str, plain: int, three: tuple[int, int], five: tuple[int, int], pooled: int, *, last: str = "Conv2d_0b_3x3"
) -> MixedPart:
    """The paper's module; where it has 5x5, TF-Slim has 3x3, and in one module (`last`) under another name."""
    return mixed(
        name,
        (Layer("Conv2d_0a_1x1", plain),),
        (Layer("Conv2d_0a_1x1", three[0]), Layer("Conv2d_0b_3x3", three[1])),
        (Layer("Conv2d_0a_1x1", five[0]), Layer(last, five[1])),
        (Layer("MaxPool_0a_3x3"), Layer("Conv2d_0b_1x1", pooled)),
    )


PARTS: tuple[Part, ...] = (
    Layer("Conv2d_1a_7x7", 64, stride=2),
    Layer("MaxPool_2a_3x3", stride=2),
    Layer("Conv2d_2b_1x1", 64),
    Layer("Conv2d_2c_3x3", 192),
    Layer("MaxPool_3a_3x3", stride=2),
    _mixed("Mixed_3b", 64, (96, 128), (16, 32), 32),
    _mixed("Mixed_3c", 128, (128, 192), (32, 96), 64),
    Layer("MaxPool_4a_3x3", stride=2),
    _mixed("Mixed_4b", 192, (96, 208), (16, 48), 64),
    _mixed("Mixed_4c", 160, (112, 224), (24, 64), 64),
    _mixed("Mixed_4d", 128, (128, 256), (24, 64), 64),
    _mixed("Mixed_4e", 112, (144, 288), (32, 64), 64),
    _mixed("Mixed_4f", 256, (160, 320), (32, 128), 128),
    Layer("MaxPool_5a_2x2", stride=2),
    _mixed("Mixed_5b", 256, (160, 320), (32, 128), 128, last="Conv2d_0a_3x3"),
    _mixed("Mixed_5c", 384, (192, 384), (48, 128), 128),
)
HEADS = Heads(logits="Conv2d_0c_1x1", pooled="AvgPool_0a_7x7", dropped=None)


def create(name: str, shape: Shape, *, renorm: bool = False, dropout_keep_prob: float = 0.8) -> Net:
    del name  # there is one
    style = make_style(renorm, init=normal(0.01))
    return Inception("InceptionV1", PARTS, HEADS, shape, style, keep=dropout_keep_prob)
