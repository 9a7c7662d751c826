"""A party's own rows by their keys: where it looks up what the other party asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import DataError

__all__ = ["Rows", "Table", "read_rows"]

Rows = Callable[[NDArray[np.int64]], Mapping[str, NDArray[Any]]]
"""Gives the inputs of the rows with these keys, in their order; LookupError if one of them is not known."""


class Table:
    """Rows in memory: `columns` has the keys under `key`, each once, and every other field row by row beside them."""

    def __init__(self, columns: Mapping[str, NDArray[Any]], key: str = "id") -> None:
        keys = columns.get(key)
        if keys is None or keys.ndim != 1 or keys.dtype.kind not in "iu":
            raise DataError(
                f"rows has {', '.join(columns) or 'nothing'}: give whole numbers as {key!r}, one for each row"
            )
        wrong = [name for name, column in columns.items() if column.shape[:1] != keys.shape]
        if wrong:
            raise DataError(f"rows has {len(keys)} of {key!r} and {columns[wrong[0]].shape[:1]} of {wrong[0]!r}")
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order].astype(np.int64)
        if (self._keys[1:] == self._keys[:-1]).any():
            raise DataError(f"rows has the same {key!r} twice: leave one of each")
        self._columns = {name: column for name, column in columns.items() if name != key}

    def __len__(self) -> int:
        return len(self._keys)

    def __call__(self, keys: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        places = np.searchsorted(self._keys, keys)
        known = places < len(self._keys)
        if not known.all() or (self._keys[places] != keys).any():
            raise LookupError("a key is not in the table")
        rows = self._order[places]
        return {name: column[rows] for name, column in self._columns.items()}


def read_rows(path: str | os.PathLike[str], key: str = "id") -> Table:
    """The rows of a safetensors file."""
    from safetensors import SafetensorError  # noqa: PLC0415 - only who answers reads rows
    from safetensors.numpy import load_file  # noqa: PLC0415

    try:
        columns = load_file(path)
        for name, column in columns.items():
            if column.dtype.kind not in "biuf":  # another package may have taught NumPy bfloat16
                raise TypeError(f"{name} is of {column.dtype}")
    except (OSError, SafetensorError, TypeError) as error:  # the last of a type that NumPy has not, such as bfloat16
        raise DataError(f"{os.fspath(path)} cannot be read: {error}; name a safetensors file of rows") from error
    try:
        return Table(columns, key)
    except DataError as error:
        raise DataError(f"{os.fspath(path)}: {error}") from None
