"""Where tensors lie: names, types and shapes at once, the numbers a few tensors at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import CheckpointError
from plait.inspection.reports import Grid, number, progress
from plait.inspection.statistics import Statistics
from plait.variables.tf_bundle import TensorInfo, list_bundle, read_bundle, to_torch_layout
from plait.variables.tf_table import reading
from plait.variables.tf_v1 import is_v1, list_v1, read_v1

__all__ = [
    "CHECKPOINT",
    "EXPORT",
    "SAFETENSORS",
    "TENSORFLOW",
    "Entry",
    "Tensors",
    "as_variables",
    "from_safetensors",
    "from_tensorflow",
    "looks_like_safetensors",
    "statistics_cells",
    "tensor_grid",
    "tensors_facts",
]

CHECKPOINT, EXPORT = "plait checkpoint", "export"
SAFETENSORS, TENSORFLOW = "safetensors file", "TensorFlow checkpoint"

_GROUP_BYTES = 64 << 20
"""What is read at once: more only where one tensor is larger."""
_VARIABLES = "variables/"
"""What the names of a model's own variables begin with in a checkpoint of plait's."""
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""safetensors' names for types; others are shown as they are, and not read."""
_COLUMNS = ("mean", "deviation", "min", "max", "zeros", "nans", "infinite")


@dataclass(frozen=True)
class Entry:
    """What is known of a tensor before it is read."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    readable: bool = True


@dataclass(frozen=True)
class Tensors:
    """The tensors of one place; `read` gives those of the names asked for."""

    kind: str
    path: Path
    entries: Mapping[str, Entry]
    read: Callable[[Sequence[str]], Mapping[str, Tensor]]

    def each(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of these names that can be read, in their order; few are in memory at a time."""
        for group in self._groups(names):
            found = self.read(group)
            yield from ((name, found[name]) for name in group)

    def _groups(self, names: Iterable[str]) -> Iterator[list[str]]:
        group: list[str] = []
        size = 0
        for name in names:
            entry = self.entries[name]
            if not entry.readable:
                continue
            if group and size + entry.nbytes > _GROUP_BYTES:
                yield group
                group, size = [], 0
            group.append(name)
            size += entry.nbytes
        if group:
            yield group


def looks_like_safetensors(path: Path) -> bool:
    """Whether the file is called so, or begins with the length of a header and with the header."""
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") + 8 <= path.stat().st_size


def from_safetensors(path: Path, kind: str = SAFETENSORS) -> Tensors:
    """A file of safetensors."""
    from safetensors import safe_open  # noqa: PLC0415 - one of several formats

    with reading(path), safe_open(path, "pt"), path.open("rb") as file:  # opened: its header is sound
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    entries = {name: _safetensors_entry(told) for name, told in sorted(header.items())}

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        with reading(path), safe_open(path, "pt") as opened:
            return {name: opened.get_tensor(name) for name in names}

    return Tensors(kind, path, entries, read)


def from_tensorflow(path: Path) -> Tensors:
    """A checkpoint of TensorFlow's, of the older or the newer kind."""
    old = is_v1(path)
    listed: Mapping[str, TensorInfo] = list_v1(path) if old else list_bundle(path)
    found = sorted(listed.items())
    entries = {name: Entry(info.dtype, info.shape, info.nbytes, info.readable) for name, info in found}
    return Tensors(TENSORFLOW, path, entries, lambda names: (read_v1 if old else read_bundle)(path, names))


def as_variables(tensors: Tensors) -> Tensors:
    """As `ModelBank` loads them: a model's variables only, "/" for ".", dimensions in torch's order."""
    before = _VARIABLES if tensors.kind == CHECKPOINT else ""
    turn = to_torch_layout if tensors.kind == TENSORFLOW else _as_it_is
    stored: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    for name, entry in tensors.entries.items():
        if not name.startswith(before):
            continue
        known_as = name.removeprefix(before).replace(".", "/")
        if known_as in stored:
            raise CheckpointError(f"{tensors.path} has {known_as!r} twice, once written with '.'; rename one of them")
        stored[known_as] = name
        shape = tuple(turn(name, torch.empty(entry.shape, device="meta")).shape)
        entries[known_as] = Entry(entry.dtype, shape, entry.nbytes, entry.readable)

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        found = tensors.read([stored[name] for name in names])
        return {name: turn(stored[name], found[stored[name]]) for name in names}

    return Tensors(tensors.kind, tensors.path, entries, read)


def tensors_facts(tensors: Tensors, *, stats: bool) -> dict[str, Any]:
    """The tensors and their total for JSON."""
    found = _statistics(tensors) if stats else {}
    listed = []
    for name, entry in tensors.entries.items():
        facts = {"name": name, "dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.nbytes}
        listed.append({**facts, "statistics": found.get(name)} if stats else facts)
    entries = tensors.entries.values()
    total = {
        "tensors": len(listed),
        "numbers": sum(math.prod(entry.shape) for entry in entries),
        "bytes": sum(entry.nbytes for entry in entries),
    }
    return {"tensors": listed, "total": total}


def tensor_grid(facts: Mapping[str, Any]) -> Grid:
    """The table of what `tensors_facts` found."""
    stats = any("statistics" in tensor for tensor in facts["tensors"])
    rows = []
    for tensor in facts["tensors"]:
        row = [tensor["name"], tensor["dtype"], str(tensor["shape"]), f"{tensor['bytes']:,}"]
        rows.append([*row, *statistics_cells(tensor["statistics"])] if stats else row)
    total = facts["total"]
    last = [f"total: {total['tensors']}", "", f"{total['numbers']:,} numbers", f"{total['bytes']:,}"]
    more = _COLUMNS if stats else ()
    return Grid(
        ("tensor", "dtype", "shape", "bytes", *more),
        rows,
        total=[*last, *("" for _ in more)],
        right=frozenset({"bytes", *_COLUMNS}),
    )


def statistics_cells(facts: Mapping[str, Any] | None) -> list[str]:
    """Statistics in the order of their columns."""
    if facts is None:
        return ["-"] * len(_COLUMNS)
    zeros = "-" if facts["zeros"] is None else f"{facts['zeros']:.1%}"
    middle = [number(facts[name]) for name in _COLUMNS[:4]]
    return [*middle, zeros, f"{facts['nans']:,}", f"{facts['infinite']:,}"]


def _statistics(tensors: Tensors) -> dict[str, dict[str, Any]]:
    found = {}
    with progress(f"reading {tensors.path.name}", sum(entry.nbytes for entry in tensors.entries.values())) as advance:
        for name, tensor in tensors.each(tensors.entries):
            statistics = Statistics()
            statistics.add(tensor)
            found[name] = statistics.facts()
            advance(tensor.nbytes)
    return found


def _as_it_is(name: str, tensor: Tensor) -> Tensor:  # noqa: ARG001 - the shape of to_torch_layout
    return tensor


def _safetensors_entry(told: Mapping[str, Any]) -> Entry:
    begin, end = told["data_offsets"]
    dtype = _DTYPES.get(told["dtype"])
    return Entry(dtype or told["dtype"], tuple(told["shape"]), end - begin, dtype is not None)
