"""What networks are made of: layers that keep TF-Slim's names, paddings and normalisation, on NCHW tensors.

Variables are called as in TF-Slim (`weights`, `biases`, `BatchNorm/beta`, `BatchNorm/moving_mean`, ...), so that its
checkpoints fit by name; only the order of dimensions is PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.errors import ConfigError, FunctionError
from plait.nets.points import EndPoints, Kept, Memory

__all__ = [
    "BatchNorm",
    "Conv",
    "Dense",
    "Net",
    "Norm",
    "Padding",
    "Recipe",
    "SeparableConv",
    "average_pool",
    "constant",
    "dropout",
    "flat",
    "glorot",
    "he_normal",
    "logits_of",
    "max_pool",
    "normal",
    "pair",
    "spatial_mean",
]

Padding = Literal["SAME", "VALID"] | int
"""SAME and VALID are TensorFlow's; a number pads so much on each side."""
Init = Callable[[Tensor], Any]
Activation = Callable[[Tensor], Tensor] | None

_UNSET: Any = object()


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Settings of batch normalisation."""

    decay: float = 0.997
    epsilon: float = 1e-5
    scale: bool = True
    """Whether there is a `gamma`."""
    renorm: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the layers of a network share unless they say otherwise."""

    norm: Norm | None = None
    """Without one, layers have biases."""
    activation: Activation = functional.relu
    init: Init
    """Fills weights in place."""
    bias: float = 0.0
    """The biases' first value."""

    def but(self, **changes: Any) -> Recipe:
        return replace(self, **changes)


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


# How weights begin ----------------------------------------------------------------------------------------------------


def normal(deviation: float) -> Init:
    """A normal distribution cut off at two deviations."""

    def init(weights: Tensor) -> None:
        _cut_normal(weights, deviation)

    return init


@torch.no_grad()
def _cut_normal(weights: Tensor, deviation: float) -> None:
    """Draw again what lies outside: seven times as fast as torch's own way through the error function."""
    if weights.is_meta:  # there is nothing to fill
        return
    values = weights.view(-1).normal_()
    outside = (values.abs() > 2).nonzero().squeeze(1)
    while len(outside):
        drawn = torch.randn(len(outside), dtype=values.dtype, device=values.device)
        values[outside] = drawn
        outside = outside[drawn.abs() > 2]
    values.mul_(deviation)


_CUT = 0.87962566103423978
"""The deviation of a standard normal distribution cut off at two deviations; without it weights begin too small."""


def he_normal(weights: Tensor, *, factor: float = 2.0, mode: Literal["in", "out"] = "in") -> None:
    """Variance `factor` divided by the inputs (or outputs) of a unit, from a cut-off normal distribution."""
    receptive = math.prod(weights.shape[2:])
    fan = weights.shape[1 if mode == "in" else 0] * receptive
    _cut_normal(weights, math.sqrt(factor / max(1, fan)) / _CUT)


def glorot(weights: Tensor) -> None:
    """Glorot's uniform initialisation."""
    nn.init.xavier_uniform_(weights)


def constant(value: float) -> Init:
    def init(weights: Tensor) -> None:
        nn.init.constant_(weights, value)

    return init


# Padding and pooling --------------------------------------------------------------------------------------------------


