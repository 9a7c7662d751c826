"""From pixels to what a network was made for: the part of preprocessing that belongs to the network."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from plait.errors import ConfigError

__all__ = ["NORMALISATIONS", "normalise"]

_MEANS = (123.68, 116.78, 103.94)
_IMAGENET_MEANS = (0.485, 0.456, 0.406)
_IMAGENET_DEVIATIONS = (0.229, 0.224, 0.225)


def _per_channel(values: tuple[float, ...], images: Tensor) -> Tensor:
    """One value for each channel; grey pictures get the mean."""
    channels = images.shape[-1]
    if channels == 1:
        values = (sum(values) / len(values),)
    elif channels != len(values):
        raise ConfigError(
            f"pictures with {channels} channels have no known means: give get_model_fn a preprocess_fn, or None"
        )
    # filled in on the device: a copy of host memory would be waited for at every step, and could not be captured
    return torch.cat([torch.full((1,), value, dtype=images.dtype, device=images.device) for value in values])


def _vgg(images: Tensor) -> Tensor:
    return images - _per_channel(_MEANS, images)


def _inception(images: Tensor) -> Tensor:
    return images.div(127.5).sub_(1)


def _cifarnet(images: Tensor) -> Tensor:
    """Each picture by itself: mean 0, deviation 1; a picture of one colour is not divided by nothing."""
    deviation, mean = torch.std_mean(images, (1, 2, 3), correction=0, keepdim=True)
    least = 1 / math.sqrt(math.prod(images.shape[1:]))
    return (images - mean) / deviation.clamp(min=least)


def _lenet(images: Tensor) -> Tensor:
    return images.sub(128).div_(128)


def _pvanet(images: Tensor) -> Tensor:
    return (images / 255 - _per_channel(_IMAGENET_MEANS, images)) / _per_channel(_IMAGENET_DEVIATIONS, images)


NORMALISATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cifarnet": _cifarnet,
    "inception": _inception,
    "lenet": _lenet,
    "pvanet": _pvanet,
    "vgg": _vgg,
}


def normalise(images: Tensor, family: str) -> Tensor:
    """Pictures [N, H, W, C] of 0 to 255, as floats and normalised by the family's rule.

    | family | rule |
    | --- | --- |
    | vgg | minus the means of the channels, 123.68, 116.78, 103.94 |
    | inception | to -1 ... 1 |
    | cifarnet | each picture: minus its mean, divided by its deviation |
    | lenet | minus 128, divided by 128 |
    | pvanet | to 0 ... 1, minus 0.485, 0.456, 0.406, divided by 0.229, 0.224, 0.225 |
    """
    if not images.is_floating_point():
        images = images.float()
    return NORMALISATIONS[family](images)
