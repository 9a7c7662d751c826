"""`Sample`: the named tensors that a step sees, and what an `input_fn` returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, TypeAlias

import numpy as np
import torch

from plait.data.sources import ConstantSource, Source, as_source, as_tensor, on_one_device
from plait.errors import DataError

__all__ = ["ColumnGroups", "GroupedColumn", "Sample"]

GroupedColumn: TypeAlias = "str | int | Callable[[dict[Any, Any]], torch.Tensor]"
"""A field's name (its number, in tuples), or a function of the fields."""
ColumnGroups: TypeAlias = "Mapping[str, Sequence[GroupedColumn]]"

_Tensor = torch.Tensor  # one lookup less at every field of every step


class Sample:
    """Fields by name (`sample["x"]`, `sample.x`) and by number (`sample[0]`); those made from a tuple unpack.

    Args:
        features: a dict of tensors (the same batch at every step), or what batches are read from: a source, a
            DataLoader, a list of batches, an iterable. Then `source` reads them, and there are no fields yet.
        columns: groups of columns, joined along dimension 1 at every step:
            `{"wide": ["age", lambda fields: fields["a"] * fields["b"]]}`. A group of feature columns with variables
            is computed where a step looks at it.

    """

    __slots__ = ("_fields", "_raw", "_source", "_width", "columns", "op")

    _raw: Any  # the batch as it came, so that a step pays only for the fields that it looks at
    _fields: dict[Any, Any]  # by name, arrays as tensors; made when first needed
    _width: int  # how many fields unpack; -1: made from a dict, so iteration gives the names
    _source: Source | None
    columns: ColumnGroups | None
    op: Any

    def __init__(self, features: Any, columns: ColumnGroups | None = None) -> None:
        self._raw = {}
        self.columns = _checked(columns)
        self._source = as_source(features)
        if isinstance(self._source, ConstantSource):
            self._raw = Sample.of(features).grouped(columns or {})._fields

    @classmethod
    def of(cls, raw: Any) -> Sample:
        """The sample of one batch: a dict, a tuple or list, a tensor. Arrays become tensors, other values stay."""
        kind = type(raw)
        if isinstance(raw, Sample):
            return raw
        # Made by hand, here: `__init__` is for people, and one call more for every step is not wanted.
        sample = cls.__new__(cls)
        if kind is dict or kind is tuple or kind is list:
            sample._raw = raw  # noqa: SLF001 - its own class
        else:
            fields, width = _fields_of(raw)
            sample._fields = {name: as_tensor(value) for name, value in fields.items()}
            sample._raw, sample._width = sample._fields, width  # noqa: SLF001 - same
        return sample

    def __getitem__(self, name: str | int) -> Any:
        try:
            value = self._raw[name]
        except (LookupError, TypeError):
            value = None
        if type(value) is _Tensor:
            return value
        fields = self._fields
        if name in fields:
            value = fields[name]
            return value.function(fields) if type(value) is _Later else value
        if isinstance(name, int) and -len(fields) <= name < len(fields):
            return self[list(fields)[name]]
        raise KeyError(self._unknown(name))

    def __getattr__(self, name: str) -> Any:
        if name in _SLOTS:
            return self._unset(name)
        try:
            value = self._raw[name]  # as `self[name]` does, with one call less at every field of every step
        except (LookupError, TypeError):
            value = None
        if type(value) is _Tensor:
            return value
        try:
            return self[name]
        except KeyError:
            raise AttributeError(self._unknown(name)) from None

    def _unset(self, slot: str) -> Any:
        """The value of a slot that nothing was put into yet."""
        if slot == "_raw":  # while a copy is being made
            raise AttributeError(slot)
        if slot not in ("_fields", "_width"):
            return None
        fields, self._width = _fields_of(self._raw)
        self._fields = {name: as_tensor(value) for name, value in fields.items()}
        return getattr(self, slot)

    def __iter__(self) -> Iterator[Any]:
        if self._width < 0:
            return iter(self._fields)
        return itertools.islice(self._fields.values(), self._width)

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __len__(self) -> int:
        return len(self._fields)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        if not self._fields:
            return f"Sample(over {type(self._source).__name__})"
        return f"Sample({', '.join(f'{name}: {_shown(value)}' for name, value in self._fields.items())})"

    def unnamed(self) -> list[Any] | None:
        """The fields as a list, if the batch came as a tuple or list; None if it came with names."""
        raw = self._raw
        if type(raw) is tuple or type(raw) is list:
            for value in raw:
                if type(value) is not _Tensor:
                    break
            else:
                return list(raw)
        return list(self) if self._width >= 0 else None

    def keys(self) -> KeysView[Any]:
        return self._fields.keys()

    def values(self) -> ValuesView[Any]:
        return self._fields.values()

    def items(self) -> ItemsView[Any, Any]:
        return self._fields.items()

    @property
    def source(self) -> Source:
        """What the batches are read from."""
        if self._source is None:
            raise DataError("a step's sample is one batch and has no source; write Sample(data) to make one that has")
        return self._source

    @property
    def batch_size(self) -> int | None:
        """The first dimension of the first tensor that has one."""
        for value in self._fields.values():
            if isinstance(value, torch.Tensor) and value.ndim:
                return int(value.shape[0])
        return None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Sample:
        """A sample with every tensor, nested ones too, on `device`."""
        fields = {name: _moved(value, device, non_blocking) for name, value in self._fields.items()}
        return self._with(fields)

    def map(self, function: Callable[[Any], Any]) -> Sample:
        """A sample with `function` of every field."""
        kept = _Later  # what is still to be computed has no values yet
        fields = self._fields.items()
        return self._with({name: value if type(value) is kept else function(value) for name, value in fields})

    def grouped(self, columns: ColumnGroups) -> Sample:
        """A sample with a field more for each group: its columns side by side."""
        fields = dict(self._fields)
        for group, members in columns.items():
            if group in fields:
                raise DataError(f"columns: {group!r} is a field already; give the group another name")
            trained: Any = next((member for member in members if getattr(member, "has_variables", False)), None)
            if trained is not None:
                fields[group] = _Later(trained.in_model(group, members))
                continue
            fields[group] = _joined(group, [self._column(group, member) for member in members])
        return self._with(fields)

    def _with(self, fields: dict[Any, Any]) -> Sample:
        sample = Sample.of(fields)
        sample._width, sample._fields = self._width, fields  # noqa: SLF001 - its own class
        return sample

    def _column(self, group: str, column: GroupedColumn) -> torch.Tensor:
        if not callable(column) and column not in self._fields:
            raise DataError(f"columns: group {group!r} wants {self._unknown(column)}")
        value = as_tensor(column(self._fields) if callable(column) else self._fields[column])
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            raise DataError(
                f"columns: group {group!r} got {_shown(value)} for {column!r}; it has to be a tensor with rows"
            )
        return value.unsqueeze(1) if value.ndim == 1 else value

    def _unknown(self, name: object) -> str:
        if self._source is not None and not self._fields:
            return f"no field {name!r}: this sample stands for a whole input and has fields only inside a step"
        return f"no field {name!r}; there are {', '.join(repr(key) for key in self._fields) or 'none'}"