def _same(size: int, kernel: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """How much TensorFlow's SAME pads before and after: what is odd goes to the end."""
    total = max(0, (-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size)
    return total // 2, total - total // 2


def _padded(
    x: Tensor, kernel: tuple[int, int], stride: int, padding: Padding, dilation: int = 1
) -> tuple[Tensor, tuple[int, int]]:
    """`x`, padded where a convolution cannot do it itself, and what it is left to pad on both sides."""
    if padding == "VALID":
        return x, (0, 0)
    if isinstance(padding, int):
        return x, (padding, padding)
    top, bottom = _same(x.shape[2], kernel[0], stride, dilation)
    left, right = _same(x.shape[3], kernel[1], stride, dilation)
    if top == bottom and left == right:
        return x, (top, left)
    return functional.pad(x, (left, right, top, bottom)), (0, 0)


def max_pool(x: Tensor, kernel: int, stride: int, padding: Padding = "VALID") -> Tensor:
    if padding != "SAME":
        return functional.max_pool2d(x, kernel, stride, 0 if padding == "VALID" else padding)
    (top, bottom), (left, right) = (_same(size, kernel, stride) for size in x.shape[2:])
    if top == bottom and left == right:
        return functional.max_pool2d(x, kernel, stride, (top, left))
    if top == left == 0 and stride > 1:  # a window over the edge sees what there is, as with padding at the end
        return functional.max_pool2d(x, kernel, stride, ceil_mode=True)
    return functional.max_pool2d(functional.pad(x, (left, right, top, bottom), value=-math.inf), kernel, stride)


def average_pool(x: Tensor, kernel: int | tuple[int, int], stride: int, padding: Padding = "VALID") -> Tensor:
    """Means over windows; padding does not count."""
    height, width = pair(kernel)
    if padding != "SAME":
        pad = 0 if padding == "VALID" else padding
        return functional.avg_pool2d(x, (height, width), stride, pad, count_include_pad=False)
    (top, bottom), (left, right) = _same(x.shape[2], height, stride), _same(x.shape[3], width, stride)
    if top == bottom and left == right:
        return functional.avg_pool2d(x, (height, width), stride, (top, left), count_include_pad=False)
    # torch's ceil_mode does not count what lies outside, but it begins at the edge, as padding at the end does
    if top == left == 0 and stride > 1:
        return functional.avg_pool2d(x, (height, width), stride, ceil_mode=True, count_include_pad=False)
    pads = (left, right, top, bottom)
    ones = functional.pad(x.new_ones(1, 1, *x.shape[2:]), pads)
    sums = functional.avg_pool2d(functional.pad(x, pads), (height, width), stride)
    return sums / functional.avg_pool2d(ones, (height, width), stride)


def spatial_mean(x: Tensor) -> Tensor:
    """The mean of each channel, as [N, C, 1, 1]."""
    return x.mean((2, 3), keepdim=True)


def flat(x: Tensor) -> Tensor:
    """[N, ...] as [N, F], the features in TensorFlow's order: rows, columns, channels."""
    return (x.permute(0, 2, 3, 1) if x.ndim == 4 else x).flatten(1)


def dropout(x: Tensor, keep: float, training: bool) -> Tensor:
    return functional.dropout(x, 1 - keep) if training and keep < 1 else x


# Layers ---------------------------------------------------------------------------------------------------------------


class BatchNorm(nn.Module):
    """Batch normalisation, or batch renormalisation (Ioffe 2017): the paper's limits, which widen with the steps."""

    gamma: Tensor | None
    moving_mean: Tensor
    moving_variance: Tensor
    renorm_steps: Tensor

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.momentum = 1 - norm.decay
        self.epsilon = norm.epsilon
        self.renorm = norm.renorm
        self.beta = nn.Parameter(torch.zeros(channels))
        self.gamma = nn.Parameter(torch.ones(channels)) if norm.scale else None
        self.register_buffer("moving_mean", torch.zeros(channels))
        self.register_buffer("moving_variance", torch.ones(channels))
        if norm.renorm:
            self.register_buffer("renorm_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        training = self.training
        if training and (self.renorm or x.numel() <= x.shape[1]):  # of one value a channel, torch takes no variance
            return self._written_out(x)
        gamma = self.gamma
        if gamma is None and x.is_cuda:  # there, torch wants both or neither
            gamma = torch.ones_like(self.beta)
        return functional.batch_norm(
            x, self.moving_mean, self.moving_variance, gamma, self.beta, training, self.momentum, self.epsilon
        )

    def _written_out(self, x: Tensor) -> Tensor:
        """The formulas themselves, without Bessel's correction."""
        if not x.numel():
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        variance, mean = torch.var_mean(x.to(wide), (0, 2, 3), correction=0)
        scale, shift = (variance + self.epsilon).rsqrt(), torch.zeros_like(mean)
        if self.renorm:
            r, shift = self._renorm(variance.detach(), mean.detach())
            scale = scale * r
        with torch.no_grad():
            self.moving_mean.lerp_(mean.to(self.moving_mean.dtype), self.momentum)
            self.moving_variance.lerp_(variance.to(self.moving_variance.dtype), self.momentum)
        shift = shift - mean * scale
        if self.gamma is not None:
            scale, shift = scale * self.gamma, shift * self.gamma
        shift = shift + self.beta
        return torch.addcmul(shift.to(x.dtype)[:, None, None], x, scale.to(x.dtype)[:, None, None])

    def _renorm(self, variance: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """By how much a batch is scaled and shifted towards the moving statistics; counts this step."""
        over = self.renorm_steps.to(mean.dtype) - 5000
        most_r = (1 + over * (2 / 35000)).clamp(1, 3)
        most_d = (over * (5 / 20000)).clamp(0, 5)
        moving = (self.moving_variance.to(mean.dtype) + self.epsilon).sqrt()
        r = torch.minimum(torch.maximum((variance + self.epsilon).sqrt() / moving, 1 / most_r), most_r)
        d = torch.minimum(torch.maximum((mean - self.moving_mean) / moving, -most_d), most_d)
        self.renorm_steps += 1
        return r, d


class Conv(nn.Module):
    """A convolution, its batch normalisation or biases, and its activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        recipe: Recipe,
        *,
        stride: int = 1,
        padding: Padding = "SAME",
        groups: int = 1,
        dilation: int = 1,
        norm: Norm | None = _UNSET,
        activation: Activation = _UNSET,
        bias: bool = _UNSET,
        init: Init = _UNSET,
    ) -> None:
        super().__init__()
        norm = recipe.norm if norm is _UNSET else norm
        self.kernel = pair(kernel)
        self.stride, self.padding, self.groups, self.dilation = stride, padding, groups, dilation
        self.activation = recipe.activation if activation is _UNSET else activation
        self.weights = nn.Parameter(torch.empty(outputs, inputs // groups, *self.kernel))
        (recipe.init if init is _UNSET else init)(self.weights)
        with_bias = norm is None if bias is _UNSET else bias
        self.biases = nn.Parameter(torch.full((outputs,), recipe.bias)) if with_bias else None
        self.BatchNorm = BatchNorm(outputs, norm) if norm is not None else None

    def forward(self, x: Tensor) -> Tensor:
        x, padding = _padded(x, self.kernel, self.stride, self.padding, self.dilation)
        x = functional.conv2d(x, self.weights, self.biases, self.stride, padding, self.dilation, self.groups)
        if self.BatchNorm is not None:
            x = self.BatchNorm(x)
        return x if self.activation is None else self.activation(x)


class SeparableConv(nn.Module):
    """A convolution of each channel by itself, then one of 1x1 over all, with one normalisation at the end.

    `outputs` None leaves the second out.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int | None,
        kernel: int,
        recipe: Recipe,
        *,
        stride: int = 1,
        multiplier: int = 1,
        padding: Padding = "SAME",
        norm: Norm | None = _UNSET,
        activation: Activation = _UNSET,
        bias: bool = _UNSET,
        depthwise_init: Init = _UNSET,
    ) -> None:
        super().__init__()
        norm = recipe.norm if norm is _UNSET else norm
        inner = inputs * multiplier
        self.kernel, self.stride, self.padding, self.channels = (kernel, kernel), stride, padding, inputs
        self.activation = recipe.activation if activation is _UNSET else activation
        self.depthwise_weights = nn.Parameter(torch.empty(inner, 1, kernel, kernel))
        (recipe.init if depthwise_init is _UNSET else depthwise_init)(self.depthwise_weights)
        self.pointwise_weights = None if outputs is None else nn.Parameter(torch.empty(outputs, inner, 1, 1))
        if self.pointwise_weights is not None:
            recipe.init(self.pointwise_weights)
        width = inner if outputs is None else outputs
        with_bias = norm is None if bias is _UNSET else bias
        self.biases = nn.Parameter(torch.full((width,), recipe.bias)) if with_bias else None
        self.BatchNorm = BatchNorm(width, norm) if norm is not None else None

    def forward(self, x: Tensor) -> Tensor:
        x, padding = _padded(x, self.kernel, self.stride, self.padding)
        first = self.biases if self.pointwise_weights is None else None
        x = functional.conv2d(x, self.depthwise_weights, first, self.stride, padding, 1, self.channels)
        if self.pointwise_weights is not None:
            x = functional.conv2d(x, self.pointwise_weights, self.biases)
        if self.BatchNorm is not None:
            x = self.BatchNorm(x)
        return x if self.activation is None else self.activation(x)


class Dense(nn.Module):
    """A fully connected layer."""

    def __init__(
        self, inputs: int, outputs: int, recipe: Recipe, *, activation: Activation = _UNSET, init: Init = _UNSET
    ) -> None:
        super().__init__()
        self.activation = recipe.activation if activation is _UNSET else activation
        self.weights = nn.Parameter(torch.empty(outputs, inputs))
        (recipe.init if init is _UNSET else init)(self.weights)
        self.biases = nn.Parameter(torch.full((outputs,), recipe.bias))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(x, self.weights, self.biases)
        return x if self.activation is None else self.activation(x)


def _precision(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """What makes autocast as it is now, later."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled)


class Net(nn.Module):
    """A network: `forward(images)` of [N, C, H, W] gives logits [N, classes] and a dict of end points.

    `scope` is the name under which TF-Slim keeps its variables; `decayed` says which of them weight decay is for.
    """

    scope: str
    decayed: tuple[str, ...] = ("weights", "pointwise_weights")
    """Last parts of names."""
    _keeping: set[str] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.points = Memory()

    def __call__(self, images: Tensor) -> tuple[Tensor, MutableMapping[str, Tensor]]:
        result: tuple[Tensor, dict[str, Tensor]]
        if torch.compiler.is_compiling():
            result = super().__call__(images)
            return result[0], dict(result[1])
        if self.training or torch.is_grad_enabled():
            return self._called_in_training(images)
        self._keeping = self.points.looked_at
        try:
            result = super().__call__(images)
        finally:
            self._keeping = None
        precision, state = _precision(images.device.type), self._state(images)

        def again() -> dict[str, Tensor]:
            if self.training or self._state(images) != state:
                raise FunctionError(
                    "an end point that was not looked at before is worked out when it is, but the network or its input"
                    " has changed since the call: look at it right after the call"
                )
            with torch.no_grad(), precision():
                return dict(self.forward(images)[1])

        return result[0], EndPoints(result[1], self.points, again)

    def _called_in_training(self, images: Tensor) -> tuple[Tensor, MutableMapping[str, Tensor]]:
        """All end points, which gradients need anyway; of a compiled network those that were looked at before."""
        compiled = self._compiled_call_impl is not None
        self._keeping = self.points.looked_at if compiled else None
        try:
            logits, found = super().__call__(images)
        finally:
            self._keeping = None
        all_of_them = dict(found)

        def again() -> dict[str, Tensor]:
            if compiled:
                raise FunctionError(
                    "a compiled network gives the end points that were looked at in its first call, and only those: "
                    f"{', '.join(all_of_them) or 'none'}; look at the same ones at every call, or leave compile out"
                )
            return all_of_them

        return logits, EndPoints(all_of_them, self.points, again)

    def new_points(self) -> Kept:
        """What `forward` puts its end points into."""
        return Kept(self._keeping)

    def _state(self, images: Tensor) -> list[tuple[int, int]]:
        """What changes when the input, or the first variable, is changed or replaced."""
        values = [images, next(self.parameters(), images)]
        return [(id(value), 0 if value.is_inference() else value._version) for value in values]  # noqa: SLF001 - torch's

    def decayed_variables(self) -> list[Tensor]:
        return [value for name, value in self.named_parameters() if name.rpartition(".")[2] in self.decayed]


def logits_of(x: Tensor, name: str) -> Tensor:
    """[N, C, 1, 1] as [N, C]; another size means that the pictures had one that the network was not made for."""
    if x.shape[2:] != (1, 1):
        raise ConfigError(
            f"{name} gives a map of {x.shape[2]}x{x.shape[3]} instead of one row of logits: give it pictures of the"
            f" size that mox.get_model_meta({name!r}).default_image_size says"
        )
    return x.flatten(1)
