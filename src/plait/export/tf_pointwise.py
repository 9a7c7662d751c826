"""Operators of PyTorch that work on each number by itself, in TensorFlow."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from plait.export.tf_values import op, refuse, tf

__all__ = ["as_dtype", "common", "number"]


def as_dtype(dtype: torch.dtype) -> Any:
    try:
        return tf.as_dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        refuse(f"{dtype}")


def number(value: Any, dtype: Any) -> Any:
    """A tensor or a plain number as a tensor of `dtype`."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.constant(value, dtype)


def common(*values: Any) -> Any:
    """The dtype in which torch compares these: a tensor counts for more than a single number."""
    return as_dtype(torch.result_type(*(_sample(value) if tf.is_tensor(value) else value for value in values)))


def _sample(tensor: Any) -> torch.Tensor:
    return torch.zeros((1,) * bool(tensor.shape.rank), dtype=getattr(torch, tensor.dtype.name))


def _unary(name: str, function: Callable[[Any], Any]) -> None:
    """Numbers are made what the result is first: the root of an integer is a float."""
    op(name, "pointwise")(lambda out, x: function(tf.cast(x, as_dtype(out.dtype))))


def _binary(names: str, function: Callable[[Any, Any], Any]) -> None:
    def write(out: Any, x: Any, y: Any) -> Any:
        dtype = as_dtype(out.dtype)
        return function(number(x, dtype), number(y, dtype))

    op(names, "pointwise")(write)


def _comparison(name: str, function: Callable[[Any, Any], Any]) -> None:
    def write(_: Any, x: Any, y: Any) -> Any:
        dtype = common(x, y)
        return function(number(x, dtype), number(y, dtype))

    op(f"{name}.Tensor {name}.Scalar", "pointwise")(write)


def _logical(names: str, of_truths: Callable[..., Any]) -> None:
    op(names, "pointwise")(lambda _, *values: of_truths(*(number(value, tf.bool) for value in values)))


def _bitwise(names: str, of_truths: Callable[..., Any], of_bits: Callable[..., Any]) -> None:
    def write(out: Any, *values: Any) -> Any:
        dtype = as_dtype(out.dtype)
        return (of_truths if dtype == tf.bool else of_bits)(*(number(value, dtype) for value in values))

    op(names, "pointwise")(write)


def _tf(path: str) -> Callable[..., Any]:
    """A function of TensorFlow by its name: TensorFlow itself is not imported yet."""

    def call(*values: Any) -> Any:
        return functools.reduce(getattr, path.split("."), tf)(*values)

    return call


for _name in (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1",
    "floor", "log", "log1p", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "tan",
    "tanh",
):  # fmt: skip
    _unary(_name, _tf(f"math.{_name}"))
for _name in ("atan2", "maximum", "minimum"):
    _binary(_name, _tf(f"math.{_name}"))
for _name, _ours in {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}.items():  # fmt: skip
    _comparison(_name, _tf(f"math.{_ours}"))
for _name in ("and", "or", "xor"):
    _logical(f"logical_{_name}", _tf(f"math.logical_{_name}"))
    _bitwise(
        f"bitwise_{_name}.Tensor bitwise_{_name}.Scalar",
        _tf(f"math.logical_{_name}"),
        _tf(f"bitwise.bitwise_{_name}"),
    )
_logical("logical_not", _tf("math.logical_not"))
_bitwise("bitwise_not", _tf("math.logical_not"), _tf("bitwise.invert"))
_unary("relu", _tf("nn.relu"))
_unary("neg", lambda x: -x)
_unary("trunc", lambda x: tf.where(x < 0, tf.math.ceil(x), tf.math.floor(x)) if x.dtype.is_floating else x)
_unary("log2", lambda x: tf.math.log(x) / tf.constant(math.log(2), x.dtype))
_unary("log10", lambda x: tf.math.log(x) / tf.constant(math.log(10), x.dtype))
_binary("mul.Tensor mul.Scalar", lambda x, y: tf.logical_and(x, y) if x.dtype == tf.bool else x * y)
_binary("div.Tensor div.Scalar", lambda x, y: x / y)
_binary("remainder.Tensor remainder.Scalar", _tf("math.floormod"))
_binary("fmod.Tensor fmod.Scalar", _tf("truncatemod"))
_binary("hypot", lambda x, y: tf.sqrt(x * x + y * y))


