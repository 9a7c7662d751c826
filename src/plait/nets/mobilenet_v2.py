"""MobileNet, version 2: inverted residuals with linear bottlenecks, in three widths."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ConfigError
from plait.nets.blocks import Conv, Net, Norm, Recipe, SeparableConv, dropout, normal, spatial_mean
from plait.nets.family import Shape

__all__ = ["create"]

MULTIPLIERS = {"mobilenet_v2": 1.0, "mobilenet_v2_140": 1.4, "mobilenet_v2_035": 0.35}
BLOCKS = ((16, 1, 1), (24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2), (320, 1, 1))
"""Width, how many units, and the stride of the first."""
LAST = 1280
EXPANSION = 6


class ExpandedConv(nn.Module):
    """1x1 to `inner` channels, a depthwise 3x3, 1x1 back without an activation, then the sum where shapes allow it."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, recipe: Recipe) -> None:
        super().__init__()
        self.expand = Conv(inputs, inner, 1, recipe) if inner > inputs else None
        self.depthwise = SeparableConv(inner, None, 3, recipe, stride=stride)
        self.project = Conv(inner, outputs, 1, recipe, activation=None)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        inner = x
        if self.expand is not None:
            found["expansion_output"] = inner = self.expand(x)
        found["depthwise_output"] = inner = self.depthwise(inner)
        out = self.project(inner)
        found["output"] = x + out if self.residual else out
        return found


class MobileNet(Net):
    """End points `layer_1` to `layer_19`, and `layer_2/output` and so on inside the units."""

    scope = "MobilenetV2"

    def __init__(self, shape: Shape, recipe: Recipe, multiplier: float, keep: float) -> None:
        super().__init__()
        self.keep = keep
        channels = _width(32 * multiplier)
        self.Conv = Conv(shape.channels, channels, 3, recipe, stride=2)
        self.units: list[str] = []
        for width, units, first in BLOCKS:
            for unit in range(units):
                name = f"expanded_conv_{len(self.units)}" if self.units else "expanded_conv"
                inner = channels * EXPANSION if self.units else channels
                outputs = _width(width * multiplier)
                self.add_module(name, ExpandedConv(channels, inner, outputs, 1 if unit else first, recipe))
                self.units.append(name)
                channels = outputs
        last = _width(LAST * max(1.0, multiplier))  # narrow networks keep it wide, as the paper does
        self.Conv_1 = Conv(channels, last, 1, recipe)
        logits = Conv(last, shape.classes, 1, recipe, norm=None, activation=None)
        self.Logits = nn.ModuleDict({"Conv2d_1c_1x1": logits})

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.new_points()
        points["layer_1"] = x = self.Conv(images)
        for number, name in enumerate(self.units, 2):
            inside = getattr(self, name)(x)
            points[f"layer_{number}"] = x = inside["output"]
            points.update({f"layer_{number}/{key}": value for key, value in inside.items()})
        points[f"layer_{len(self.units) + 2}"] = x = self.Conv_1(x)
        points["global_pool"] = x = spatial_mean(x)
        points["Logits"] = logits = self.Logits["Conv2d_1c_1x1"](dropout(x, self.keep, self.training)).flatten(1)
        points["Predictions"] = functional.softmax(logits, 1)
        return logits, points


def _width(wanted: float) -> int:
    """The nearest multiple of 8, but never less than nine tenths of it."""
    near = max(8, int(wanted + 4) // 8 * 8)
    return near + 8 if near < 0.9 * wanted else near


def create(
    name: str,
    shape: Shape,
    *,
    renorm: bool = False,
    dropout_keep_prob: float = 0.8,
    depth_multiplier: float | None = None,
) -> Net:
    """`depth_multiplier` is for other widths than the name's."""
    multiplier = MULTIPLIERS[name] if depth_multiplier is None else depth_multiplier
    if multiplier <= 0:
        raise ConfigError(f"depth_multiplier={multiplier}: {name} needs one above 0, such as 0.5")
    recipe = Recipe(norm=Norm(decay=0.997, epsilon=1e-3, renorm=renorm), activation=functional.relu6, init=normal(0.09))
    return MobileNet(shape, recipe, multiplier, dropout_keep_prob)
