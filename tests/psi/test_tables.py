"""Tables of three kinds: keys, pieces, rows in another order."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from plait.data.example import make_example, parse_example
from plait.data.tfrecord import TFRecordWriter, read_records
from plait.errors import ConfigError, DataError
from plait.psi.tables import CsvTable, RecordTable, open_table

CSV = '\ufeffid,note\r\n1,"a, ""b"""\r\n\r\n2,"two\nlines"\r\n3,äöü'


def reorder(table, order, path, spilled):
    """Spill the rows one by one, and write them in another order."""
    for count, piece in table.pieces():
        for place in range(count):
            table.spill(piece, np.array([place]), spilled)
    found = table.gather(spilled, np.array(order))
    table.write(iter([(found, 0, 1), (found, 1, len(order))]), path)


@pytest.fixture
def csv_table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(CSV.encode())
    return open_table(path)


class TestCsv:
    def test_keys(self, csv_table):
        assert list(csv_table.keys(["id"])) == [["1"], ["2"], ["3"]]
        assert list(csv_table.keys(["note", "id"]))[1] == ["two\nlines", "2"]

    def test_rows_are_written_as_they_were_read(self, csv_table, tmp_path):
        reorder(csv_table, [2, 0, 1], tmp_path / "out.csv", tmp_path / "spilled")
        wanted = 'id,note\r\n3,äöü\n1,"a, ""b"""\r\n2,"two\nlines"\r\n'
        assert (tmp_path / "out.csv").read_bytes().decode() == wanted

    def test_tabs(self, tmp_path):
        (tmp_path / "table.tsv").write_text("id\tx,y\n7\t8\n")
        table = open_table(tmp_path / "table.tsv")
        assert (list(table.keys(["x,y"])), table.suffix) == ([["8"]], ".tsv")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (b"", "is empty"),
            (b"a,b\n1,2\n", "no column 'id'"),
            (b"id,id\n1,2\n", "has it twice"),
            (b"id,b\n1,2\n3\n", "row 2 has 1 fields"),
            (b"id,b\n1,\xff\n", "no CSV file in UTF-8"),
            (b'id,b\n1,"2\n', "no CSV file in UTF-8"),
        ],
    )
    def test_what_is_wrong(self, tmp_path, text, said):
        path = tmp_path / "table.csv"
        path.write_bytes(text)
        with pytest.raises(DataError, match=said):
            list(CsvTable(path).keys(["id"]))


class TestRecords:
    @pytest.fixture
    def table(self, tmp_path):
        with TFRecordWriter(tmp_path / "table.tfrecord") as writer:
            for number in range(3):
                writer.write(make_example({"id": number, "name": f"n{number}", "x": [0.5, 1.5]}))
        return open_table(tmp_path / "table.tfrecord")

    def test_keys(self, table):
        assert list(table.keys(["name", "id"])) == [[b"n0", 0], [b"n1", 1], [b"n2", 2]]

    def test_rows(self, table, tmp_path):
        reorder(table, [1, 2, 0], tmp_path / "out.tfrecord", tmp_path / "spilled")
        found = [parse_example(record)["id"].tolist() for record in read_records(tmp_path / "out.tfrecord")]
        assert found == [[1], [2], [0]]

    @pytest.mark.parametrize(("column", "count"), [("x", 2), ("y", 0)])
    def test_a_key_has_one_value(self, table, column, count):
        with pytest.raises(DataError, match=f"row 1 has {count} values of '{column}'"):
            list(table.keys([column]))

    def test_pieces(self, table):
        table.piece_rows = 2
        assert [count for count, _ in table.pieces()] == [2, 1]
        assert isinstance(table, RecordTable)


class TestParquet:
    @pytest.fixture
    def table(self, tmp_path):
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        made = pa.table({"id": [1, 2, 3], "name": ["a", "b", None], "x": [[1.0], [], [2.0, 3.0]]})
        parquet.write_table(made, tmp_path / "table.parquet")
        return open_table(tmp_path / "table.parquet")

    def test_keys(self, table):
        assert list(table.keys(["name", "id"])) == [("a", 1), ("b", 2), (None, 3)]
        with pytest.raises(DataError, match="no column 'y'"):
            list(table.keys(["y"]))

    def test_a_column_that_is_there_twice(self, tmp_path):
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(
            pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["id", "id"]), tmp_path / "t.parquet"
        )
        with pytest.raises(DataError, match="no column 'id', or has it twice"):
            list(open_table(tmp_path / "t.parquet").keys(["id"]))

    def test_rows(self, table, tmp_path):
        parquet = pytest.importorskip("pyarrow.parquet")
        reorder(table, [2, 0, 1], tmp_path / "out.parquet", tmp_path / "spilled")
        found = parquet.read_table(tmp_path / "out.parquet").to_pylist()
        assert [row["id"] for row in found] == [3, 1, 2]
        assert found[0]["x"] == [2.0, 3.0]

    def test_no_rows(self, table, tmp_path):
        parquet = pytest.importorskip("pyarrow.parquet")
        table.write(iter([(table.gather(tmp_path / "absent", np.array([], int)), 0, 0)]), tmp_path / "out.parquet")
        assert parquet.read_table(tmp_path / "out.parquet").schema.names == ["id", "name", "x"]

    def test_no_parquet(self, tmp_path):
        pytest.importorskip("pyarrow")
        (tmp_path / "table.parquet").write_bytes(b"nothing")
        with pytest.raises(DataError, match="is no Parquet file"):
            open_table(tmp_path / "table.parquet")


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "table.parquet").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="need pyarrow"):
        open_table(tmp_path / "table.parquet")


def test_names(tmp_path):
    with pytest.raises(DataError, match="is not there"):
        open_table(tmp_path / "absent.csv")
    (tmp_path / "table.xlsx").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"ends in one of \.csv"):
        open_table(tmp_path / "table.xlsx")
