"""Inception v4 (Szegedy et al. 2016): a deeper stem, and modules of three kinds only."""

from __future__ import annotations

from plait.nets.blocks import Net
from plait.nets.family import Shape
from plait.nets.inception import (
    AuxHead,
    Heads,
    Inception,
    Layer,
    MixedPart,
    Part,
    Steps,
    make_style,
    mixed,
    smaller,
    with_aux,
)

__all__ = ["create"]


def _pooled(outputs: int) -> Steps:
    return Layer("AvgPool_0a_3x3"), Layer("Conv2d_0b_1x1", outputs)


def _inception_a(name: str) -> MixedPart:
    return mixed(
        name,
        (Layer("Conv2d_0a_1x1", 96),),
        (Layer("Conv2d_0a_1x1", 64), Layer("Conv2d_0b_3x3", 96)),
        (Layer("Conv2d_0a_1x1", 64), Layer("Conv2d_0b_3x3", 96), Layer("Conv2d_0c_3x3", 96)),
        _pooled(96),
    )


def _inception_b(name: str) -> MixedPart:
    return mixed(
        name,
        (Layer("Conv2d_0a_1x1", 384),),
        (Layer("Conv2d_0a_1x1", 192), Layer("Conv2d_0b_1x7", 224), Layer("Conv2d_0c_7x1", 256)),
        (
            Layer("Conv2d_0a_1x1", 192),
            Layer("Conv2d_0b_7x1", 192),
            Layer("Conv2d_0c_1x7", 224),
            Layer("Conv2d_0d_7x1", 224),
            Layer("Conv2d_0e_1x7", 256),
        ),
        _pooled(128),
    )


def _inception_c(name: str) -> MixedPart:
    return mixed(
        name,
        (Layer("Conv2d_0a_1x1", 256),),
        (Layer("Conv2d_0a_1x1", 384), (Layer("Conv2d_0b_1x3", 256), Layer("Conv2d_0c_3x1", 256))),
        (
            Layer("Conv2d_0a_1x1", 384),
            Layer("Conv2d_0b_3x1", 448),
            Layer("Conv2d_0c_1x3", 512),
            (Layer("Conv2d_0d_1x3", 256), Layer("Conv2d_0e_3x1", 256)),
        ),
        _pooled(256),
    )


STEM = (
    smaller("Conv2d_1a_3x3", 32),
    Layer("Conv2d_2a_3x3", 32, padding="VALID"),
    Layer("Conv2d_2b_3x3", 64),
    mixed("Mixed_3a", (smaller("MaxPool_0a_3x3"),), (smaller("Conv2d_0a_3x3", 96),)),
    mixed(
        "Mixed_4a",
        (Layer("Conv2d_0a_1x1", 64), Layer("Conv2d_1a_3x3", 96, padding="VALID")),
        (
            Layer("Conv2d_0a_1x1", 64),
            Layer("Conv2d_0b_1x7", 64),
            Layer("Conv2d_0c_7x1", 64),
            Layer("Conv2d_1a_3x3", 96, padding="VALID"),
        ),
    ),
    mixed("Mixed_5a", (smaller("Conv2d_1a_3x3", 192),), (smaller("MaxPool_1a_3x3"),)),
)
REDUCTION_A = mixed(
    "Mixed_6a",
    (smaller("Conv2d_1a_3x3", 384),),
    (Layer("Conv2d_0a_1x1", 192), Layer("Conv2d_0b_3x3", 224), smaller("Conv2d_1a_3x3", 256)),
    (smaller("MaxPool_1a_3x3"),),
)
REDUCTION_B = mixed(
    "Mixed_7a",
    (Layer("Conv2d_0a_1x1", 192), smaller("Conv2d_1a_3x3", 192)),
    (
        Layer("Conv2d_0a_1x1", 256),
        Layer("Conv2d_0b_1x7", 256),
        Layer("Conv2d_0c_7x1", 320),
        smaller("Conv2d_1a_3x3", 320),
    ),
    (smaller("MaxPool_1a_3x3"),),
)
PARTS: tuple[Part, ...] = (
    *STEM,
    *(_inception_a(f"Mixed_5{letter}") for letter in "bcde"),
    REDUCTION_A,
    *(_inception_b(f"Mixed_6{letter}") for letter in "bcdefgh"),
    REDUCTION_B,
    *(_inception_c(f"Mixed_7{letter}") for letter in "bcd"),
)
AUX = AuxHead(source="Mixed_6h", wide="Conv2d_2a", logits="Aux_logits")
HEADS = Heads(logits="Logits", dense=True, pooled="global_pool", dropped="PreLogitsFlatten", aux=AUX)


def create(
    name: str,
    shape: Shape,
    *,
    renorm: bool = False,
    dropout_keep_prob: float = 0.8,
    create_aux_logits: bool = True,
) -> Net:
    heads = with_aux(HEADS, create_aux_logits, name, shape)
    return Inception("InceptionV4", PARTS, heads, shape, make_style(renorm), keep=dropout_keep_prob)
