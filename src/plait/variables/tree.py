"""The state of a run as a tree: dicts, lists and plain values, with tensors among the leaves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.errors import CheckpointError

__all__ = ["MARKER", "join_tree", "snapshot", "split_tree"]

MARKER = "$tensor"
"""The key of the object that stands in the JSON part where a tensor was."""

_RESERVED = "__metadata__"  # safetensors writes a tensor of this name and cannot read it back

_Path = tuple[Any, ...]


def split_tree(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Part a tree into JSON and tensors; a tensor's name is its path joined with "/"."""
    splitter = _Splitter()
    try:
        return splitter.split(tree, ()), splitter.tensors
    except RecursionError as error:
        raise CheckpointError("the state is nested too deeply, or contains itself; keep it a plain tree") from error


def join_tree(json_tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The reverse of `split_tree` (what was a tuple is a list now)."""
    if isinstance(json_tree, list):
        return [join_tree(item, tensors) for item in json_tree]
    if not isinstance(json_tree, dict):
        return json_tree
    if MARKER not in json_tree:
        return {key: join_tree(value, tensors) for key, value in json_tree.items()}
    name = json_tree[MARKER]
    if not isinstance(name, str) or name not in tensors:
        raise CheckpointError(f"the state refers to a tensor {name!r} that was not saved with it")
    return tensors[name]


def snapshot(tree: Any) -> Any:
    """A copy that shares no memory with `tree`: its tensors are detached, contiguous and on the CPU."""
    on_gpu: set[torch.device] = set()
    copied = _copied(tree, on_gpu)
    for device in on_gpu:  # once for all of them
        torch.cuda.synchronize(device)
    return copied


def _copied(tree: Any, on_gpu: set[torch.device]) -> Any:
    if isinstance(tree, Tensor):
        return _copy_tensor(tree.detach(), on_gpu)
    if isinstance(tree, dict):
        return {key: _copied(value, on_gpu) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_copied(item, on_gpu) for item in tree]
    if isinstance(tree, tuple):
        return tuple(_copied(item, on_gpu) for item in tree)
    return copy.deepcopy(tree)


def _copy_tensor(tensor: Tensor, on_gpu: set[torch.device]) -> Tensor:
    if not _is_dense(tensor):
        return tensor.clone()  # `split_tree` refuses it, and can say where it was
    if tensor.is_cuda:  # into pinned memory, which torch keeps for the next time
        on_gpu.add(tensor.device)
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)
    # clone() would keep a conjugate or negative view lazy, and the bytes behind it are not its values
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


class _Splitter:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._paths: dict[str, _Path] = {}

    def split(self, node: Any, path: _Path) -> Any:
        if isinstance(node, Tensor):
            return {MARKER: self._take(node, path)}
        if isinstance(node, dict):
            return {self._key(key, path): self.split(value, (*path, key)) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return [self.split(item, (*path, index)) for index, item in enumerate(node)]
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        raise CheckpointError(
            f"the state at {_show(path)} is a {type(node).__name__}, which a checkpoint cannot hold;"
            " use dict, list, None, bool, int, float, str or a torch.Tensor"
        )

    def _key(self, key: Any, path: _Path) -> str:
        if not isinstance(key, str):
            raise CheckpointError(
                f"the dict at {_show(path)} has the key {key!r}; keys must be str, write {str(key)!r}"
            )
        if key == MARKER:
            raise CheckpointError(f"the dict at {_show(path)} has the key {MARKER!r}, which marks tensors; rename it")
        return key

    def _take(self, tensor: Tensor, path: _Path) -> str:
        name = "/".join(str(part) for part in path)
        if name == _RESERVED:
            raise CheckpointError(f"a tensor cannot be called {_RESERVED!r}, safetensors keeps that name; rename it")
        if name in self.tensors:
            raise CheckpointError(
                f"the tensors at {_show(self._paths[name])} and {_show(path)} would both be saved as {name!r};"
                " rename one of them"
            )
        if not _is_dense(tensor):
            raise CheckpointError(
                f"the tensor at {_show(path)} is {tensor.layout} on {tensor.device}, of {tensor.dtype};"
                " only dense tensors with values can be saved, write .to_dense() or .dequantize()"
            )
        self.tensors[name] = tensor
        self._paths[name] = path
        return name


def _show(path: _Path) -> str:
    return "".join(f"[{part!r}]" for part in path) or "its root"
