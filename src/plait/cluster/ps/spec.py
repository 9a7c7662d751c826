"""What the servers hold, as descriptions that travel: variables, tables, and the optimizers that move them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from plait.errors import ClusterError

__all__ = ["DTYPES", "INITIALIZERS", "ModelSpec", "OptimizerSpec", "TableSpec", "VariableSpec"]

DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
"""What may be written where a dtype is asked for."""
INITIALIZERS = ("zeros", "uniform", "normal", "truncated_normal")

_MAX_NAME = 1024
_MAX_COUNT = {"optimizers": 4096, "variables": 100_000, "tables": 4096}
_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 2**40
_MAX_DIM = 2**20
_MAX_OPTIONS = 64
_MAX_SEED = 2**64


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """One parameter group of one optimizer of the workers; its learning rate comes with every push."""

    kind: str
    options: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "options": {key: _plain(value) for key, value in self.options.items()}}

    @classmethod
    def from_json(cls, tree: Any) -> OptimizerSpec:
        """Raises ClusterError for what is no such description; `rules.make` judges the kind and its options."""
        fields = _fields("an optimizer", tree, ("kind", "options"))
        options = fields["options"]
        if not isinstance(options, dict) or len(options) > _MAX_OPTIONS:
            raise ClusterError(f"the options of an optimizer are {_short(options)}: send a dict of plain values")
        for key, value in options.items():
            if not isinstance(key, str) or not _is_option(value):
                raise ClusterError(
                    f"option {_short(key)} of an optimizer is {_short(value)}: send a number, a text, or a few numbers"
                )
        return cls(kind=_name("the kind of an optimizer", fields["kind"]), options=dict(options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableSpec:
    """One dense variable."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    optimizer: int | None
    """The number of the optimizer that moves it; None: it is never trained."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, "optimizer": self.optimizer}

    @classmethod
    def from_json(cls, tree: Any) -> VariableSpec:
        fields = _fields("a variable", tree, ("name", "shape", "dtype", "optimizer"))
        name = _name("the name of a variable", fields["name"])
        shape = fields["shape"]
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
            raise ClusterError(f"the shape of variable {name!r} is {_short(shape)}: send a list of whole numbers")
        sizes = tuple(_integer(f"a size of variable {name!r}", size, 0, _MAX_ELEMENTS) for size in shape)
        _integer(f"the number of elements of variable {name!r}", math.prod(sizes), 0, _MAX_ELEMENTS)
        optimizer = _optimizer(name, fields["optimizer"])
        dtype = _dtype(name, fields["dtype"], trained=optimizer is not None)
        return cls(name=name, shape=sizes, dtype=dtype, optimizer=optimizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table of embeddings: `dim` numbers for each id."""

    name: str
    dim: int
    dtype: str
    rows: int | None
    """Ids are 0 to rows - 1; None: they are any int64, and a row is made when it is first asked for."""
    optimizer: int | None
    initializer: dict[str, Any] = dataclasses.field(default_factory=lambda: {"kind": "zeros", "scale": 0.0, "seed": 0})
    """{"kind": one of INITIALIZERS, "scale": float, "seed": int}; for rows that are made on first use."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, tree: Any) -> TableSpec:
        fields = _fields("a table", tree, ("name", "dim", "dtype", "rows", "optimizer", "initializer"))
        name = _name("the name of a table", fields["name"])
        dim = _integer(f"dim of table {name!r}", fields["dim"], 1, _MAX_DIM)
        rows = fields["rows"]
        if rows is not None:
            rows = _integer(f"rows of table {name!r}", rows, 1, _MAX_ELEMENTS)
            _integer(f"the number of elements of table {name!r}", rows * dim, 1, _MAX_ELEMENTS)
        return cls(
            name=name,
            dim=dim,
            dtype=_dtype(name, fields["dtype"], trained=True),
            rows=rows,
            optimizer=_optimizer(name, fields["optimizer"]),
            initializer=_initializer(name, fields["initializer"]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All that the servers of one model hold; variables and tables are spoken of by their numbers here."""

    optimizers: tuple[OptimizerSpec, ...] = ()
    variables: tuple[VariableSpec, ...] = ()
    tables: tuple[TableSpec, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "optimizers": [item.to_json() for item in self.optimizers],
            "variables": [item.to_json() for item in self.variables],
            "tables": [item.to_json() for item in self.tables],
        }

    @classmethod
    def from_json(cls, tree: Any) -> ModelSpec:
        """Raises ClusterError that says what is wrong: the description may come from any peer."""
        fields = _fields("a model", tree, tuple(_MAX_COUNT))
        for key, most in _MAX_COUNT.items():
            if not isinstance(fields[key], list) or len(fields[key]) > most:
                raise ClusterError(f"{key} of a model is {_short(fields[key])}: send a list of at most {most}")
        spec = cls(
            optimizers=tuple(OptimizerSpec.from_json(item) for item in fields["optimizers"]),
            variables=tuple(VariableSpec.from_json(item) for item in fields["variables"]),
            tables=tuple(TableSpec.from_json(item) for item in fields["tables"]),
        )
        spec.check()
        return spec

    def check(self) -> None:
        """Names are used once, and every optimizer that is named is there."""
        seen: set[str] = set()
        held: list[VariableSpec | TableSpec] = [*self.variables, *self.tables]
        for item in held:
            if item.name in seen:
                raise ClusterError(f"two variables or tables are called {item.name!r}: rename one of them")
            seen.add(item.name)
            if item.optimizer is not None and item.optimizer >= len(self.optimizers):
                raise ClusterError(
                    f"{item.name!r} names optimizer {item.optimizer}, there are {len(self.optimizers)}, counted from 0"
                )


