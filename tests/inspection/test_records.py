from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from plait.data.example import make_example
from plait.data.tfrecord import TFRecordWriter
from plait.errors import ConfigError, DataError
from plait.inspection import records
from plait.inspection.looking import inspect
from plait.inspection.records import records_report

SPEC = importlib.util.spec_from_file_location("writing", Path(__file__).with_name("writing.py"))
writing = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(writing)


def write(path, examples, compression=None):
    with TFRecordWriter(path, compression) as writer:
        for example in examples:
            writer.write(example)
    return path


@pytest.fixture
def file(tmp_path):
    rows = [{"label": i % 5, "image": b"secret" * (i + 1), "box": np.full(i % 3, 0.5), "none": []} for i in range(150)]
    rows[120]["late"] = 1
    return write(tmp_path / "train", [make_example(row) for row in rows])


def test_records_are_counted_and_the_first_looked_into(file):
    report = records_report(file, stats=False)
    text = writing.text_of(report)
    rows = writing.rows_of(text)
    assert "a TFRecord file, 150 records" in text
    assert "features of the first 100 records" in text
    assert ["image", "bytes", "100", "1", "6", "to", "600"] in rows
    assert ["label", "int64", "100", "1", "-"] in rows
    assert ["box", "float32", "100", "0", "to", "2", "-"] in rows
    assert ["none", "empty", "100", "0", "-"] in rows
    assert "secret" not in text
    assert "late" not in text
    facts = report.facts
    assert facts["bytes"] == file.stat().st_size == facts["record_bytes"]["total"] + 16 * 150
    assert facts["compressed"] is False
    json.dumps(facts)


def test_statistics_are_of_all(file, monkeypatch):
    monkeypatch.setattr(records, "_LISTS", 7)
    report = records_report(file, stats=True)
    found = {one["name"]: one for one in report.facts["features"]}
    assert found["label"]["statistics"]["mean"] == pytest.approx(2.0)
    assert found["label"]["statistics"]["zeros"] == pytest.approx(0.2)
    assert found["box"]["statistics"]["max"] == 0.5
    assert found["image"]["statistics"] is None
    assert found["late"]["records"] == 1
    assert "features of all 150 records" in writing.text_of(report)


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_files_are_known_by_their_bytes(tmp_path, compression):
    path = write(tmp_path / "data", [make_example({"x": [1.0] * 100})] * 20, compression)
    report = inspect(path)
    assert (report.facts["records"], report.facts["compressed"]) == (20, True)


def test_other_records_are_counted_only(tmp_path):
    path = write(tmp_path / "data", [make_example({"x": 1}), b"\xff\xff", b"text"])
    report = inspect(path)
    assert (report.facts["records"], report.facts["looked_at"]) == (3, 1)
    assert "not all are Examples: record 1: " in writing.text_of(report)


def test_an_empty_file_of_that_name_has_no_records(tmp_path):
    path = write(tmp_path / "a.tfrecord", [])
    assert "0 records in 0 bytes" in writing.text_of(inspect(path))


def test_damage_is_told_with_its_place(file):
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match="record 149 at byte"):
        inspect(file)


def test_a_file_called_so_that_is_none(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"something else altogether")
    with pytest.raises(DataError, match="is no TFRecord file"):
        inspect(tmp_path / "a.tfrecord")


def test_records_are_not_compared(file):
    with pytest.raises(ConfigError, match="only tensors are compared"):
        inspect(file, file)
