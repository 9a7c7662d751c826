"""Augmentation: the five families of recipes by which pictures become the inputs of networks.

Pixels are 0 to 255 before and after. Subtracting means and scaling belong to the network, so that batches travel as
bytes and an exported network takes plain pictures.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from plait.data.pictures import Picture, opencv, resize
from plait.data.undecoded import Undecoded
from plait.errors import ConfigError, DataError

__all__ = ["FAMILIES", "Augmentation", "augment"]

Augmentation: TypeAlias = Callable[[Picture | Undecoded, np.random.Generator], Picture]
"""Takes a picture [height, width, 1 or 3], uint8 or float, and where its random numbers come from; gives a new one.

A recipe cuts its part out of the picture before it does anything else, so that no more than that need be decoded."""

_Planes: TypeAlias = list[NDArray[np.float32]]
"""The channels of a picture, each [height, width]."""


def augment(family: str, training: bool, height: int | None, width: int | None, **options: Any) -> Augmentation:
    """The function that makes a `height` x `width` input of a picture by the recipe of `family`, one of `FAMILIES`.

    The recipes, and their options, stand with `_vgg`, `_inception`, `_cifarnet`, `_lenet` and `_pvanet`. Whatever is
    random comes from the generator that is passed in, drawn in an order of the recipe's own: the same state gives the
    same picture, bit for bit. uint8 pictures stay uint8 (rounded), others become float32.
    """
    if family not in _RECIPES:
        raise ConfigError(f"there is no augmentation {family!r}; write one of {', '.join(FAMILIES)}")
    for name, size in (("output_height", height), ("output_width", width)):
        if size is None or size < 1:
            raise ConfigError(f"{name} is {size}; {family} needs the size of the network's input, 1 or more")
    recipe = _RECIPES[family]
    known = [name for name, p in inspect.signature(recipe).parameters.items() if p.kind is p.KEYWORD_ONLY]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"{family} has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return functools.partial(_checked, recipe(training, height, width, **options))


def _checked(recipe: Augmentation, image: Picture | Undecoded, rng: np.random.Generator) -> Picture:
    if image.ndim != 3 or image.shape[2] not in (1, 3) or not image.size:
        raise DataError(f"a picture to augment has shape {list(image.shape)}; give [height, width, 1 or 3 channels]")
    if isinstance(image, Undecoded):
        return recipe(image, rng)
    if image.dtype.kind == "f":
        image = image.astype(np.float32, copy=False)
    elif image.dtype != np.uint8:
        raise DataError(f"a picture to augment is {image.dtype}; give uint8 or float32, 0 to 255")
    return recipe(np.ascontiguousarray(image), rng)


def _vgg(
    training: bool, height: int, width: int, *, resize_side_min: int = 256, resize_side_max: int = 512
) -> Augmentation:
    """`vgg_preprocessing`, also of alexnet and the resnets.

    Training: scale so that the short side is any of 256 to 512 (both options, both included), cut the output out
    anywhere, mirror half of the pictures. Drawn: side, top, left, mirror.
    Otherwise: short side 256 (`resize_side_min`), cut out of the middle.
    """
    if not max(height, width) <= resize_side_min <= resize_side_max:
        raise ConfigError(
            f"an output of {height} x {width} cannot be cut out of pictures scaled to a short side of"
            f" {resize_side_min} to {resize_side_max}; write resize_side_min={max(height, width)} or more,"
            " resize_side_max no less"
        )
    if not training:
        return functools.partial(_scaled_centre, height=height, width=width, side=resize_side_min)
    return functools.partial(_vgg_train, height=height, width=width, sides=(resize_side_min, resize_side_max))


def _vgg_train(
    image: Picture | Undecoded, rng: np.random.Generator, *, height: int, width: int, sides: tuple[int, int]
) -> Picture:
    side = sides[0] + _below(rng, sides[1] - sides[0] + 1)
    scaled = _short_side(image, side)
    top, left = _below(rng, scaled[0] - height + 1), _below(rng, scaled[1] - width + 1)
    mirror = rng.random() < 0.5
    # where it is cut out is random: an eighth of a pixel more or less is nothing, and less has to be computed
    return _contiguous(_scaled_part(image, scaled, (top, left), (height, width), exact=8), mirror)


def _inception(training: bool, height: int, width: int, *, fast_mode: bool = True) -> Augmentation:
    """`inception_preprocessing`, also of the mobilenets and nasnets.

    Training: cut a box out (see `_distorted_box`), scale it to the output, mirror half of the pictures, change
    brightness by up to 32 and saturation by a factor of .5 to 1.5. With fast_mode=False also hue by up to .2 of the
    circle and contrast by a factor of .5 to 1.5, in one of four orders, and scaled by one of four methods.
    Drawn: box, method (slow), mirror, order (slow), changes in their order.
    Otherwise: the middle .875 of height and width, scaled to the output.
    """
    if not training:
        return functools.partial(_inception_eval, height=height, width=width)
    return functools.partial(_inception_train, height=height, width=width, fast=fast_mode)


_COLOUR_ORDERS = (
    ("brightness", "saturation", "hue", "contrast"),
    ("saturation", "brightness", "contrast", "hue"),
    ("contrast", "hue", "brightness", "saturation"),
    ("hue", "saturation", "contrast", "brightness"),
)


def _inception_train(
    image: Picture | Undecoded, rng: np.random.Generator, *, height: int, width: int, fast: bool
) -> Picture:
    cv2 = opencv()
    top, left, box_height, box_width = _distorted_box(image.shape[0], image.shape[1], rng)
    box = image[top : top + box_height, left : left + box_width]
    methods = (cv2.INTER_LINEAR, cv2.INTER_NEAREST, cv2.INTER_CUBIC, cv2.INTER_AREA)
    method = methods[0 if fast else _below(rng, 4)]
    scaled = cv2.resize(box, (width, height), interpolation=method)
    if rng.random() < 0.5:
        scaled = cv2.flip(scaled, 1)
    order = _COLOUR_ORDERS[0][:2] if fast else _COLOUR_ORDERS[_below(rng, 4)]
    planes = [plane.astype(np.float32) for plane in cv2.split(scaled)]
    for change in order:
        planes = _COLOUR_CHANGES[change](planes, rng)
    return _merged(planes, image.dtype)


def _inception_eval(image: Picture | Undecoded, rng: np.random.Generator, *, height: int, width: int) -> Picture:
    del rng  # nothing is random
    top, left = (int((size - size * 0.875) / 2) for size in image.shape[:2])
    return resize(image[top : image.shape[0] - top, left : image.shape[1] - left], height, width)


def _distorted_box(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height and width of a box with a shape (width to height) of .75 to 1.33 and .1 to 1 of the area.

    The recipe says .05 to 1 of the area, and that .1 of the object is covered; the whole picture is the object. Of the
    heights that the shape allows, all are equally likely. After 100 boxes that do not fit it is the whole picture.
    """
    area = height * width
    for _ in range(100):
        shape = 0.75 + rng.random() * (1.33 - 0.75)
        lowest = round(math.sqrt(0.05 * area / shape))
        highest = min(height, int((width + 0.5) / shape), round(math.sqrt(area / shape)))
        box_height = lowest + _below(rng, highest - lowest + 1) if lowest < highest else highest
        box_width = round(box_height * shape)
        if box_width <= width and box_height * box_width >= 0.1 * area and box_height * box_width > 0:
            return _below(rng, height - box_height + 1), _below(rng, width - box_width + 1), box_height, box_width
    return 0, 0, height, width


