"""Networks that are a chain of layers: LeNet, CifarNet, AlexNet and OverFeat."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from plait.errors import ConfigError
from plait.nets.blocks import Conv, Dense, Net, Padding, Recipe, dropout, flat, glorot, logits_of, max_pool, normal
from plait.nets.family import Shape

__all__ = ["HeadedNet", "create"]


class Layer(NamedTuple):
    """A convolution, and the maximum over windows that follows it."""

    outputs: int
    kernel: int
    stride: int = 1
    padding: Padding = "SAME"
    pool: int = 0
    """The side of the windows, two apart; 0 is none."""


class Variant(NamedTuple):
    """A network of convolutions with a head of three."""

    layers: tuple[Layer, ...]
    head_kernel: int
    head_width: int
    bias: float
    """The first value of the convolutions' biases; the head's is 0.1."""


VARIANTS = {
    "alexnet_v2": Variant(
        (Layer(64, 11, 4, "VALID", 3), Layer(192, 5, pool=3), Layer(384, 3), Layer(384, 3), Layer(256, 3, pool=3)),
        head_kernel=5,
        head_width=4096,
        bias=0.1,
    ),
    "overfeat": Variant(
        (
            Layer(64, 11, 4, "VALID", 2),
            Layer(256, 5, padding="VALID", pool=2),
            Layer(512, 3),
            Layer(1024, 3),
            Layer(1024, 3, pool=2),
        ),
        head_kernel=6,
        head_width=3072,
        bias=0.0,
    ),
}


class LeNet(Net):
    """Two convolutions and two fully connected layers."""

    scope = "LeNet"

    def __init__(self, shape: Shape, keep: float) -> None:
        super().__init__()
        recipe = Recipe(init=normal(0.1))
        self.keep = keep
        self.conv1 = Conv(shape.channels, 32, 5, recipe)
        self.conv2 = Conv(32, 64, 5, recipe)
        self.fc3 = Dense(_flat_size("lenet", shape), 1024, recipe)
        self.fc4 = Dense(1024, shape.classes, recipe, activation=None)

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.new_points()
        points["conv1"] = x = self.conv1(images)
        points["pool1"] = x = max_pool(x, 2, 2)
        points["conv2"] = x = self.conv2(x)
        points["pool2"] = x = max_pool(x, 2, 2)
        points["Flatten"] = x = flat(x)
        points["fc3"] = x = self.fc3(x)
        points["dropout3"] = x = dropout(x, self.keep, self.training)
        points["Logits"] = logits = self.fc4(x)
        points["Predictions"] = functional.softmax(logits, 1)
        return logits, points


class CifarNet(Net):
    """Two convolutions with local response normalisation, and three fully connected layers."""

    scope = "CifarNet"

    def __init__(self, shape: Shape, keep: float) -> None:
        super().__init__()
        recipe = Recipe(init=normal(0.05))
        dense = Recipe(init=normal(0.04), bias=0.1)
        self.keep = keep
        self.conv1 = Conv(shape.channels, 64, 5, recipe)
        self.conv2 = Conv(64, 64, 5, recipe)
        self.fc3 = Dense(_flat_size("cifarnet", shape), 384, dense)
        self.fc4 = Dense(384, 192, dense)
        self.logits = Dense(192, shape.classes, recipe, activation=None, init=normal(1 / 192))

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.new_points()
        points["conv1"] = x = self.conv1(images)
        points["pool1"] = x = max_pool(x, 2, 2)
        points["conv2"] = x = self.conv2(_local_norm(x))
        points["pool2"] = x = max_pool(_local_norm(x), 2, 2)
        points["Flatten"] = x = flat(x)
        points["fc3"] = x = self.fc3(x)
        points["fc4"] = x = self.fc4(dropout(x, self.keep, self.training))
        points["Logits"] = logits = self.logits(x)
        points["Predictions"] = functional.softmax(logits, 1)
        return logits, points

    def decayed_variables(self) -> list[Tensor]:
        """Of the fully connected layers before the logits only."""
        return [self.fc3.weights, self.fc4.weights]


def _local_norm(x: Tensor) -> Tensor:
    """Over 9 channels; torch divides `alpha` by their number, the paper does not."""
    return functional.local_response_norm(x, 9, alpha=0.001, beta=0.75, k=1.0)


def _flat_size(name: str, shape: Shape) -> int:
    """How many features are left of 64 channels after each side was halved twice."""
    rows, columns = shape.height // 4, shape.width // 4
    if not rows or not columns:
        raise ConfigError(f"{name} halves a picture twice: {shape.height}x{shape.width} is too small, 4x4 is the least")
    return 64 * rows * columns


class HeadedNet(Net):
    """A network that ends in `fc6`, `fc7` and `fc8`, which are convolutions; end points `<scope>/<layer>`."""

    def __init__(self, name: str, keep: float) -> None:
        super().__init__()
        self.scope = name
        self.keep = keep

    def add_head(self, inputs: int, kernel: int | tuple[int, int], width: int, classes: int, recipe: Recipe) -> None:
        """`fc6` sees the whole map, which has the size of `kernel`; `fc7` is always 4096 wide."""
        self.fc6 = Conv(inputs, width, kernel, recipe, padding="VALID", bias=True)
        self.fc7 = Conv(width, 4096, 1, recipe, bias=True)
        self.fc8 = Conv(4096, classes, 1, recipe.but(bias=0.0), norm=None, activation=None)

    def head(self, x: Tensor, points: dict[str, Tensor]) -> Tensor:
        """The logits; `points` gets the head's end points."""
        if x.shape[2] < self.fc6.kernel[0] or x.shape[3] < self.fc6.kernel[1]:
            raise ConfigError(
                f"{self.scope} has a map of {x.shape[2]}x{x.shape[3]} where its fc6 needs"
                f" {self.fc6.kernel[0]}x{self.fc6.kernel[1]}: give it larger pictures, of the size that"
                f" mox.get_model_meta({self.scope!r}).default_image_size says"
            )
        points[f"{self.scope}/fc6"] = x = self.fc6(x)
        points[f"{self.scope}/fc7"] = x = self.fc7(dropout(x, self.keep, self.training))
        x = self.fc8(dropout(x, self.keep, self.training))
        points[f"{self.scope}/fc8"] = logits = logits_of(x, self.scope)
        return logits


