"""Tables in files: CSV, TFRecord and Parquet, read twice, in pieces, and written in another order."""

from __future__ import annotations

import csv
import importlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.atomic import atomic_path
from plait.data.example import parse_example
from plait.data.tfrecord import TFRecordWriter, read_records
from plait.errors import ConfigError, DataError

__all__ = ["CsvTable", "ParquetTable", "RecordTable", "Table", "open_table"]

MAX_FIELD = 1 << 24
"""Characters of one field of a CSV file."""
_LENGTH = struct.Struct("<I")


class Table(Protocol):
    """Rows in a file. A piece is what a few rows are kept as; only the table itself looks inside."""

    suffix: str

    def keys(self, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        """The values of the key columns, row by row."""

    def pieces(self) -> Iterator[tuple[int, Any]]:
        """All rows, some at a time: how many they are, and what they are."""

    def spill(self, piece: Any, places: NDArray[np.intp], path: Path) -> None:
        """Append the rows at these places of a piece to a file."""

    def gather(self, path: Path, order: NDArray[np.intp]) -> Any:
        """What was spilled into a file, as a piece, in another order. The file need not be there."""

    def write(self, pieces: Iterator[tuple[Any, int, int]], path: Path) -> None:
        """Write rows, from and to a place in each piece, into a file that is there when it is whole."""


def open_table(path: Path) -> Table:
    """The table in a file, by the end of its name."""
    if not path.is_file():
        raise DataError(f"{path} is not there, or no file: give a CSV, TFRecord or Parquet file")
    kinds: dict[str, type[CsvTable | RecordTable | ParquetTable]] = {
        ".csv": CsvTable,
        ".tsv": CsvTable,
        ".tfrecord": RecordTable,
        ".tfrecords": RecordTable,
        ".parquet": ParquetTable,
    }
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"{path}: the name of a table ends in one of {', '.join(kinds)}")
    return kind(path)


class _Lines:
    """Pieces that are lists of bytes; each row is spilled with its length before it."""

    piece_rows = 4096

    def pieces(self) -> Iterator[tuple[int, list[bytes]]]:
        rows = self.rows()
        while piece := list(itertools.islice(rows, self.piece_rows)):
            yield len(piece), piece

    def rows(self) -> Iterator[bytes]:
        raise NotImplementedError

    def spill(self, piece: list[bytes], places: NDArray[np.intp], path: Path) -> None:
        chosen = [piece[place] for place in places.tolist()]
        with path.open("ab") as file:
            file.write(b"".join([part for row in chosen for part in (_LENGTH.pack(len(row)), row)]))

    def gather(self, path: Path, order: NDArray[np.intp]) -> list[bytes]:
        data = path.read_bytes() if path.exists() else b""
        rows, at = [], 0
        while at < len(data):
            begin = at + _LENGTH.size
            at = begin + _LENGTH.unpack_from(data, at)[0]
            rows.append(data[begin:at])
        return [rows[place] for place in order.tolist()]


class CsvTable(_Lines):
    """A CSV file (comma; .tsv: tab) in UTF-8, with names in its first line. Rows are written byte by byte as read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.suffix = path.suffix.lower()
        self._delimiter = "\t" if self.suffix == ".tsv" else ","

    def keys(self, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        parsed = self._parsed()
        header, _ = next(parsed)
        missing = [name for name in columns if header.count(name) != 1]
        if missing:
            raise DataError(f"{self.path} has no column {missing[0]!r}, or has it twice: its columns are {header}")
        places = [header.index(name) for name in columns]
        for number, (fields, _) in enumerate(parsed, 1):
            if len(fields) != len(header):
                raise DataError(f"{self.path}: row {number} has {len(fields)} fields, and the first line {len(header)}")
            yield [fields[place] for place in places]

    def rows(self) -> Iterator[bytes]:
        for _, text in itertools.islice(self._parsed(), 1, None):
            yield text.encode()

    def write(self, pieces: Iterator[tuple[list[bytes], int, int]], path: Path) -> None:
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            file.write(next(self._parsed())[1].encode())
            for piece, begin, end in pieces:
                file.write(b"".join(piece[begin:end]))

    def _parsed(self) -> Iterator[tuple[list[str], str]]:
        """Each record's fields and its text; a field may hold line breaks. Empty lines are no records."""
        taken: list[str] = []

        def lines() -> Iterator[str]:
            for line in file:
                taken.append(line)
                yield line

        csv.field_size_limit(max(csv.field_size_limit(), MAX_FIELD))
        empty = True
        with self.path.open(encoding="utf-8-sig", newline="") as file:
            try:
                for fields in csv.reader(lines(), delimiter=self._delimiter, strict=True):
                    text = "".join(taken)
                    taken.clear()
                    if fields:
                        empty = False
                        yield fields, text if text.endswith(("\n", "\r")) else text + "\n"
            except (csv.Error, UnicodeDecodeError) as error:
                raise DataError(f"{self.path} is no CSV file in UTF-8: {error}") from error
        if empty:
            raise DataError(f"{self.path} is empty: its first line has to name the columns")


