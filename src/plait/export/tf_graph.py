"""A graph of `torch.export`, node by node, as tensors of TensorFlow."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from plait.export import tf_layers, tf_shapes  # noqa: F401 - they fill the table
from plait.export.tf_pointwise import as_dtype
from plait.export.tf_values import OPS, Last, Op, Weight, last, plain, rank, refuse, tf

__all__ = ["check", "translate"]

_SIZES = {
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv, operator.neg,
    operator.pow, operator.getitem,
}  # fmt: skip
"""What Python itself does, with sizes that are numbers here and tensors there."""


def check(exported: Any) -> None:
    """An error that names what TensorFlow is not told here; better before any work than in the middle."""
    for node in _needed(exported):
        if node.op == "call_function" and node.target not in _SIZES and _name(node.target) not in OPS:
            refuse(f"operator {_name(node.target)}")
    for name in exported.graph_signature.buffers_to_mutate.values():
        refuse(f"buffer that changes whenever it runs, such as {name!r},")


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - it has no public name
        return str(target)
    return f"{getattr(target, '__module__', 'torch')}.{getattr(target, '__name__', target)}"


def _needed(exported: Any) -> list[fx.Node]:
    """In order, the nodes that the outputs depend on: checks of the tracer and results that nobody reads are not."""
    nodes: dict[str, fx.Node] = {node.name: node for node in exported.graph.nodes}
    todo = [nodes[name] for name in exported.graph_signature.user_outputs]
    found: set[fx.Node] = set(todo)
    while todo:
        new = set(todo.pop().all_input_nodes) - found
        found |= new
        todo += new
    return [node for node in exported.graph.nodes if node in found]


def translate(exported: Any, given: Sequence[Any], variables: dict[tuple[str, str], Any]) -> list[Any]:
    """The outputs for the inputs `given`. The weights that are used are added to `variables`."""
    signature = exported.graph_signature
    values: dict[fx.Node, Any] = {}
    inputs = dict(zip(signature.user_inputs, given, strict=True))
    weights = _weights(exported, variables)
    for node in _needed(exported):
        if node.op == "placeholder":
            values[node] = inputs[node.name] if node.name in inputs else weights[node.name]
        else:
            values[node] = _called(node, values)
    nodes = {node.name: node for node in values}
    return [tf.identity(plain(values[nodes[name]])) for name in signature.user_outputs]


def _weights(exported: Any, variables: dict[tuple[str, str], Any]) -> dict[str, Weight]:
    signature = exported.graph_signature
    kept: Mapping[str, Tensor] = {**exported.state_dict, **exported.constants}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    return {place: Weight(name.removeprefix("module."), kept[name], variables) for place, name in names.items()}


def _called(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: values[one])
    target: Any = node.target
    if target in _SIZES:
        found = target(*args)
        if found is None:
            refuse(f"second result of {_name(node.all_input_nodes[0].target)}")
        return found
    entry = OPS[_name(target)]
    out = node.meta["val"]
    with tf.name_scope(node.name.lstrip("_")):
        return _fitting(_run(entry, out, args, kwargs), out)


def _run(entry: Op, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if entry.layout == "any":
        return entry.function(out, *args, **kwargs)
    if entry.layout == "pointwise" and any(isinstance(one, Last) and rank(one) == out.ndim for one in args):
        return Last(entry.function(out, *(_beside(one, out.ndim) for one in args), **kwargs))
    return entry.function(out, *map(plain, args), **kwargs)


def _beside(value: Any, count: int) -> Any:
    """An argument in the layout of one whose channels stand last."""
    single = not isinstance(value, (Last, Weight)) and not tf.is_tensor(value)
    return plain(value) if single or rank(value) == 0 else last(value, count)


def _fitting(found: Any, out: Any) -> Any:
    """The result, with what torch knows of it: a shape that cannot be is an error here and now."""
    if isinstance(found, tuple):
        return tuple(_fitting(one, form) for one, form in zip(found, out, strict=False))
    if isinstance(found, Last):
        shape = _shape(out)
        return Last(_formed(found.tensor, [shape[0], *shape[2:], shape[1]], out.dtype))
    return _formed(found, _shape(out), out.dtype) if tf.is_tensor(found) and isinstance(out, Tensor) else found


def _formed(tensor: Any, shape: Sequence[int | None], dtype: torch.dtype) -> Any:
    tensor = tf.cast(tensor, as_dtype(dtype))
    tensor.set_shape(shape)
    return tensor


def _shape(out: Tensor) -> list[int | None]:
    return [size if isinstance(size, int) else size.node.maybe_as_int() for size in out.shape]
