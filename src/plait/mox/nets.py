"""`get_model_fn`, `get_model_meta` and the networks' names: networks as parts of a `model_fn`."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from plait import nets
from plait.engine.functions import takes
from plait.errors import ConfigError, DataError
from plait.mox.spec import ModeKeys
from plait.nets.blocks import Net
from plait.nets.normalise import normalise
from plait.nets.points import EndPoints
from plait.variables.scope import GraphKeys, add_to_collection, layer

__all__ = ["ModelMeta", "NetworkFn", "NetworkKeys", "default_preprocess_fn", "get_model_fn", "get_model_meta"]


class NetworkKeys:
    """The names of the networks."""

    ALEXNET_V2 = "alexnet_v2"
    CIFARNET = "cifarnet"
    OVERFEAT = "overfeat"
    VGG_A = "vgg_a"
    VGG_16 = "vgg_16"
    VGG_19 = "vgg_19"
    VGG_A_BN = "vgg_a_bn"
    VGG_16_BN = "vgg_16_bn"
    VGG_19_BN = "vgg_19_bn"
    INCEPTION_V1 = "inception_v1"
    INCEPTION_V2 = "inception_v2"
    INCEPTION_V3 = "inception_v3"
    INCEPTION_V4 = "inception_v4"
    INCEPTION_RESNET_V2 = "inception_resnet_v2"
    LENET = "lenet"
    RESNET_V1_18 = "resnet_v1_18"
    RESNET_V1_50 = "resnet_v1_50"
    RESNET_V1_50_8K = "resnet_v1_50_8k"
    RESNET_V1_101 = "resnet_v1_101"
    RESNET_V1_152 = "resnet_v1_152"
    RESNET_V1_200 = "resnet_v1_200"
    RESNET_V2_50 = "resnet_v2_50"
    RESNET_V2_101 = "resnet_v2_101"
    RESNET_V2_152 = "resnet_v2_152"
    RESNET_V2_200 = "resnet_v2_200"
    RESNEXT_B_50 = "resnext_b_50"
    RESNEXT_B_101 = "resnext_b_101"
    RESNEXT_C_50 = "resnext_c_50"
    RESNEXT_C_101 = "resnext_c_101"
    PVANET = "pvanet"
    MOBILENET_V1 = "mobilenet_v1"
    MOBILENET_V1_075 = "mobilenet_v1_075"
    MOBILENET_V1_050 = "mobilenet_v1_050"
    MOBILENET_V1_025 = "mobilenet_v1_025"
    MOBILENET_V2 = "mobilenet_v2"
    MOBILENET_V2_140 = "mobilenet_v2_140"
    MOBILENET_V2_035 = "mobilenet_v2_035"
    RESNET_V1_20 = "resnet_v1_20"
    RESNET_V1_110 = "resnet_v1_110"
    NASNET_CIFAR = "nasnet_cifar"
    NASNET_MOBILE = "nasnet_mobile"
    NASNET_LARGE = "nasnet_large"
    PNASNET_LARGE = "pnasnet_large"
    PNASNET_MOBILE = "pnasnet_mobile"


class ModelMeta(NamedTuple):
    """What is known of a network before it is built."""

    default_image_size: int
    default_labels_offset: int
    """To be taken from labels that count a background: 1 where the network knows no background."""
    default_logits_pattern: str
    """Part of the names of the last layer's variables: leave it out to train with other classes."""


def get_model_meta(name: str) -> ModelMeta:
    """Facts of a network.

    >>> from plait import mox
    >>> mox.get_model_meta("resnet_v1_50")
    ModelMeta(default_image_size=224, default_labels_offset=1, default_logits_pattern='logits')
    """
    facts = nets.info(name)
    return ModelMeta(facts.image_size, facts.labels_offset, facts.logits_pattern)


def default_preprocess_fn(images: Tensor, run_mode: str, name: str, data_format: str) -> Tensor:
    """From pixels [N, H, W, C] of 0 to 255 to what the network was made for, in its order of dimensions."""
    del run_mode  # the same in all of them
    images = normalise(images, nets.info(name).preprocessing)
    return images if data_format == "NHWC" else images.permute(0, 3, 1, 2)


NetworkFn = Callable[[Tensor], tuple[Tensor, MutableMapping[str, Tensor]]]