@op("add.Tensor add.Scalar", "pointwise")
def _add(out: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    dtype = as_dtype(out.dtype)
    if dtype == tf.bool:
        return tf.logical_or(x, number(y, dtype))
    return number(x, dtype) + _times(number(y, dtype), alpha)


@op("sub.Tensor sub.Scalar", "pointwise")
def _sub(out: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    dtype = as_dtype(out.dtype)
    return number(x, dtype) - _times(number(y, dtype), alpha)


@op("rsub.Tensor rsub.Scalar", "pointwise")
def _rsub(out: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    return _sub(out, y, x, alpha)


def _times(value: Any, factor: Any) -> Any:
    return value if isinstance(factor, int) and factor == 1 else value * number(factor, value.dtype)


@op("div.Tensor_mode div.Scalar_mode floor_divide", "pointwise")
def _rounded_quotient(out: Any, x: Any, y: Any, rounding_mode: str | None = "floor") -> Any:
    dtype = as_dtype(out.dtype)
    x, y = number(x, dtype), number(y, dtype)
    if rounding_mode is None:
        return x / y
    if not dtype.is_floating:
        return tf.math.floordiv(x, y) if rounding_mode == "floor" else tf.truncatediv(x, y)
    found = x / y
    return (
        tf.math.floor(found) if rounding_mode == "floor" else tf.where(found < 0, tf.math.ceil(found), tf.floor(found))
    )


@op("pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar", "pointwise")
def _pow(out: Any, x: Any, y: Any) -> Any:
    dtype = as_dtype(out.dtype)
    if not tf.is_tensor(y) and y in {2, 0.5}:
        return tf.square(tf.cast(x, dtype)) if y == 2 else tf.sqrt(tf.cast(x, dtype))
    return tf.pow(number(x, dtype), number(y, dtype))


@op("isnan", "pointwise")
def _isnan(_: Any, x: Any) -> Any:
    return tf.math.is_nan(x) if x.dtype.is_floating else tf.zeros_like(x, tf.bool)


@op("isinf", "pointwise")
def _isinf(_: Any, x: Any) -> Any:
    return tf.math.is_inf(x) if x.dtype.is_floating else tf.zeros_like(x, tf.bool)


@op("clamp clamp.Tensor", "pointwise")
def _clamp(out: Any, x: Any, least: Any = None, most: Any = None) -> Any:
    dtype = as_dtype(out.dtype)
    x = tf.cast(x, dtype)
    x = x if least is None else tf.maximum(x, number(least, dtype))
    return x if most is None else tf.minimum(x, number(most, dtype))


@op("hardtanh", "pointwise")
def _hardtanh(out: Any, x: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    return _clamp(out, x, min_val, max_val)


@op("leaky_relu", "pointwise")
def _leaky_relu(_: Any, x: Any, slope: float = 0.01) -> Any:
    return tf.where(x > 0, x, x * tf.constant(slope, x.dtype))


@op("elu", "pointwise")
def _elu(_: Any, x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    negative = tf.constant(alpha, x.dtype) * tf.math.expm1(tf.minimum(x, 0) * tf.constant(input_scale, x.dtype))
    return tf.where(x > 0, x, negative) * tf.constant(scale, x.dtype)


@op("gelu", "pointwise")
def _gelu(_: Any, x: Any, approximate: str = "none") -> Any:
    return tf.nn.gelu(x, approximate=approximate == "tanh")


@op("where.self where.ScalarOther where.ScalarSelf where.Scalar", "pointwise")
def _where(out: Any, condition: Any, x: Any, y: Any) -> Any:
    dtype = as_dtype(out.dtype)
    return tf.where(condition, number(x, dtype), number(y, dtype))


@op("clone alias detach lift_fresh_copy _to_copy", "pointwise")
def _same(out: Any, x: Any, **_: Any) -> Any:
    """A copy; `_to_copy` may have another dtype, and the device and the order in memory are nobody's business."""
    if x.dtype.is_floating and not out.dtype.is_floating_point and out.dtype != torch.bool:
        x = tf.cast(x, tf.int64)  # towards zero, and around as torch does it for small integers
    return tf.cast(x, as_dtype(out.dtype))


@op("full_like", "pointwise")
def _full_like(out: Any, x: Any, value: Any, **_: Any) -> Any:
    dtype = as_dtype(out.dtype)
    return tf.zeros_like(x, dtype) + number(value, dtype) if dtype != tf.bool else tf.fill(tf.shape(x), bool(value))