def _cifarnet(training: bool, height: int, width: int) -> Augmentation:
    """`cifarnet_preprocessing`, also of the small resnets.

    Training: 4 black pixels around, cut the output out anywhere, mirror half of the pictures, change brightness by up
    to 63 and contrast by a factor of .2 to 1.8. Drawn: top, left, mirror, brightness, contrast.
    Otherwise: cut out of the middle, or set into black, to the output's size.
    """
    recipe = _cifarnet_train if training else _fitted
    return functools.partial(recipe, height=height, width=width)


def _cifarnet_train(
    image: Picture | Undecoded, rng: np.random.Generator, *, height: int, width: int, padding: int = 4
) -> Picture:
    room = image.shape[0] + 2 * padding - height, image.shape[1] + 2 * padding - width
    if min(room) < 0:
        raise DataError(
            f"a picture of {image.shape[0]} x {image.shape[1]} with {padding} pixels around it is smaller than the"
            f" output of {height} x {width}; give larger pictures or a smaller output_height and output_width"
        )
    top, left = _below(rng, room[0] + 1) - padding, _below(rng, room[1] + 1) - padding
    mirror = rng.random() < 0.5
    part = _contiguous(_window(image, top, left, height, width), mirror)
    planes = [plane.astype(np.float32) for plane in opencv().split(part)]
    brighter = _brightness(planes, rng, most=63)
    return _merged(_contrast(brighter, rng, least=0.2, most=1.8), image.dtype)


def _lenet(training: bool, height: int, width: int) -> Augmentation:
    """`lenet_preprocessing`: cut out of the middle, or set into black, to the output's size; for training as well."""
    del training  # all the same
    return functools.partial(_fitted, height=height, width=width)


