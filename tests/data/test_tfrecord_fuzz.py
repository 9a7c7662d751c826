"""Broken files: each is an error of ours, or gives records that are whole; none takes time or memory."""

import random
import struct
import time
import tracemalloc
import zlib

import google_crc32c
import pytest

from plait.data.example import make_example, parse_example
from plait.data.tfrecord import RecordFile, read_records
from plait.errors import DataError

MAX_RECORD_BYTES = 1 << 20
MAX_TAKEN_BYTES = 6 << 20
MAX_SECONDS = 2.0
KINDS = [None, "GZIP", "ZLIB"]


def masked(data):
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(record, length=None):
    head = struct.pack("<Q", len(record) if length is None else length)
    return head + struct.pack("<I", masked(head)) + record + struct.pack("<I", masked(record))


def packed(raw, kind, level=6):
    if kind is None:
        return raw
    engine = zlib.compressobj(level, wbits={"GZIP": 31, "ZLIB": 15}[kind])
    return engine.compress(raw) + engine.flush()


def some_example(rng):
    return make_example(
        {
            "image": rng.randbytes(rng.randrange(400)),
            "label": rng.randrange(-5, 1000),
            "ids": [rng.randrange(1 << rng.randrange(1, 63)) for _ in range(rng.randrange(30))],
            "box": [rng.random() for _ in range(rng.randrange(5))],
        }
    )


ZEROS, LONGEST = bytes(3 << 20), frame(bytes(MAX_RECORD_BYTES))


# ways of breaking: each takes bytes and gives other bytes


def flip(rng, raw):
    out = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 10])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(rng, raw):
    return raw[: rng.randrange(len(raw))]


def insert(rng, raw):
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + rng.randbytes(rng.choice([1, 4, 12, 100])) + raw[at:]


def remove(rng, raw):
    at = rng.randrange(len(raw))
    return raw[:at] + raw[at + rng.choice([1, 4, 16, 100]) :]


def repeat(rng, raw):
    begin, end = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    return raw[:end] + raw[begin:]


def blank(rng, raw):
    begin = rng.randrange(len(raw))
    return (
        raw[:begin] + bytes([rng.choice([0, 255])]) * min(rng.choice([1, 8, 50]), len(raw) - begin) + raw[begin + 50 :]
    )


BREAKS = [flip, cut, insert, remove, repeat, blank]


# kinds of broken files: each gives bytes, and the records that may come out (None: any)


def broken_file(rng, records):
    kind = rng.choice(KINDS)
    return rng.choice(BREAKS)(rng, packed(b"".join(map(frame, records)), kind)), records


def broken_inside(rng, records):
    """The compressed stream is whole, what comes out of it is not."""
    raw = rng.choice(BREAKS)(rng, b"".join(map(frame, records)))
    return packed(raw, rng.choice(KINDS)), records


def forged_length(rng, records):
    length = rng.choice([0, 1, 15, 1 << 16, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
    place = rng.randrange(len(records))
    frames = [frame(record, length if i == place else None) for i, record in enumerate(records)]
    return packed(b"".join(frames), rng.choice(KINDS)), [*records, b""]


def forged_stream(rng, records):
    """Containers that are right around contents that are not, and bombs."""
    kind = rng.choice(KINDS[1:])
    head = packed(frame(records[0]), kind, rng.choice([0, 1, 9]))
    content = rng.choice([rng.randbytes(100), ZEROS, frame(b"") * 500, LONGEST, b""])
    choices = [
        lambda: packed(content, kind, 1),
        lambda: head + packed(content, kind, 1),
        lambda: head[: rng.randrange(2, 12)] + rng.randbytes(200),
        lambda: head[:-4] + rng.randbytes(4),
        lambda: head + head[:2] + rng.randbytes(50),
        lambda: rng.randbytes(rng.randrange(60)),
    ]
    return rng.choice(choices)(), [*records, b"", bytes(MAX_RECORD_BYTES)]


def broken_example(rng, records):
    """The frames are right, the Examples in them are not."""
    changed = [rng.choice(BREAKS)(rng, record) for record in records]
    return packed(b"".join(map(frame, changed)), rng.choice(KINDS)), changed


WAYS = [broken_file, broken_file, broken_inside, forged_length, forged_stream, broken_example]


def look(path, index_dir, may_come):
    """Read a file in every way; how many records came out, and whether there was an error."""
    came, failed = 0, 0
    try:
        for record in read_records(path, max_record_bytes=MAX_RECORD_BYTES):
            assert bytes(record) in may_come
            came += 1
            failed += parses(record)
    except DataError:
        failed += 1
    try:
        file = RecordFile(path, max_record_bytes=MAX_RECORD_BYTES, index_dir=index_dir, held_bytes=4 << 20)
        numbers = [len(file) - 1, 0, len(file) // 2] if len(file) else []
    except DataError:
        return came, failed + 1
    for number in numbers:
        try:
            assert bytes(file[number]) in may_come
        except DataError:
            failed += 1
    return came, failed


def parses(record):
    try:
        parse_example(record)
        parse_example(record, {"label"})
    except DataError:
        return 1
    return 0


def fuzz(folder, count, seed):
    rng = random.Random(seed)
    examples = [some_example(rng) for _ in range(100)]
    nowhere = folder / "file"
    nowhere.touch()  # no index can be kept below it, which saves the time
    failures = dict.fromkeys(WAYS, 0)
    records = 0
    tracemalloc.start()
    try:
        for number in range(count):
            way = WAYS[number % len(WAYS)]
            raw, may_come = way(rng, rng.sample(examples, rng.randrange(1, 5)))
            path = folder / str(number)  # a file written over again waits for the disk
            path.write_bytes(raw)
            may_come = set(may_come)
            tracemalloc.reset_peak()
            before, begin = tracemalloc.get_traced_memory()[0], time.process_time()
            came, failed = look(path, nowhere / "index", may_come)
            assert time.process_time() - begin < MAX_SECONDS, (seed, number, way)
            assert tracemalloc.get_traced_memory()[1] - before < MAX_TAKEN_BYTES, (seed, number, way)
            failures[way] += bool(failed)
            records += came
            path.unlink()
    finally:
        tracemalloc.stop()
    return failures, records


@pytest.mark.alone
def test_a_thousand_broken_files(tmp_path):
    failures, records = fuzz(tmp_path, 1000, seed=0)
    assert all(count > 50 for count in failures.values())  # the ways do break what they are meant to
    assert records > 500


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
def test_nine_thousand_more(tmp_path, seed):
    fuzz(tmp_path, 1000, seed)
