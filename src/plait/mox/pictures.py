"""`get_data_augmentation_fn` and the table of recipes, by the names of networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from plait.data.columns import ColumnFunction
from plait.data.undecoded import Undecoded
from plait.errors import ConfigError
from plait.mox.spec import ModeKeys
from plait.nets.registry import NETS, info

__all__ = ["PreprocessingKeys", "get_data_augmentation_fn"]


class PreprocessingKeys:
    """The recipe of each network's augmentation; `VGG` and `INCEPTION` stand for their families."""

    ALEXNET_V2 = "vgg_preprocessing"
    CIFARNET = "cifarnet_preprocessing"
    OVERFEAT = "vgg_preprocessing"
    INCEPTION = "inception_preprocessing"
    INCEPTION_V1 = "inception_preprocessing"
    INCEPTION_V2 = "inception_preprocessing"
    INCEPTION_V3 = "inception_preprocessing"
    INCEPTION_V4 = "inception_preprocessing"
    INCEPTION_RESNET_V2 = "inception_preprocessing"
    LENET = "lenet_preprocessing"
    RESNET_V1_18 = "vgg_preprocessing"
    RESNET_V1_50 = "vgg_preprocessing"
    RESNET_V1_50_8K = "vgg_preprocessing"
    RESNET_V1_101 = "vgg_preprocessing"
    RESNET_V1_152 = "vgg_preprocessing"
    RESNET_V1_200 = "vgg_preprocessing"
    RESNET_V2_50 = "vgg_preprocessing"
    RESNET_V2_101 = "vgg_preprocessing"
    RESNET_V2_152 = "vgg_preprocessing"
    RESNET_V2_200 = "vgg_preprocessing"
    RESNEXT_B_50 = "vgg_preprocessing"
    RESNEXT_B_101 = "vgg_preprocessing"
    RESNEXT_C_50 = "vgg_preprocessing"
    RESNEXT_C_101 = "vgg_preprocessing"
    VGG = "vgg_preprocessing"
    VGG_A = "vgg_preprocessing"
    VGG_16 = "vgg_preprocessing"
    VGG_19 = "vgg_preprocessing"
    VGG_A_BN = "vgg_preprocessing"
    VGG_16_BN = "vgg_preprocessing"
    VGG_19_BN = "vgg_preprocessing"
    PVANET = "pvanet_preprocessing"
    MOBILENET_V1 = "inception_preprocessing"
    MOBILENET_V1_075 = "inception_preprocessing"
    MOBILENET_V1_050 = "inception_preprocessing"
    MOBILENET_V1_025 = "inception_preprocessing"
    MOBILENET_V2 = "inception_preprocessing"
    MOBILENET_V2_140 = "inception_preprocessing"
    MOBILENET_V2_035 = "inception_preprocessing"
    RESNET_V1_20 = "cifarnet_preprocessing"
    NASNET_CIFAR = "cifarnet_preprocessing"
    RESNET_V1_110 = "cifarnet_preprocessing"
    NASNET_MOBILE = "inception_preprocessing"
    NASNET_LARGE = "inception_preprocessing"
    PNASNET_LARGE = "inception_preprocessing"
    PNASNET_MOBILE = "inception_preprocessing"


def get_data_augmentation_fn(
    name: str,
    run_mode: str,
    output_height: int | None = None,
    output_width: int | None = None,
    **kwargs: Any,
) -> ColumnFunction:
    """The function that makes a network's input of one picture [height, width, channels], 0 to 255 before and after.

    It takes a column of a data set, or a tensor or array. Without a size, it is the network's own.

    Args:
        name: of a network, or `vgg`, `inception`.
        run_mode: `ModeKeys.TRAIN` draws at random, the others do not.
        output_height: of the result.
        output_width: of the result.
        **kwargs: options of the recipe: `resize_side_min`, `resize_side_max` (vgg), `fast_mode` (inception).

    """
    if run_mode not in (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT, ModeKeys.EXPORT):
        raise ConfigError(f"run_mode={run_mode!r}: write mox.ModeKeys.TRAIN, EVAL or PREDICT")
    if name not in NETS and name not in ("vgg", "inception"):
        info(name)  # says what is near
    family: str = getattr(PreprocessingKeys, name.upper())
    from plait.data.augmentation import augment  # noqa: PLC0415 - it needs OpenCV

    own = NETS[name].image_size if name in NETS else None
    height, width = output_height or output_width or own, output_width or output_height or own
    function = augment(family, run_mode == ModeKeys.TRAIN, height, width, **kwargs)

    def augmented(image: Any, rng: np.random.Generator) -> Any:
        if isinstance(image, (np.ndarray, Undecoded)):
            return function(image, rng)
        if isinstance(image, torch.Tensor):
            return torch.from_numpy(function(image.numpy(), rng))
        return function(np.asarray(image), rng)

    return ColumnFunction(augmented, family)