class ConvNet(HeadedNet):
    """AlexNet and OverFeat."""

    def __init__(self, name: str, shape: Shape, keep: float) -> None:
        super().__init__(name, keep)
        variant = VARIANTS[name]
        recipe = Recipe(init=glorot, bias=variant.bias)
        channels = shape.channels
        for number, layer in enumerate(variant.layers, 1):
            conv = Conv(channels, layer.outputs, layer.kernel, recipe, stride=layer.stride, padding=layer.padding)
            self.add_module(f"conv{number}", conv)
            channels = layer.outputs
        head = Recipe(init=normal(0.005), bias=0.1)
        self.add_head(channels, variant.head_kernel, variant.head_width, shape.classes, head)
        self.pools = [layer.pool for layer in variant.layers]

    def forward(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        points = self.new_points()
        x = images
        for number, pool in enumerate(self.pools, 1):
            points[f"{self.scope}/conv{number}"] = x = getattr(self, f"conv{number}")(x)
            if pool:
                points[f"{self.scope}/pool{number}"] = x = max_pool(x, pool, 2)
        return self.head(x, points), points


def create(name: str, shape: Shape, *, renorm: bool = False, dropout_keep_prob: float = 0.5) -> Net:
    del renorm  # none of these has batch normalisation
    if name == "lenet":
        return LeNet(shape, dropout_keep_prob)
    if name == "cifarnet":
        return CifarNet(shape, dropout_keep_prob)
    return ConvNet(name, shape, dropout_keep_prob)