class RecordTable(_Lines):
    """A TFRecord file of Examples. A key column is a feature with one value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.suffix = path.suffix.lower()

    def keys(self, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        for number, record in enumerate(read_records(self.path), 1):
            found = parse_example(record, columns)
            yield [self._value(found.get(name, ()), name, number) for name in columns]

    def _value(self, values: Any, name: str, number: int) -> Any:
        if len(values) != 1:
            raise DataError(f"{self.path}: row {number} has {len(values)} values of {name!r}, and a key has one")
        return values[0].item() if isinstance(values, np.ndarray) else values[0]

    def rows(self) -> Iterator[bytes]:
        return map(bytes, read_records(self.path))

    def write(self, pieces: Iterator[tuple[list[bytes], int, int]], path: Path) -> None:
        with TFRecordWriter(path) as writer:
            for piece, begin, end in pieces:
                for row in piece[begin:end]:
                    writer.write(row)


class ParquetTable:
    """A Parquet file; needs pyarrow."""

    suffix = ".parquet"
    piece_rows = 1 << 16

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._pa = importlib.import_module("pyarrow")  # an extra
            self._parquet = importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise ConfigError(f"{path}: Parquet files need pyarrow: pip install 'plait[psi]'") from None
        try:
            self._schema = self._parquet.read_schema(path)
        except self._pa.ArrowInvalid as error:
            raise DataError(f"{path} is no Parquet file: {error}") from error

    def keys(self, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
        names = self._schema.names
        missing = [name for name in columns if names.count(name) != 1]
        if missing:
            raise DataError(f"{self.path} has no column {missing[0]!r}, or has it twice: its columns are {names}")
        for batch in self._batches(columns):
            yield from zip(*[batch.column(name).to_pylist() for name in columns], strict=True)

    def pieces(self) -> Iterator[tuple[int, Any]]:
        for batch in self._batches(None):
            yield batch.num_rows, batch

    def _batches(self, columns: Sequence[str] | None) -> Iterator[Any]:
        with self._parquet.ParquetFile(self.path) as file:
            yield from file.iter_batches(self.piece_rows, columns=None if columns is None else list(columns))

    def spill(self, piece: Any, places: NDArray[np.intp], path: Path) -> None:
        sink = self._pa.BufferOutputStream()
        with self._pa.ipc.new_stream(sink, piece.schema) as writer:
            writer.write_batch(piece.take(self._pa.array(places)))
        data = sink.getvalue()
        with path.open("ab") as file:
            file.write(_LENGTH.pack(data.size))
            file.write(data)

    def gather(self, path: Path, order: NDArray[np.intp]) -> Any:
        data, tables, at = path.read_bytes() if path.exists() else b"", [], 0
        while at < len(data):
            begin = at + _LENGTH.size
            at = begin + _LENGTH.unpack_from(data, at)[0]
            tables.append(self._pa.ipc.open_stream(data[begin:at]).read_all())
        return (self._pa.concat_tables(tables) if tables else self._schema.empty_table()).take(self._pa.array(order))

    def write(self, pieces: Iterator[tuple[Any, int, int]], path: Path) -> None:
        with atomic_path(path) as temporary, self._parquet.ParquetWriter(temporary, self._schema) as writer:
            for piece, begin, end in pieces:
                writer.write_table(piece.slice(begin, end - begin))
