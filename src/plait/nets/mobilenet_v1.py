"""MobileNet, version 1: depthwise convolutions, each followed by one of 1x1, in four widths."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ConfigError
from plait.nets.blocks import (
    Conv,
    Net,
    Norm,
    Recipe,
    SeparableConv,
    average_pool,
    dropout,
    logits_of,
    normal,
    spatial_mean,
)
from plait.nets.family import Shape

__all__ = ["create"]

MULTIPLIERS = {"mobilenet_v1": 1.0, "mobilenet_v1_075": 0.75, "mobilenet_v1_050": 0.5, "mobilenet_v1_025": 0.25}
LAYERS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
"""Width and stride of each pair of convolutions."""


class MobileNet(Net):
    """End points `Conv2d_0`, `Conv2d_1_depthwise`, `Conv2d_1_pointwise` and so on."""

    scope = "MobilenetV1"

    def __init__(self, name: str, shape: Shape, recipe: Recipe, widths: list[int], keep: float, pool_all: bool) -> None:
        super().__init__()
        self.name, self.keep, self.pool_all = name, keep, pool_all
        channels = widths[0]
        self.Conv2d_0 = Conv(shape.channels, channels, 3, recipe, stride=2)
        for number, (width, (_, stride)) in enumerate(zip(widths[1:], LAYERS, strict=True), 1):
            self.add_module(f"Conv2d_{number}_depthwise", SeparableConv(channels, None, 3, recipe, stride=stride))
            self.add_module(f"Conv2d_{number}_pointwise", Conv(channels, width, 1, recipe))
            channels = width
        last = Conv(channels, shape.classes, 1, recipe, norm=None, activation=None)
        self.Logits = nn.ModuleDict({"Conv2d_1c_1x1": last})

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.new_points()
        x = images
        for name, layer in self.named_children():
            if layer is not self.Logits:
                points[name] = x = layer(x)
        if self.pool_all:
            points["global_pool"] = x = spatial_mean(x)
        else:
            points["AvgPool_1a"] = x = average_pool(x, (min(7, x.shape[2]), min(7, x.shape[3])), 2)
        x = self.Logits["Conv2d_1c_1x1"](dropout(x, self.keep, self.training))
        points["Logits"] = logits = logits_of(x, self.name)
        points["Predictions"] = functional.softmax(logits, 1)
        return logits, points


def create(
    name: str,
    shape: Shape,
    *,
    renorm: bool = False,
    dropout_keep_prob: float = 0.999,
    depth_multiplier: float | None = None,
    min_depth: int = 8,
    global_pool: bool = False,
) -> Net:
    """`depth_multiplier` is for other widths than the name's; `global_pool` for pictures past 256 pixels."""
    multiplier = MULTIPLIERS[name] if depth_multiplier is None else depth_multiplier
    if multiplier <= 0:
        raise ConfigError(f"depth_multiplier={multiplier}: {name} needs one above 0, such as 0.5")
    recipe = Recipe(
        norm=Norm(decay=0.9997, epsilon=1e-3, renorm=renorm), activation=functional.relu6, init=normal(0.09)
    )
    widths = [max(int(width * multiplier), min_depth) for width in (32, *(width for width, _ in LAYERS))]
    return MobileNet(name, shape, recipe, widths, dropout_keep_prob, global_pool)
