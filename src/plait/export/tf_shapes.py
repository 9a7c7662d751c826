"""Operators of PyTorch that reshape, choose, join, sum and multiply, in TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plait.export.tf_pointwise import as_dtype, number
from plait.export.tf_values import Last, Weight, dims_of, last, op, plain, rank, refuse, sizes, static, tf

__all__ = ["reduced"]

_END = 2**63 - 1
"""torch's end of a slice that has none."""


@op("sym_size.int", "any")
def _sym_size(_: Any, x: Any, dim: int) -> Any:
    (axis,) = dims_of(x, dim)
    tensor = x.tensor if isinstance(x, Last) else plain(x)
    known = tensor.shape[axis]
    return tf.shape(tensor, tf.int64)[axis] if known is None else known


@op("torch::sym_float", "any")
def _sym_float(_: Any, size: Any) -> Any:
    return tf.cast(size, tf.float64) if tf.is_tensor(size) else float(size)


@op("view _unsafe_view reshape")
def _view(_: Any, x: Any, shape: Sequence[Any]) -> Any:
    known = [size for size in shape if isinstance(size, int)]
    if len(known) == len(shape) - 1 and all(size > 0 for size in known):
        shape = [size if isinstance(size, int) else -1 for size in shape]
    return tf.reshape(x, sizes(shape))


@op("permute", "any")
def _permute(_: Any, x: Any, dims: Sequence[int]) -> Any:
    places = [dim % len(dims) for dim in dims]
    if isinstance(x, Weight):  # now rather than whenever the model runs
        return x.changed(f"permute{places}", lambda value: value.permute(places))
    if isinstance(x, Last) and places == [0, *range(2, len(dims)), 1]:
        return x.tensor
    if not isinstance(x, Last) and len(dims) > 2 and places == [0, len(dims) - 1, *range(1, len(dims) - 1)]:
        return Last(x)
    return tf.transpose(plain(x), places)


@op("squeeze.dim squeeze.dims")
def _squeeze(out: Any, x: Any, dims: int | Sequence[int]) -> Any:
    axes = [axis for axis in dims_of(x, dims) if x.shape[axis] == 1] if out.ndim != x.shape.rank else []
    return tf.squeeze(x, axes) if axes else x


@op("unsqueeze")
def _unsqueeze(_: Any, x: Any, dim: int) -> Any:
    return tf.expand_dims(x, dim % (x.shape.rank + 1))


@op("expand")
def _expand(_: Any, x: Any, shape: Sequence[Any], *, implicit: bool = False) -> Any:  # noqa: ARG001 - torch's
    new = len(shape) - x.shape.rank
    if x.shape.as_list() == list(shape):
        return x
    found, kept = [], tf.shape(x, tf.int64)
    for place, size in enumerate(shape):
        found.append(kept[place - new] if isinstance(size, int) and size == -1 else size)
    return tf.broadcast_to(x, sizes(found))


@op("copy")
def _copy(out: Any, x: Any, source: Any, **_: Any) -> Any:
    return tf.broadcast_to(tf.cast(source, as_dtype(out.dtype)), tf.shape(x))


@op("repeat")
def _repeat(_: Any, x: Any, times: Sequence[Any]) -> Any:
    for _new in range(len(times) - x.shape.rank):
        x = x[tf.newaxis]
    return tf.tile(x, sizes(times))


@op("cat", "any")
def _cat(out: Any, values: Sequence[Any], dim: int = 0) -> Any:
    dtype, axis = as_dtype(out.dtype), dim % out.ndim
    values = [value for value in values if rank(value) == out.ndim]  # torch leaves empty lists out
    if any(isinstance(value, Last) for value in values):
        axis = {0: 0, 1: out.ndim - 1}.get(axis, axis - 1)
        return Last(tf.concat([tf.cast(last(value), dtype) for value in values], axis))
    return tf.concat([tf.cast(plain(value), dtype) for value in values], axis)