def get_model_fn(
    name: str,
    run_mode: str,
    num_classes: int,
    weight_decay: float = 0.0,
    data_format: str = "NHWC",
    batch_norm_fused: bool = False,
    batch_renorm: bool = False,
    image_height: int | None = None,
    image_width: int | None = None,
    preprocess_fn: Callable[..., Tensor] | None = default_preprocess_fn,
    **kwargs: Any,
) -> NetworkFn:
    """A function `network_fn(images)` that gives `(logits, end_points)`, for use inside a `model_fn`.

    Args:
        name: one of `NetworkKeys`.
        run_mode: TRAIN trains; otherwise there is no dropout, and normalisation uses what training learnt.
        num_classes: how many logits.
        weight_decay: half of it, times the sum of the squared weights, goes into the collection REGULARIZATION_LOSSES.
        data_format: how tensors lie in memory and how end points are ordered; the numbers are the same.
        batch_norm_fused: accepted; torch's one operator is always used, and it is fused.
        batch_renorm: batch renormalisation.
        image_height: in PREDICT and EXPORT, pictures are scaled to it; EXPORT must have it.
        image_width: same.
        preprocess_fn: `preprocess_fn(images, run_mode)` of the pictures [N, H, W, C]; its result is in the order of
            `data_format`. None: the images are in that order, and ready.
        **kwargs: options of the network's family, such as `dropout_keep_prob`.

    """
    del batch_norm_fused
    _check(name, run_mode, data_format, image_height, image_width)
    training, last = run_mode == ModeKeys.TRAIN, data_format == "NHWC"
    prepare = _preparation(preprocess_fn, name, run_mode, data_format)
    serving = run_mode in (ModeKeys.PREDICT, ModeKeys.EXPORT)
    size = (image_height, image_width) if serving and image_height and image_width else None

    def network_fn(images: Tensor) -> tuple[Tensor, MutableMapping[str, Tensor]]:
        _check_images(name, images, preprocess_fn is default_preprocess_fn)
        if size is not None:
            images = _resized(images, size, channels_last=last or preprocess_fn is not None)
        x = prepare(images)
        if last:
            x = x.permute(0, 3, 1, 2)  # a view that torch takes for what it is: NHWC in memory
        x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        net = _network(name, x, num_classes, batch_renorm, kwargs)
        if net.training is not training:
            net.train(training)
        logits, points = net(x)
        if weight_decay:
            squares = torch.stack([value.square().sum() for value in net.decayed_variables()])
            add_to_collection(GraphKeys.REGULARIZATION_LOSSES, squares.sum() * (weight_decay / 2))
        return logits, _ordered(points) if last else points

    return network_fn


def _check(name: str, run_mode: str, data_format: str, image_height: int | None, image_width: int | None) -> None:
    nets.info(name)
    if run_mode not in (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT, ModeKeys.EXPORT):
        raise ConfigError(f"run_mode={run_mode!r}: write mox.ModeKeys.TRAIN, EVAL or PREDICT")
    if data_format not in ("NHWC", "NCHW"):
        raise ConfigError(f"data_format={data_format!r}: write 'NHWC' or 'NCHW'")
    if run_mode == ModeKeys.EXPORT and not (image_height and image_width):
        raise ConfigError(f"{name} in EXPORT mode needs the size of its input: give image_height= and image_width=")


def _check_images(name: str, images: Tensor, are_pixels: bool) -> None:
    if images.ndim != 4:
        raise DataError(f"{name} takes batches of pictures, with 4 dimensions, and got {list(images.shape)}")
    if are_pixels and images.shape[3] not in (1, 3) and images.shape[1] in (1, 3):
        raise DataError(
            f"{name} got {list(images.shape)}, which looks like [N, channels, height, width]: give [N, height, width,"
            " channels], whatever the data_format, or preprocess_fn=None and ready images in its order"
        )


def _ordered(points: MutableMapping[str, Tensor]) -> MutableMapping[str, Tensor]:
    """End points as NHWC."""

    def ordered(value: Tensor) -> Tensor:
        return value.permute(0, 2, 3, 1) if value.ndim == 4 else value

    if isinstance(points, EndPoints):
        return points.map(ordered)
    return {name: ordered(value) for name, value in points.items()}


def _network(name: str, x: Tensor, num_classes: int, renorm: bool, options: dict[str, Any]) -> Net:
    """The network in the current scope, under its own; made at the first call, for pictures of this shape."""
    channels, height, width = x.shape[1:]

    def build() -> Net:
        return nets.build(name, num_classes, channels=channels, height=height, width=width, renorm=renorm, **options)

    return layer(nets.scope_of(name), build)


def _preparation(
    preprocess_fn: Callable[..., Tensor] | None, name: str, run_mode: str, data_format: str
) -> Callable[[Tensor], Tensor]:
    if preprocess_fn is None:
        return lambda images: images
    if preprocess_fn is default_preprocess_fn:
        return lambda images: default_preprocess_fn(images, run_mode, name, data_format)
    return (lambda images: preprocess_fn(images, run_mode)) if takes(preprocess_fn, 2) else preprocess_fn


def _resized(images: Tensor, size: tuple[int, int], *, channels_last: bool) -> Tensor:
    found = images.permute(0, 3, 1, 2) if channels_last else images
    if tuple(found.shape[2:]) == size:
        return images
    found = functional.interpolate(found.float(), size, mode="bilinear", align_corners=False)
    return found.permute(0, 2, 3, 1) if channels_last else found
