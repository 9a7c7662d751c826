"""VGG networks of 11, 16 and 19 layers, each also with batch normalisation."""

from __future__ import annotations

from torch import Tensor, nn

from plait.nets.blocks import Conv, Net, Norm, Recipe, glorot, max_pool
from plait.nets.family import Shape
from plait.nets.simple import HeadedNet

__all__ = ["create"]

WIDTHS = (64, 128, 256, 512, 512)
DEPTHS = {"vgg_a": (1, 1, 2, 2, 2), "vgg_16": (2, 2, 3, 3, 3), "vgg_19": (2, 2, 4, 4, 4)}


class Vgg(HeadedNet):
    """Five blocks of 3x3 convolutions, each halved; with `norm`, all but the head are normalised."""

    def __init__(self, name: str, shape: Shape, norm: Norm | None, keep: float) -> None:
        super().__init__(name, keep)
        recipe = Recipe(norm=norm, init=glorot)
        channels = shape.channels
        for number, (width, depth) in enumerate(zip(WIDTHS, DEPTHS[name.removesuffix("_bn")], strict=True), 1):
            block = nn.Module()
            for layer in range(1, depth + 1):
                block.add_module(f"conv{number}_{layer}", Conv(channels, width, 3, recipe))
                channels = width
            self.add_module(f"conv{number}", block)
        self.add_head(channels, 7, 4096, shape.classes, recipe.but(norm=None))

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.new_points()
        x = images
        for number in range(1, len(WIDTHS) + 1):
            for name, conv in getattr(self, f"conv{number}").named_children():
                points[f"{self.scope}/conv{number}/{name}"] = x = conv(x)
            points[f"{self.scope}/pool{number}"] = x = max_pool(x, 2, 2)
        return self.head(x, points), points


def create(name: str, shape: Shape, *, renorm: bool = False, dropout_keep_prob: float = 0.5) -> Net:
    norm = Norm(decay=0.997, epsilon=1e-5, renorm=renorm) if name.endswith("_bn") else None
    return Vgg(name, shape, norm, dropout_keep_prob)