def _pvanet(training: bool, height: int, width: int) -> Augmentation:
    """`pvanet_preprocessing`. No recipe of it is public; this is what its author's PyTorch version does.

    Training: cut out .08 to 1 of the area with a shape of 3/4 to 4/3 (see `_resized_box`), scale it to the output,
    mirror half of the pictures. Drawn: box, mirror.
    Otherwise: short side 256/224 of the output's longer one, cut out of the middle.
    """
    if training:
        return functools.partial(_pvanet_train, height=height, width=width)
    return functools.partial(_scaled_centre, height=height, width=width, side=round(max(height, width) * 256 / 224))


def _pvanet_train(image: Picture | Undecoded, rng: np.random.Generator, *, height: int, width: int) -> Picture:
    top, left, box_height, box_width = _resized_box(image.shape[0], image.shape[1], rng)
    scaled = resize(image[top : top + box_height, left : left + box_width], height, width)
    return _contiguous(scaled, mirror=True) if rng.random() < 0.5 else scaled


def _resized_box(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height and width of a box; area uniform, shape uniform in its logarithm.

    After 10 boxes that do not fit it is the largest of an allowed shape, in the middle.
    """
    for _ in range(10):
        area = (0.08 + rng.random() * 0.92) * height * width
        shape = math.exp((2 * rng.random() - 1) * math.log(4 / 3))
        box_height, box_width = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
        if 0 < box_height <= height and 0 < box_width <= width:
            return _below(rng, height - box_height + 1), _below(rng, width - box_width + 1), box_height, box_width
    box_height, box_width = min(height, max(1, round(width * 4 / 3))), min(width, max(1, round(height * 4 / 3)))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


_RECIPES: dict[str, Callable[..., Augmentation]] = {
    "cifarnet_preprocessing": _cifarnet,
    "inception_preprocessing": _inception,
    "lenet_preprocessing": _lenet,
    "pvanet_preprocessing": _pvanet,
    "vgg_preprocessing": _vgg,
}
FAMILIES = tuple(_RECIPES)
"""The names of the recipes."""


def _scaled_centre(
    image: Picture | Undecoded, rng: np.random.Generator, *, height: int, width: int, side: int
) -> Picture:
    """The middle of the picture whose short side was scaled to `side`."""
    del rng  # nothing is random
    scaled = _short_side(image, side)
    start = (scaled[0] - height) // 2, (scaled[1] - width) // 2
    return _contiguous(_scaled_part(image, scaled, start, (height, width)))


def _fitted(image: Picture | Undecoded, rng: np.random.Generator, *, height: int, width: int) -> Picture:
    """The middle of the picture, or the picture in the middle of black, for each side by itself."""
    del rng  # nothing is random
    top, left = (_middle(size, wanted) for size, wanted in zip(image.shape[:2], (height, width), strict=True))
    return _window(image, top, left, height, width)


def _middle(size: int, wanted: int) -> int:
    return (size - wanted) // 2 if size >= wanted else -((wanted - size) // 2)


def _window(image: Picture | Undecoded, top: int, left: int, height: int, width: int) -> Picture:
    """A part of the picture, that may lie partly outside of it, where all is black."""
    part = np.zeros((height, width, image.shape[2]), dtype=image.dtype)
    inside = image[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    row, column = max(-top, 0), max(-left, 0)
    part[row : row + inside.shape[0], column : column + inside.shape[1]] = inside
    return part


def _short_side(image: Picture | Undecoded, side: int) -> tuple[int, int]:
    """Height and width of the picture when it is scaled so that the shorter of them is `side`."""
    scale = side / min(image.shape[:2])
    return round(image.shape[0] * scale), round(image.shape[1] * scale)


def _scaled_part(
    image: Picture | Undecoded,
    scaled: tuple[int, int],
    start: tuple[int, int],
    size: tuple[int, int],
    *,
    exact: int = 64,
) -> Picture:
    """The part at `start` of `size` of the picture as it were if it had been scaled to `scaled`, to 1 / `exact` pixel.

    Only about that part is computed. OpenCV can scale a part of a picture by a given factor, but takes its first pixel
    for the first of a picture; so the part has to begin where pixels of source and result begin at the same place.
    """
    cv2 = opencv()
    height, width, channels = image.shape
    top, bottom, row, fy = _aligned(height, scaled[0], start[0], size[0], exact)
    left, right, column, fx = _aligned(width, scaled[1], start[1], size[1], exact)
    source = image[top:bottom, left:right]
    # OpenCV would ask Python for this memory, and wait for its turn among the readers
    room = np.empty((round((bottom - top) * fy), round((right - left) * fx), channels), image.dtype)
    part: Picture = cv2.resize(source, None, room, fx=fx, fy=fy, interpolation=cv2.INTER_LINEAR)
    if part.shape[:2] == source.shape[:2] and (fx, fy) != (1, 1):
        # Factors so near to 1 that the size stays: OpenCV has copied. Its other way is exact, but takes twice the time.
        matrix = np.array([[1 / fx, 0, 0.5 / fx - 0.5], [0, 1 / fy, 0.5 / fy - 0.5]])
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        part = cv2.warpAffine(source, matrix, part.shape[1::-1], flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return part[row : row + size[0], column : column + size[1]].reshape(*size, channels)


def _aligned(length: int, scaled: int, start: int, size: int, exact: int) -> tuple[int, int, int, float]:
    """Along one side: where to begin and end in the source, how many pixels of the result to drop then, the factor.

    It begins at the last place up to `start` where a pixel of the result begins within 1 / `exact` of where one of the
    source does. The factor puts the middle of the part where it belongs, so that its ends are off by no more than that.
    """
    near = min(scaled // exact, length // 4)
    # when it grows, a pixel reaches out of its own place, into what has to belong to the part
    reach = max(0, -((length - scaled) // (2 * length)))
    for first in range(start - reach, 0, -1):
        past = first * length % scaled
        if past <= near or past >= scaled - near:
            break
    else:
        first = 0
    begin = (2 * first * length + scaled) // (2 * scaled)
    middle = start + size / 2
    end = int((start + size - 0.5) * length / scaled + 1.5)
    return begin, min(length, end), start - first, (middle - first) / (middle * length / scaled - begin)


def _contiguous(image: Picture, mirror: bool = False) -> Picture:
    """A copy, mirrored if so wished."""
    copied: Picture = opencv().flip(image, 1, np.empty(image.shape, image.dtype)) if mirror else image.copy()
    return copied.reshape(image.shape)


def _below(rng: np.random.Generator, count: int) -> int:
    """One of 0 to `count` - 1; `rng.integers` takes ten times as long."""
    return int(rng.random() * count)


def _brightness(planes: _Planes, rng: np.random.Generator, *, most: float = 32) -> _Planes:
    delta = np.float32((2 * rng.random() - 1) * most)
    return [np.add(plane, delta, out=plane) for plane in planes]


def _contrast(planes: _Planes, rng: np.random.Generator, *, least: float = 0.5, most: float = 1.5) -> _Planes:
    """Scale the distance of each pixel from the mean of its channel."""
    factor = least + rng.random() * (most - least)
    means = [opencv().mean(plane)[0] * (1 - factor) for plane in planes]
    return [plane * np.float32(factor) + np.float32(mean) for plane, mean in zip(planes, means, strict=True)]


def _saturation(planes: _Planes, rng: np.random.Generator) -> _Planes:
    """Scale saturation, up to its most, as HSV has it, without going there.

    With v the largest of a pixel's channels and s its saturation, (v - smallest) / v, every channel c becomes
    v - (v - c) * min(factor, 1 / s). Gray stays gray, and so does a picture of one channel.
    """
    factor = 0.5 + rng.random()
    if len(planes) == 1:
        return planes
    cv2 = opencv()
    value = cv2.max(cv2.max(planes[0], planes[1]), planes[2])
    spread = cv2.subtract(value, cv2.min(cv2.min(planes[0], planes[1]), planes[2]))
    ratio = value / cv2.max(spread, 1e-6, spread)  # all channels alike: any ratio will do
    np.clip(ratio, 0, np.float32(factor), out=ratio)
    for plane in planes:  # in place: memory is what costs time here
        cv2.subtract(value, plane, plane)
        cv2.multiply(plane, ratio, plane)
        cv2.subtract(value, plane, plane)
    return planes


def _hue(planes: _Planes, rng: np.random.Generator) -> _Planes:
    """Turn hue by up to .2 of the circle; what lies below 0 by then has no hue and becomes 0."""
    degrees = (2 * rng.random() - 1) * 0.2 * 360
    if len(planes) == 1:
        return planes
    cv2 = opencv()
    hue, saturation, value = cv2.split(cv2.cvtColor(np.maximum(cv2.merge(planes), 0), cv2.COLOR_RGB2HSV))
    turned = cv2.merge([(hue + np.float32(degrees)) % np.float32(360), saturation, value])
    return list(cv2.split(cv2.cvtColor(turned, cv2.COLOR_HSV2RGB)))


_COLOUR_CHANGES: dict[str, Callable[[_Planes, np.random.Generator], _Planes]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "hue": _hue,
    "saturation": _saturation,
}


def _merged(planes: _Planes, dtype: np.dtype[Any]) -> Picture:
    """The channels as one picture, inside 0 to 255; rounded if it is one of bytes."""
    cv2 = opencv()
    if dtype == np.uint8:
        merged: Picture = cv2.merge([cv2.add(plane, 0, dtype=cv2.CV_8U) for plane in planes])
    else:
        merged = cv2.merge([np.clip(plane, 0, 255) for plane in planes])
    return merged.reshape(*merged.shape[:2], len(planes))