_SLOTS = frozenset(Sample.__slots__)


class _Later:
    """A group whose values depend on variables: they can be had only inside a model's function."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[dict[Any, Any]], torch.Tensor]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return "computed in a step"


def _fields_of(raw: Any) -> tuple[dict[Any, Any], int]:
    """The fields of the rarer kinds of batches, and how many of them unpack."""
    if isinstance(raw, Mapping):
        return dict(raw), -1
    if isinstance(raw, tuple) and hasattr(raw, "_asdict"):
        return raw._asdict(), len(raw)
    if isinstance(raw, (tuple, list)):
        return dict(enumerate(raw)), len(raw)
    if isinstance(raw, (torch.Tensor, np.ndarray)):
        return {0: raw}, 1
    raise DataError(
        f"a batch is a {type(raw).__name__}: {_shown(raw)}; it has to be a dict, a tuple or list, a tensor, or an array"
    )


def _checked(columns: ColumnGroups | None) -> ColumnGroups | None:
    if columns is not None and not isinstance(columns, Mapping):
        raise DataError(f"columns is a {type(columns).__name__}; write groups of columns, as in {{'deep': [...]}}")
    for group, members in (columns or {}).items():
        listed = isinstance(members, (list, tuple)) and len(members) > 0
        if not listed or not all(isinstance(member, (str, int)) or callable(member) for member in members):
            ids = listed and any(hasattr(member, "num_buckets") for member in members)
            hint = "; wrap columns of ids in indicator_column or embedding_column" if ids else ""
            raise DataError(
                f"columns: group {group!r} is {members!r}; write a list of field names or functions, as in"
                f" {{{group!r}: ['x', lambda fields: ...]}}{hint}"
            )
    return columns


def _joined(group: str, columns: list[torch.Tensor]) -> torch.Tensor:
    try:
        return torch.cat(on_one_device(columns), dim=1)
    except RuntimeError as error:
        shapes = ", ".join(str(list(column.shape)) for column in columns)
        raise DataError(
            f"columns: those of group {group!r} do not fit side by side; their shapes are {shapes}"
        ) from error


def _moved(value: Any, device: torch.device | str, non_blocking: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, dict):
        return {key: _moved(item, device, non_blocking) for key, item in value.items()}
    if callable(getattr(value, "to", None)):  # a packed sequence, a graph: they know what of them moves
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device, non_blocking) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device, non_blocking) for item in value))
    return value


def _shown(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
