"""Records a second: a bare loop over a mapped file with its CRCs, and plait's readers. `python benchmarks/tfrecord.py`"""

from __future__ import annotations

import datetime
import json
import mmap
import os
import platform
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
from rich.console import Console
from rich.table import Table

from plait.atomic import write_atomic
from plait.data.example import make_example, parse_example
from plait.data.tfrecord import RecordFile, TFRecordWriter, read_records

RECORDS, RECORD_BYTES, ROUNDS = 2000, 51_000, 11
RESULT = Path(__file__).parent / "results" / "tfrecord.json"
BASE = "bare loop: mmap, struct, CRC of length and bytes"


def bare_loop(path: Path) -> int:
    """What one would write by hand: both CRCs of each record are checked, and the record is taken out as bytes."""
    header, footer, value = struct.Struct("<QI"), struct.Struct("<I"), google_crc32c.value
    count = offset = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = len(data)
        while offset < size:
            length, length_crc = header.unpack_from(data, offset)
            crc = value(data[offset : offset + 8])
            assert ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == length_crc
            end = offset + 12 + length
            record = data[offset + 12 : end]
            crc = value(record)
            assert ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == footer.unpack_from(data, end)[0]
            count, offset = count + 1, end + 4
    return count


def bare_views(path: Path) -> int:
    """The same loop without a copy of the record: the CRC is taken of a NumPy view."""
    header, footer, value = struct.Struct("<QI"), struct.Struct("<I"), google_crc32c.value
    count = offset = 0
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    array, size = np.frombuffer(data, np.uint8), len(data)
    while offset < size:
        length, length_crc = header.unpack_from(data, offset)
        crc = value(data[offset : offset + 8])
        assert ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == length_crc
        end = offset + 12 + length
        record = array[offset + 12 : end]
        crc = value(record)
        assert ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == footer.unpack_from(data, end)[0]
        count, offset = count + 1, end + 4
    return count


def stream(path: Path) -> int:
    return sum(1 for _ in read_records(path))


def unchecked(path: Path) -> int:
    return sum(1 for _ in read_records(path, check=False))


def by_number(path: Path) -> int:
    file = RecordFile(path)
    return sum(1 for number in range(len(file)) if file[number] is not None)


def parsed(path: Path) -> int:
    return sum(1 for record in read_records(path) if parse_example(record))


def only_parsed(path: Path) -> int:
    """Parsing by itself: the same few records, so that reading and CRCs cost nothing."""
    records = [bytes(next(read_records(path)))] * RECORDS
    return sum(1 for record in records if parse_example(record))


PASSES: dict[str, Callable[[Path], int]] = {
    BASE: bare_loop,
    "bare loop: the same, views in place of copies": bare_views,
    "read_records": stream,
    "RecordFile by number, with its index": by_number,
    "read_records(check=False)": unchecked,
    "read_records + parse_example": parsed,
    "parse_example by itself": only_parsed,
}


def write_file(path: Path) -> None:
    """Examples with a picture of random bytes, each about as long as a JPEG of ImageNet when made small."""
    rng = np.random.default_rng(0)
    facts = {"image/format": "JPEG", "image/height": 375, "image/width": 500}
    with TFRecordWriter(path) as writer:
        for _ in range(RECORDS):
            fields = {"image/encoded": rng.bytes(RECORD_BYTES - 160), "image/class/label": int(rng.integers(1, 1001))}
            writer.write(make_example({**fields, **facts}))


def measure(path: Path) -> dict[str, float]:
    """Median records a second of CPU time; the passes take turns, so that a slow moment hits all of them."""
    speeds: dict[str, list[float]] = {name: [] for name in PASSES}
    for _ in range(ROUNDS + 1):
        for name, one_pass in PASSES.items():
            begin = time.process_time()
            count = one_pass(path)
            speeds[name].append(count / (time.process_time() - begin))
            assert count == RECORDS
    return {name: statistics.median(values[1:]) for name, values in speeds.items()}  # the first round warms up


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.tfrecord")
        write_file(path)
        speeds = measure(path)
        size = path.stat().st_size // RECORDS
    rows = [
        {"what": name, "records/s": round(speed), "ratio": round(speed / speeds[BASE], 2)}
        for name, speed in speeds.items()
    ]
    table = Table(
        "what", "records/s", "ratio", title=f"{RECORDS:,} Examples of {size:,} bytes, CPU time, file in cache"
    )
    for row in rows:
        table.add_row(row["what"], f"{row['records/s']:,}", f"{row['ratio']:.2f}")
    Console().print(table)
    facts = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "crc": google_crc32c.implementation,
        "cpu count": os.cpu_count(),
    }
    write_atomic(RESULT, json.dumps({**facts, "record bytes": size, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
