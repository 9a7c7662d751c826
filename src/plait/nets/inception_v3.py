"""Inception v3 (Szegedy et al. 2015): large kernels taken apart into 1x7 and 7x1."""

from __future__ import annotations

from plait.nets.blocks import Net, normal
from plait.nets.family import Shape
from plait.nets.inception import (
    STEM,
    AuxHead,
    Heads,
    Inception,
    Layer,
    MixedPart,
    Part,
    make_style,
    mixed,
    smaller,
    with_aux,
)

__all__ = ["create"]

THREE = (3, 3)


def _at_35(name: str, pooled: int, five: tuple[str, str] = ("Conv2d_0a_1x1", "Conv2d_0b_5x5")) -> MixedPart:
    return mixed(
        name,
        (Layer("Conv2d_0a_1x1", 64),),
        (Layer(five[0], 48), Layer(five[1], 64)),
        (Layer("Conv2d_0a_1x1", 64), Layer("Conv2d_0b_3x3", 96), Layer("Conv2d_0c_3x3", 96)),
        (Layer("AvgPool_0a_3x3"), Layer("Conv2d_0b_1x1", pooled)),
    )


def _at_17(name: str, width: int) -> MixedPart:
    first = Layer("Conv2d_0a_1x1", width)
    twice = [Layer(f"Conv2d_0{kernel}", width) for kernel in ("b_7x1", "c_1x7", "d_7x1")]
    return mixed(
        name,
        (Layer("Conv2d_0a_1x1", 192),),
        (first, Layer("Conv2d_0b_1x7", width), Layer("Conv2d_0c_7x1", 192)),
        (first, *twice, Layer("Conv2d_0e_1x7", 192)),
        (Layer("AvgPool_0a_3x3"), Layer("Conv2d_0b_1x1", 192)),
    )


def _at_8(name: str, upright: str) -> MixedPart:
    """`upright` is the 3x1 of the second branch, which TF-Slim does not call the same in both modules."""
    return mixed(
        name,
        (Layer("Conv2d_0a_1x1", 320),),
        (Layer("Conv2d_0a_1x1", 384), (Layer("Conv2d_0b_1x3", 384), Layer(upright, 384))),
        (
            Layer("Conv2d_0a_1x1", 448),
            Layer("Conv2d_0b_3x3", 384),
            (Layer("Conv2d_0c_1x3", 384), Layer("Conv2d_0d_3x1", 384)),
        ),
        (Layer("AvgPool_0a_3x3"), Layer("Conv2d_0b_1x1", 192)),
    )


PARTS: tuple[Part, ...] = (
    *STEM,
    _at_35("Mixed_5b", 32),
    _at_35("Mixed_5c", 64, ("Conv2d_0b_1x1", "Conv_1_0c_5x5")),
    _at_35("Mixed_5d", 64),
    mixed(
        "Mixed_6a",
        (smaller("Conv2d_1a_1x1", 384, kernel=THREE),),
        (
            Layer("Conv2d_0a_1x1", 64),
            Layer("Conv2d_0b_3x3", 96),
            smaller("Conv2d_1a_1x1", 96, kernel=THREE),
        ),
        (smaller("MaxPool_1a_3x3"),),
    ),
    _at_17("Mixed_6b", 128),
    _at_17("Mixed_6c", 160),
    _at_17("Mixed_6d", 160),
    _at_17("Mixed_6e", 192),
    mixed(
        "Mixed_7a",
        (Layer("Conv2d_0a_1x1", 192), smaller("Conv2d_1a_3x3", 320)),
        (
            Layer("Conv2d_0a_1x1", 192),
            Layer("Conv2d_0b_1x7", 192),
            Layer("Conv2d_0c_7x1", 192),
            smaller("Conv2d_1a_3x3", 192),
        ),
        (smaller("MaxPool_1a_3x3"),),
    ),
    _at_8("Mixed_7b", "Conv2d_0b_3x1"),
    _at_8("Mixed_7c", "Conv2d_0c_3x1"),
)
AUX = AuxHead(
    source="Mixed_6e",
    wide="Conv2d_2a_{}x{}",
    logits="Conv2d_2b_1x1",
    wide_init=normal(0.01),
    logits_init=normal(0.001),
)
HEADS = Heads(logits="Conv2d_1c_1x1", pooled="AvgPool_1a", dropped="PreLogits", aux=AUX)


def create(
    name: str,
    shape: Shape,
    *,
    renorm: bool = False,
    dropout_keep_prob: float = 0.8,
    min_depth: int = 16,
    depth_multiplier: float = 1.0,
    create_aux_logits: bool = True,
) -> Net:
    style = make_style(renorm, depth_multiplier=depth_multiplier, min_depth=min_depth)
    heads = with_aux(HEADS, create_aux_logits, name, shape)
    return Inception("InceptionV3", PARTS, heads, shape, style, keep=dropout_keep_prob)
