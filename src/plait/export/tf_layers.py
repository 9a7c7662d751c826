"""Convolutions, pools, norms and resizing of PyTorch, in TensorFlow, with the channels last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from plait.export.tf_values import Last, Weight, last, op, plain, rank, static, tf

__all__ = ["pads", "shares", "spans", "taps"]

_Array = np.ndarray[Any, Any]


@op("convolution", "any")
def _convolution(
    out: Any,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    count = len(stride)
    x = last(x)
    if count == 1:  # a picture one pixel high
        x, weight = tf.expand_dims(x, 1), _higher(weight)
        stride, padding, dilation, output_padding = [1, *stride], [0, *padding], [1, *dilation], [0, *output_padding]
    if transposed:
        found = _spread_out(x, weight, stride, padding, dilation, output_padding, groups)
    elif len(stride) == 2:
        found = _convolved(x, weight, stride, padding, dilation, groups)
    else:
        found = _convolved_3d(x, weight, stride, padding, dilation, groups)
    found = tf.squeeze(found, 1) if count == 1 else found
    del out
    return Last(found if bias is None else tf.nn.bias_add(found, plain(bias)) if count < 3 else found + plain(bias))


def _higher(weight: Any) -> Any:
    if isinstance(weight, Weight):
        return weight.changed("high", lambda value: value.unsqueeze(2))
    return tf.expand_dims(plain(weight), 2)


def _kernel(weight: Any) -> Any:
    """Height, width, then channels in and out; a weight is kept so."""
    dims = [*range(2, rank(weight)), 1, 0]
    if isinstance(weight, Weight):
        return plain(weight.changed("kernel", lambda value: value.permute(dims)))
    return tf.transpose(plain(weight), dims)


def _convolved(
    x: Any, weight: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Any:
    around = [[0, 0], *([size, size] for size in padding), [0, 0]]
    if groups > 1 and groups == x.shape[-1]:
        return _convolved_by_channel(tf.pad(x, around) if any(padding) else x, weight, stride, dilation)
    found = tf.nn.conv2d(x, _kernel(weight), stride, around, dilations=dilation)
    # TensorFlow joins convolutions with what follows, also these, and then cannot run them on some machines
    return tf.ensure_shape(found, found.shape) if groups > 1 else found


def _convolved_by_channel(x: Any, weight: Any, stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """Padded, dilated and strided by hand: some machines cannot do all of it, and TensorFlow 2.21 ends the process for
    a padding.
    """
    kernel = _stretched(_depthwise(weight, x.shape[-1]), dilation)
    step = stride[0] if stride[0] == stride[1] else 1
    found = tf.raw_ops.DepthwiseConv2dNative(input=x, filter=kernel, strides=[1, step, step, 1], padding="VALID")
    return found if stride[0] == stride[1] else found[:, :: stride[0], :: stride[1]]


def _depthwise(weight: Any, channels: int) -> Any:
    """Height, width, channels, filters of each channel."""
    if isinstance(weight, Weight):
        return plain(
            weight.changed("depth", lambda value: value.permute(2, 3, 0, 1).reshape(*value.shape[2:], channels, -1))
        )
    kernel = tf.transpose(plain(weight), [2, 3, 0, 1])
    return tf.reshape(kernel, [*kernel.shape[:2], channels, -1])


def _stretched(kernel: Any, dilation: Sequence[int]) -> Any:
    """With zeros between its numbers."""
    for axis, factor in enumerate(dilation):
        if factor > 1:
            size = kernel.shape[axis]
            wide = tf.expand_dims(kernel, axis + 1)
            wide = tf.pad(wide, [[0, factor - 1 if place == axis + 1 else 0] for place in range(len(wide.shape))])
            whole = [*kernel.shape[:axis], size * factor, *kernel.shape[axis + 1 :]]
            kernel = tf.reshape(wide, whole)[(slice(None),) * axis + (slice(0, size * factor - factor + 1),)]
    return kernel


def _convolved_3d(
    x: Any, weight: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Any:
    x = tf.pad(x, [[0, 0], *([size, size] for size in padding), [0, 0]])
    kernel = _stretched(_kernel(weight), dilation)
    pairs = zip(tf.split(x, groups, -1), tf.split(kernel, groups, -1), strict=True)
    return tf.concat([tf.nn.conv3d(one, part, [1, *stride, 1], "VALID") for one, part in pairs], -1)


def _spread_out(
    x: Any,
    weight: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    more: Sequence[int],
    groups: int,
) -> Any:
    """A transposed convolution: what TensorFlow has for gradients, then the padding cut off."""
    kernel = _stretched(_kernel(weight), dilation)
    count = len(stride)
    whole = [(x.shape[1 + axis] - 1) * stride[axis] + kernel.shape[axis] for axis in range(count)]
    shape = tf.stack([tf.shape(x)[0], *whole, kernel.shape[-2]])
    function = tf.raw_ops.Conv2DBackpropInput if count == 2 else tf.raw_ops.Conv3DBackpropInputV2
    pairs = zip(tf.split(x, groups, -1), tf.split(kernel, groups, -1), strict=True)
    found = tf.concat(
        [
            function(input_sizes=shape, filter=part, out_backprop=one, strides=[1, *stride, 1], padding="VALID")
            for one, part in pairs
        ],
        -1,
    )
    if any(more):
        found = tf.pad(found, [[0, 0], *([0, size] for size in more), [0, 0]])
    sides = zip(padding, whole, more, strict=True)
    kept = (slice(None), *(slice(cut, size + extra - cut) for cut, size, extra in sides))
    return found[kept]


def pads(size: int, result: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> tuple[int, int]:
    """How much goes before and behind so that the windows fit; with `ceil_mode` the last one reaches over the end."""
    return padding, max(0, (result - 1) * stride + dilation * (kernel - 1) + 1 - size - padding)


def shares(size: int, result: int, kernel: int, stride: int, padding: int, count_padding: bool) -> _Array:
    """By how many numbers each window divides. What lies behind the padding is never counted."""
    start = np.arange(result) * stride - padding
    if count_padding:
        return np.minimum(start + kernel, size + padding) - start
    return np.minimum(start + kernel, size) - np.maximum(start, 0)


def _settings(given: Sequence[int], count: int) -> list[int]:
    found = static(given)
    return found * count if len(found) == 1 else found


def _batched(x: Any, count: int) -> tuple[Any, Any]:
    """Channels last with a batch, and how to give the result back: torch pools a single picture, too."""
    if rank(x) == count + 2:
        return last(x), Last
    return last(tf.expand_dims(plain(x), 0)), lambda found: tf.squeeze(Last(found).plain, 0)


@op("avg_pool2d avg_pool3d", "any")
def _avg_pool(
    out: Any,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,  # noqa: ARG001 - torch's; the result has that size
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    count = 3 if len(kernel_size) == 3 or rank(x) == 5 else 2
    kernel = _settings(kernel_size, count)
    strides, padded = _settings(stride or kernel, count), _settings(padding, count)
    tensor, wrapped = _batched(x, count)
    spans = list(zip(static(tensor.shape[1:-1]), static(out.shape[-count:]), kernel, strides, padded, strict=True))
    around = [pads(*one) for one in spans]
    tensor = tf.pad(tensor, [[0, 0], *around, [0, 0]]) if any(map(any, around)) else tensor
    found = (tf.nn.avg_pool2d if count == 2 else tf.nn.avg_pool3d)(tensor, kernel, strides, "VALID")
    divisors = np.ones([1] * (count + 2))
    for axis, one in enumerate(spans):
        shape = [-1 if place == axis + 1 else 1 for place in range(count + 2)]
        divisors = divisors * shares(*one, count_include_pad).reshape(shape)
    factor = np.prod(kernel) / (divisors if divisor_override is None else np.full_like(divisors, divisor_override))
    return wrapped(found if (factor == 1).all() else found * tf.constant(factor, found.dtype))


@op("max_pool2d_with_indices max_pool3d_with_indices", "any")
def _max_pool(
    out: Any,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,  # noqa: ARG001 - torch's; the result has that size
) -> Any:
    count = 3 if len(kernel_size) == 3 or rank(x) == 5 else 2
    kernel, wide = _settings(kernel_size, count), _settings(dilation, count)
    strides, padded = _settings(stride or kernel, count), _settings(padding, count)
    tensor, wrapped = _batched(x, count)
    spans = zip(static(tensor.shape[1:-1]), static(out[0].shape[-count:]), kernel, strides, padded, wide, strict=True)
    around = [pads(*one) for one in spans]
    if any(map(any, around)):
        least = -np.inf if tensor.dtype.is_floating else tensor.dtype.min
        tensor = tf.pad(tensor, [[0, 0], *around, [0, 0]], constant_values=tf.constant(least, tensor.dtype))
    if wide == [1] * count:
        return wrapped((tf.nn.max_pool2d if count == 2 else tf.nn.max_pool3d)(tensor, kernel, strides, "VALID")), None
    found = tf.nn.pool(tensor, kernel, "MAX", padding="VALID", dilations=wide)
    some = (slice(None), *(slice(None, None, step) for step in strides))
    return wrapped(found[some]), None


def spans(size: int, result: int) -> list[tuple[int, int]]:
    """What each place of an adaptive pool looks at."""
    return [(place * size // result, -(-(place + 1) * size // result)) for place in range(result)]


@op("_adaptive_avg_pool2d _adaptive_avg_pool3d", "any")
def _adaptive_avg_pool(_: Any, x: Any, output_size: Sequence[int]) -> Any:
    return _adapted(tf.reduce_mean, x, output_size)


@op("adaptive_max_pool2d adaptive_max_pool3d", "any")
def _adaptive_max_pool(_: Any, x: Any, output_size: Sequence[int]) -> Any:
    return _adapted(tf.reduce_max, x, output_size), None


def _adapted(function: Any, x: Any, output_size: Sequence[int]) -> Any:
    """One dimension after the other: a window is as wide for all rows as for one."""
    tensor, wrapped = _batched(x, len(output_size))
    for axis, result in enumerate(static(output_size), start=1):
        places = [range(*span) for span in spans(tensor.shape[axis], result)]
        windows = [tf.gather(tensor, list(one), axis=axis) for one in places]
        tensor = tf.concat([function(window, axis, keepdims=True) for window in windows], axis)
    return wrapped(tensor)


@op("_native_batch_norm_legit_no_training", "any")
def _batch_norm(
    _: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple[Any, None, None]:
    del momentum
    tensor = last(x) if rank(x) > 2 else plain(x)
    mean, variance = plain(mean), plain(variance)
    scale = tf.ones_like(mean) if weight is None else plain(weight)
    offset = tf.zeros_like(mean) if bias is None else plain(bias)
    if tensor.shape.rank == 4 and tensor.dtype == mean.dtype == tf.float32:
        found = tf.raw_ops.FusedBatchNormV3(
            x=tensor, scale=scale, offset=offset, mean=mean, variance=variance, epsilon=eps, is_training=False
        )[0]
    else:
        found = tf.nn.batch_normalization(tensor, mean, variance, offset, scale, eps)
    return (Last(found) if rank(x) > 2 else found), None, None


@op("_native_batch_norm_legit.no_stats", "any")
def _instance_norm(
    _: Any, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, None, None]:
    """With what the batch itself has: of one picture whose channels are those of all pictures."""
    del training, momentum
    tensor = plain(x)
    axes = [place for place in range(tensor.shape.rank) if place != 1]
    shape = [-1, *[1] * (tensor.shape.rank - 2)]
    found = _standard(tensor, axes, eps)
    found = found if weight is None else found * tf.reshape(plain(weight), shape)
    return (found if bias is None else found + tf.reshape(plain(bias), shape)), None, None


def _standard(x: Any, axes: Sequence[int], eps: float) -> Any:
    mean = tf.reduce_mean(x, axes, keepdims=True)
    off = x - mean
    variance = tf.reduce_mean(tf.square(off), axes, keepdims=True)
    return off * tf.math.rsqrt(variance + tf.constant(eps, x.dtype))


@op("native_layer_norm")
def _layer_norm(_: Any, x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Any, None, None]:
    count = x.shape.rank
    found = _standard(x, list(range(count - len(shape), count)), eps)
    found = found if weight is None else found * weight
    return (found if bias is None else found + bias), None, None


@op("native_group_norm", "any")
def _group_norm(
    _: Any, x: Any, weight: Any, bias: Any, rows: Any, channels: int, pixels: Any, groups: int, eps: float
) -> tuple[Any, None, None]:
    del rows, pixels
    tensor = last(x) if rank(x) > 2 else plain(x)
    middle = tensor.shape[1:-1]
    grouped = tf.reshape(tensor, [-1, *middle, groups, channels // groups])
    axes = [*range(1, 1 + len(middle)), len(middle) + 2]
    found = tf.reshape(_standard(grouped, axes, eps), [-1, *middle, channels])
    found = found if weight is None else found * plain(weight)
    found = found if bias is None else found + plain(bias)
    return (Last(found) if rank(x) > 2 else found), None, None


def taps(matrix: _Array) -> list[tuple[_Array, _Array]]:
    """A matrix with few numbers in a row as places and factors: the first number of every row, the second, ..."""
    found = []
    rest = matrix.copy()
    rows = np.arange(len(matrix))
    while rest.any():
        places = np.abs(rest).argmax(1)
        found.append((places, rest[rows, places]))
        rest[rows, places] = 0
    return found


@op("upsample_nearest2d.vec", "any")
def _nearest(out: Any, x: Any, size: Any, factors: Any) -> Any:
    return _resized(torch.ops.aten.upsample_nearest2d.vec, out, x, size, factors)


@op("upsample_bilinear2d.vec", "any")
def _bilinear(out: Any, x: Any, size: Any, align_corners: bool, factors: Any) -> Any:
    return _resized(torch.ops.aten.upsample_bilinear2d.vec, out, x, size, factors, align_corners)


def _resized(resize: Any, out: Any, x: Any, size: Any, factors: Any, *more: Any) -> Any:
    """One dimension after the other. Torch itself tells from where each number comes, with unit vectors."""
    tensor = last(x)
    for axis, result in enumerate(static(out.shape[-2:])):
        old = tensor.shape[1 + axis]
        shape = [1, old, old, 1] if axis == 0 else [1, old, 1, old]
        wanted = None if size is None else [result, 1][:: 1 if axis == 0 else -1]
        scales = None if factors is None else [factors[axis], 1.0][:: 1 if axis == 0 else -1]
        units = torch.eye(old, dtype=torch.float64 if out.dtype == torch.float64 else torch.float32).reshape(shape)
        matrix = resize(units, wanted, *more, scales).reshape(old, result).T.numpy()
        tensor = _mixed(tensor, matrix, 1 + axis)
    return Last(tensor)


def _mixed(tensor: Any, matrix: _Array, axis: int) -> Any:
    found = None
    for places, factors in taps(matrix):
        part = tf.gather(tensor, places, axis=axis)
        if not (factors == 1).all():
            shape = [-1 if place == axis else 1 for place in range(tensor.shape.rank)]
            part *= tf.constant(factors.reshape(shape), tensor.dtype)
        found = part if found is None else found + part
    return found
