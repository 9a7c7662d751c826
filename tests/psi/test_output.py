"""Rows in another order, in shards of equal size, and the manifest."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from plait.federal.alignment import digest_of, read_manifest
from plait.psi import output
from plait.psi.output import bounds, write_manifest, write_shards
from plait.psi.tables import open_table


@pytest.mark.parametrize(("rows", "shards"), [(0, 3), (1, 3), (7, 3), (9, 3), (100, 7), (5, 1)])
def test_shards_are_of_equal_size(rows, shards):
    found = bounds(rows, shards)
    sizes = np.diff(found)
    assert (found[0], found[-1], len(found)) == (0, rows, shards + 1)
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("wanted", [[], [4], [7, 3, 11, 0, 2, 8, 5], list(range(29, -1, -1))])
def test_rows_are_where_they_belong(tmp_path, monkeypatch, shards, wanted):
    monkeypatch.setattr(output, "BLOCK_ROWS", 3)
    path = tmp_path / "table.csv"
    path.write_text("id\n" + "".join(f"{number}\n" for number in range(30)))
    table = open_table(path)
    table.piece_rows = 4
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "0.bin").write_bytes(b"left by somebody who was killed")
    found = write_shards(table, np.array(wanted, np.uint64), shards, tmp_path / "out", tmp_path / "scratch")
    lines = [(tmp_path / "out" / one["name"]).read_text().split() for one in found]
    assert [line[0] for line in lines] == ["id"] * shards
    assert [int(number) for line in lines for number in line[1:]] == wanted
    assert [one["rows"] for one in found] == np.diff(bounds(len(wanted), shards)).tolist()
    data = (tmp_path / "out" / found[0]["name"]).read_bytes()
    assert (found[0]["bytes"], found[0]["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert not (tmp_path / "scratch").exists()


def test_the_manifest(tmp_path):
    write_manifest(tmp_path, {"b": 1, "a": [2]}, {"files": [], "role": "leader"})
    found = json.loads((tmp_path / "manifest.json").read_text())
    assert found == {
        "digest": digest_of({"a": [2], "b": 1}),
        "files": [],
        "role": "leader",
        "shared": {"a": [2], "b": 1},
    }
    assert read_manifest(tmp_path) == found