def _fields(what: str, tree: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(tree, dict) or set(tree) != set(names):
        raise ClusterError(f"the description of {what} is {_short(tree)}: send a dict with {', '.join(names)}")
    return tree


def _short(value: Any) -> str:
    """What was sent, cut: a peer may send anything."""
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}" + (f" ({list(value)[:4]!r:.120} ...)" if value else "")
    return f"{value!r:.120}" if not isinstance(value, int) or abs(value) < 2**80 else "a very large number"


def _name(what: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise ClusterError(f"{what} is {_short(value)}: send 1 to {_MAX_NAME} printable characters")
    return value


def _integer(what: str, value: Any, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ClusterError(f"{what} is {_short(value)}: send a whole number from {least} to {most}")
    return value


def _optimizer(name: str, value: Any) -> int | None:
    if value is None:
        return None
    return _integer(f"the optimizer of {name!r}", value, 0, _MAX_COUNT["optimizers"])


def _dtype(name: str, value: Any, *, trained: bool) -> str:
    known = [dtype for dtype, of in DTYPES.items() if of.is_floating_point or not trained]
    if not isinstance(value, str) or value not in known:
        raise ClusterError(f"the dtype of {name!r} is {_short(value)}: send one of {', '.join(known)}")
    return value


def _initializer(name: str, tree: Any) -> dict[str, Any]:
    fields = _fields(f"the initializer of table {name!r}", tree, ("kind", "scale", "seed"))
    kind, scale = fields["kind"], fields["scale"]
    if kind not in INITIALIZERS:
        raise ClusterError(
            f"the initializer of table {name!r} is {_short(kind)}: send one of {', '.join(INITIALIZERS)}"
        )
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 0 <= scale < math.inf:
        raise ClusterError(
            f"the scale of the initializer of table {name!r} is {_short(scale)}: send a number from 0 up"
        )
    seed = _integer(f"the seed of the initializer of table {name!r}", fields["seed"], -_MAX_SEED, _MAX_SEED)
    return {"kind": kind, "scale": float(scale), "seed": seed}


def _is_option(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= 8 and all(_is_option(item) and not isinstance(item, (list, tuple)) for item in value)
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= 64)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
