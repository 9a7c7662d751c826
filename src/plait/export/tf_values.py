"""What stands between an operator of PyTorch and one of TensorFlow: the table, weights, and where the channels are."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from plait.errors import ConfigError

__all__ = ["OPS", "Last", "Op", "Weight", "dims_of", "last", "op", "plain", "rank", "refuse", "sizes", "static", "tf"]


class _Later:
    """TensorFlow, imported when something of it is first used: the table can be read without it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("tensorflow"), name)


tf: Any = _Later()


@dataclass(frozen=True)
class Op:
    """How an operator is written in TensorFlow."""

    function: Callable[..., Any]
    """Gets what torch knows of the result, then the operator's own arguments."""
    layout: str
    """What the function takes: "plain" tensors as torch has them, "pointwise" any layout that all of them have, or
    "any" value as it is."""


OPS: dict[str, Op] = {}
"""Every operator that can be written, by torch's name."""


def op(names: str, layout: str = "plain") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function for some operators, `"add.Tensor add.Scalar"`; a name without an overload is the usual one."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            whole = name if "::" in name else f"aten.{name}" if "." in name else f"aten.{name}.default"
            OPS[whole.replace("::", ".")] = Op(function, layout)
        return function

    return enter


def refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"format 'tf' has no {what}, which the module uses: 'torch' carries every operator and 'onnx' most of them,"
        " write one of those in formats"
    )


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer. It becomes a variable when it is used, in the form in which it is used."""

    name: str
    value: Tensor
    variables: dict[tuple[str, str], Any] = field(repr=False)
    """Those that there are, by name and form."""
    form: str = ""

    def changed(self, form: str, change: Callable[[Tensor], Tensor]) -> Weight:
        """In another form, which is worked out now rather than whenever the model runs."""
        return Weight(self.name, change(self.value), self.variables, f"{self.form}{form}")

    @property
    def tensor(self) -> Any:
        key = (self.name, self.form)
        if key not in self.variables:
            with tf.init_scope():  # a variable lives outside of the function that is being written
                self.variables[key] = tf.Variable(
                    _array(self.value), trainable=self.value.requires_grad, name=self.name
                )
        return self.variables[key]


def _array(value: Tensor) -> Any:
    value = value.detach().contiguous()
    if value.dtype == torch.bfloat16:  # which NumPy lacks
        return tf.cast(value.float().numpy(), tf.bfloat16)
    return value.numpy()


class Last:
    """A tensor whose channels, its second dimension for torch, stand last, as TensorFlow wants them."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self._plain: Any = None

    @property
    def plain(self) -> Any:
        if self._plain is None:
            count = self.tensor.shape.rank
            self._plain = tf.transpose(self.tensor, [0, count - 1, *range(1, count - 1)])
        return self._plain


def plain(value: Any) -> Any:
    """A tensor as torch has it, or what is none as it is."""
    if isinstance(value, Last):
        return value.plain
    if isinstance(value, Weight):
        return tf.convert_to_tensor(value.tensor)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def last(value: Any, count: int | None = None) -> Any:
    """The tensor with its channels last; one of fewer dimensions than `count` gets more in front, as in NumPy."""
    if isinstance(value, Last):
        return value.tensor
    tensor = plain(value)
    while count is not None and tensor.shape.rank < count:
        tensor = tensor[tf.newaxis]
    return tf.transpose(tensor, [0, *range(2, tensor.shape.rank), 1])


def rank(value: Any) -> int:
    if isinstance(value, Weight):
        return value.value.ndim
    found: int = value.tensor.shape.rank if isinstance(value, Last) else value.shape.rank
    return found


def dims_of(value: Any, dims: int | Sequence[int] | None) -> list[int]:
    """Dimensions that torch names, counted from the front, in the tensor inside of `value`; all of them for none."""
    count = rank(value)
    given = [dims] if isinstance(dims, int) else list(dims or range(count))
    found = [dim % count if count else 0 for dim in given] if count else []
    if isinstance(value, Last):
        return [{0: 0, 1: count - 1}.get(dim, dim - 1) for dim in found]
    return found


def static(sizes: Sequence[Any]) -> list[int]:
    """Sizes that have to be numbers."""
    found = []
    for size in sizes:
        number = size if isinstance(size, int) else size.node.maybe_as_int() if hasattr(size, "node") else None
        if number is None:
            refuse("operator over a size that is not known until it runs")
        found.append(number)
    return found


def sizes(given: Sequence[Any]) -> Any:
    """Sizes as TensorFlow takes them; some may be tensors."""
    if all(isinstance(one, int) for one in given):
        return list(given)
    return tf.stack([tf.cast(one, tf.int64) for one in given])