@op("slice.Tensor", "any")
def _slice(_: Any, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    (axis,) = dims_of(x, dim)
    tensor = x.tensor if isinstance(x, Last) else plain(x)
    end = None if isinstance(end, int) and end == _END else end
    found = tensor[(slice(None),) * axis + (slice(start, end, step),)]
    return Last(found) if isinstance(x, Last) else found


@op("select.int")
def _select(_: Any, x: Any, dim: int, index: Any) -> Any:
    return x[(slice(None),) * (dim % x.shape.rank) + (index,)]


@op("slice_scatter")
def _slice_scatter(_: Any, x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    if step != 1:
        refuse("slice_scatter with a step")
    del end  # the source is as long
    before = (slice(None),) * (dim % x.shape.rank)
    head = x[before + (slice(0, 0 if start is None else start),)]  # noqa: RUF005 - Python 3.10 has no star there
    rest = tf.shape(head)[dim] + tf.shape(source)[dim]
    tail = x[before + (slice(rest, tf.shape(x)[dim]),)]  # noqa: RUF005 - same
    return tf.concat([head, tf.cast(source, x.dtype), tail], dim)


@op("split_with_sizes")
def _split(_: Any, x: Any, parts: Sequence[int], dim: int = 0) -> Any:
    return tuple(tf.split(x, static(parts), dim))


@op("flip")
def _flip(_: Any, x: Any, dims: Sequence[int]) -> Any:
    return tf.reverse(x, dims_of(x, dims)) if len(dims) else x


@op("constant_pad_nd", "any")
def _pad(out: Any, x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    tensor = x.tensor if isinstance(x, Last) else plain(x)
    around = [[0, 0] for _ in range(out.ndim)]
    for place in range(len(pad) // 2):
        (axis,) = dims_of(x, out.ndim - 1 - place)
        around[axis] = static(pad[2 * place : 2 * place + 2])
    cut = tuple(slice(max(-low, 0), -max(-high, 0) or None) for low, high in around)
    tensor = tensor[cut] if any(one != slice(0, None) for one in cut) else tensor
    more = [[max(low, 0), max(high, 0)] for low, high in around]
    found = tf.pad(tensor, more, constant_values=number(value, tensor.dtype))
    return Last(found) if isinstance(x, Last) else found


@op("full empty.memory_format")
def _full(out: Any, shape: Sequence[Any], value: Any = 0, **_: Any) -> Any:
    dtype = as_dtype(out.dtype)
    return tf.fill(tf.cast(sizes(shape), tf.int64) if len(shape) else [], number(value, dtype))


@op("scalar_tensor")
def _scalar(out: Any, value: Any, **_: Any) -> Any:
    return number(value, as_dtype(out.dtype))


@op("arange.start_step")
def _arange(out: Any, start: Any, end: Any, step: Any = 1, **_: Any) -> Any:
    dtype = as_dtype(out.dtype)
    inside = dtype if dtype.is_floating else tf.int64
    return tf.cast(tf.range(*(number(one, inside) for one in (start, end, step))), dtype)


@op("embedding")
def _embedding(_: Any, table: Any, index: Any, *_others: Any, **_more: Any) -> Any:
    return tf.gather(table, index)


@op("index_select")
def _index_select(_: Any, x: Any, dim: int, index: Any) -> Any:
    return tf.gather(x, tf.reshape(index, [-1]), axis=dim)


@op("gather")
def _gather(out: Any, x: Any, dim: int, index: Any, **_: Any) -> Any:
    """Along `dim`; of the other dimensions, as much as the index has."""
    if out.ndim == 0:
        return x
    dim %= out.ndim
    wanted = tf.shape(index)
    x = tf.slice(x, [0] * out.ndim, tf.concat([wanted[:dim], tf.shape(x)[dim : dim + 1], wanted[dim + 1 :]], 0))
    return _swapped(tf.gather(_swapped(x, dim), _swapped(index, dim), batch_dims=out.ndim - 1), dim)


@op("index.Tensor")
def _index(_: Any, x: Any, indices: Sequence[Any]) -> Any:
    """`x[:, i, j]`: where the indices stand side by side, so does what they choose; else it comes first."""
    places = [place for place, index in enumerate(indices) if index is not None]
    chosen = [indices[place] for place in places]
    if any(index.dtype == tf.bool for index in chosen):
        refuse("index by truths, whose result may have any size,")
    shape = tf.shape(x, tf.int64)
    positive = [
        tf.where(index < 0, tf.cast(index, tf.int64) + shape[place], tf.cast(index, tf.int64))
        for place, index in zip(places, chosen, strict=True)
    ]
    together = _broadcast(positive)
    others = [place for place in range(x.shape.rank) if place not in places]
    found = tf.gather_nd(tf.transpose(x, places + others), tf.stack(together, -1))
    if places != list(range(places[0], places[-1] + 1)):
        return found
    count, first = together[0].shape.rank, places[0]
    rest = list(range(count, found.shape.rank))
    return tf.transpose(found, [*rest[:first], *range(count), *rest[first:]])


def _broadcast(tensors: Sequence[Any]) -> list[Any]:
    if len(tensors) == 1:
        return list(tensors)
    whole = tensors[0]
    for one in tensors[1:]:
        whole += tf.zeros_like(one)
    return [one + tf.zeros_like(whole) for one in tensors]


def reduced(function: Any, x: Any, dim: Any, keepdim: bool) -> Any:
    """Over some dimensions, or over all for none, wherever the channels are."""
    if isinstance(x, Last):
        axes, middle = dims_of(x, dim), set(range(1, rank(x) - 1))
        if keepdim:
            return Last(function(x.tensor, axes, True))
        if middle <= set(axes):  # what stays stands as it stood
            return function(x.tensor, axes, False)
    tensor = plain(x)
    return function(tensor, dims_of(tensor, dim), keepdim)


@op("sum.dim_IntList sum", "any")
def _sum(out: Any, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    dtype = as_dtype(out.dtype)
    return reduced(lambda tensor, axes, keep: tf.reduce_sum(tf.cast(tensor, dtype), axes, keep), x, dim, keepdim)


@op("mean.dim mean", "any")
def _mean(out: Any, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    dtype = as_dtype(out.dtype)
    return reduced(lambda tensor, axes, keep: tf.reduce_mean(tf.cast(tensor, dtype), axes, keep), x, dim, keepdim)


@op("amax max", "any")
def _amax(_: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return reduced(tf.reduce_max, x, dim, keepdim)


@op("amin min", "any")
def _amin(_: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return reduced(tf.reduce_min, x, dim, keepdim)


@op("any any.dim any.dims", "any")
def _any(_: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return reduced(lambda tensor, axes, keep: tf.reduce_any(tf.cast(tensor, tf.bool), axes, keep), x, dim, keepdim)


@op("prod.dim_int prod")
def _prod(out: Any, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    return tf.reduce_prod(tf.cast(x, as_dtype(out.dtype)), dims_of(x, dim), keepdim)


@op("var.correction")
def _var(_: Any, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    axes = dims_of(x, dim)
    off = tf.math.squared_difference(x, tf.reduce_mean(x, axes, keepdims=True))
    count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), axes)), x.dtype)
    return tf.reduce_sum(off, axes, keepdim) / (count - number(1 if correction is None else correction, x.dtype))


@op("var_mean.correction")
def _var_mean(out: Any, x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _var(out, x, dim, correction=correction, keepdim=keepdim), tf.reduce_mean(x, dims_of(x, dim), keepdim)


@op("linalg_vector_norm")
def _norm(out: Any, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:  # noqa: A002 - torch's
    x, axes = tf.abs(tf.cast(x, as_dtype(out.dtype))), dims_of(x, dim)
    if ord == 2:
        return tf.sqrt(tf.reduce_sum(tf.square(x), axes, keepdim))
    if math.isinf(ord):
        return (tf.reduce_max if ord > 0 else tf.reduce_min)(x, axes, keepdim)
    if ord == 0:
        return tf.reduce_sum(tf.cast(x != 0, x.dtype), axes, keepdim)
    return tf.reduce_sum(x ** number(ord, x.dtype), axes, keepdim) ** number(1 / ord, x.dtype)


@op("argmax")
def _argmax(_: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _place(tf.argmax, x, dim, keepdim)


@op("argmin")
def _argmin(_: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _place(tf.argmin, x, dim, keepdim)


def _place(function: Any, x: Any, dim: int | None, keepdim: bool) -> Any:
    if dim is None:
        found = function(tf.reshape(x, [-1]), 0)
        return tf.reshape(found, [1] * x.shape.rank) if keepdim else found
    found = function(x, dim % x.shape.rank)
    return tf.expand_dims(found, dim) if keepdim else found


@op("max.dim")
def _max(_: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
    return tf.reduce_max(x, dim, keepdim), _place(tf.argmax, x, dim, keepdim)


@op("min.dim")
def _min(_: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
    return tf.reduce_min(x, dim, keepdim), _place(tf.argmin, x, dim, keepdim)


@op("topk")
def _topk(_: Any, x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002 - torch's
    values, places = tf.math.top_k(_swapped(x if largest else -x, dim), tf.cast(k, tf.int32), sorted)
    values = values if largest else -values
    return _swapped(values, dim), tf.cast(_swapped(places, dim), tf.int64)


@op("sort")
def _sort(_: Any, x: Any, dim: int = -1, descending: bool = False) -> Any:
    if x.shape.rank == 0:
        return x, tf.zeros([], tf.int64)
    x = _swapped(x, dim)
    places = tf.argsort(x, -1, "DESCENDING" if descending else "ASCENDING", stable=True)
    found = tf.gather(x, places, batch_dims=x.shape.rank - 1)
    return _swapped(found, dim), tf.cast(_swapped(places, dim), tf.int64)


@op("sort.stable")
def _stable_sort(out: Any, x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    del stable  # every one is here
    return _sort(out, x, dim, descending)


def _swapped(x: Any, dim: int) -> Any:
    """With `dim` last, and back again."""
    places = list(range(x.shape.rank))
    places[dim], places[-1] = places[-1], places[dim]
    return tf.transpose(x, places)


@op("cumsum")
def _cumsum(out: Any, x: Any, dim: int, **_: Any) -> Any:
    return tf.cumsum(tf.cast(x, as_dtype(out.dtype)), dim)


@op("cumprod")
def _cumprod(out: Any, x: Any, dim: int, **_: Any) -> Any:
    return tf.math.cumprod(tf.cast(x, as_dtype(out.dtype)), dim)


@op("_softmax", "any")
def _softmax(out: Any, x: Any, dim: int, half_to_float: bool = False) -> Any:  # noqa: ARG001 - torch's
    return _normed(tf.nn.softmax, out, x, dim)


@op("_log_softmax", "any")
def _log_softmax(out: Any, x: Any, dim: int, half_to_float: bool = False) -> Any:  # noqa: ARG001 - torch's
    return _normed(tf.nn.log_softmax, out, x, dim)


def _normed(function: Any, out: Any, x: Any, dim: int) -> Any:
    (axis,) = dims_of(x, dim)
    tensor = tf.cast(x.tensor if isinstance(x, Last) else plain(x), as_dtype(out.dtype))
    return Last(function(tensor, axis)) if isinstance(x, Last) else function(tensor, axis)


@op("mm bmm")
def _matmul(_: Any, x: Any, y: Any) -> Any:
    return tf.matmul(x, y)


@op("addmm baddbmm")
def _addmm(_: Any, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    found = tf.matmul(x, y)
    found = found if alpha == 1 else found * number(alpha, found.dtype)
    return found + (bias if beta == 1 else bias * number(beta, found.dtype))
