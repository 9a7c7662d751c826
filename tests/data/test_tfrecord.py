import gzip
import os
import struct
import threading
import tracemalloc
import zlib

import google_crc32c
import numpy as np
import pytest

from plait.data import tfrecord
from plait.data.tfrecord import RecordFile, TFRecordWriter, expand, read_records, shard
from plait.errors import ConfigError, DataError

RECORDS = [bytes([65 + i]) * (i * 37 % 500) for i in range(40)]
KINDS = [None, "GZIP", "ZLIB"]
OFFSETS = [sum(len(record) + 16 for record in RECORDS[:i]) for i in range(len(RECORDS))]


def masked(data):
    crc = google_crc32c.value(bytes(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(record, length=None):
    head = struct.pack("<Q", len(record) if length is None else length)
    return head + struct.pack("<I", masked(head)) + record + struct.pack("<I", masked(record))


def write(path, records=RECORDS, compression=None):
    with TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)
    return path


def read(path, **options):
    return [bytes(record) for record in read_records(path, **options)]


def index_of(path):
    return path.with_name(f".{path.name}.index")


def taken_bytes(function, *args, **options):
    """Most memory that a call took at once, and what it raised."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            function(*args, **options)
        return tracemalloc.get_traced_memory()[1], str(caught.value)
    finally:
        tracemalloc.stop()


def test_the_bytes_of_a_file_are_those_of_the_format(tmp_path):
    """A record that TensorFlow 2.21 wrote."""
    known = "0300000000000000b099490e6162636e57f121"
    assert write(tmp_path / "a", [b"abc"]).read_bytes().hex() == known
    assert write(tmp_path / "b").read_bytes() == b"".join(map(frame, RECORDS))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_read(tmp_path, kind):
    path = write(tmp_path / "a.tfrecord", compression=kind)
    assert read(path) == read(path, compression=kind) == read(str(path), check=False) == RECORDS
    file = RecordFile(path)
    assert (len(file), file.total, file.compression) == (40, 40, kind)
    assert [bytes(record) for record in file] == RECORDS
    assert bytes(file[-1]) == RECORDS[-1]
    assert bytes(file[np.int64(3)]) == RECORDS[3]


@pytest.mark.parametrize("kind", KINDS)
def test_records_longer_than_the_pieces_of_a_stream(tmp_path, kind):
    rng = np.random.default_rng(0)
    records = [rng.bytes(700_001), bytes(3_000_000), b"", rng.bytes(5)]
    assert read(write(tmp_path / "a", records, kind)) == records


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_records(tmp_path, kind):
    path = write(tmp_path / "a", [], kind)
    assert read(path) == []
    assert len(RecordFile(path)) == 0
    with pytest.raises(IndexError):
        RecordFile(path)[0]
    (tmp_path / "empty").touch()
    assert read(tmp_path / "empty", compression=kind) == []


def test_views_of_plain_files_are_not_copies_and_outlive_the_file(tmp_path):
    path = write(tmp_path / "a")
    file = RecordFile(path)
    view, streamed = file[5], next(read_records(path, start=5))
    del file
    path.unlink()
    assert isinstance(view, memoryview)
    assert view.readonly
    assert bytes(view) == bytes(streamed) == RECORDS[5]


def test_a_writer_takes_any_bytes_and_nothing_else(tmp_path):
    path = write(tmp_path / "a", [bytearray(b"one"), memoryview(b"two"), b"three"])
    assert read(path) == [b"one", b"two", b"three"]
    with TFRecordWriter(tmp_path / "b") as writer, pytest.raises(DataError, match="bytes, got a str"):
        writer.write("text")
    with pytest.raises(DataError, match="not open; write inside `with"):
        writer.write(b"x")
    with pytest.raises(ConfigError, match="compression is 'LZ4'"):
        TFRecordWriter(tmp_path / "c", "LZ4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_there_whole_or_not_at_all(tmp_path, kind):
    path = write(tmp_path / "deep" / "a", [b"old"], kind)
    with pytest.raises(DataError, match="got a NoneType"), TFRecordWriter(path, kind) as writer:
        writer.write(None)
    assert read(path) == [b"old"]
    with TFRecordWriter(path, kind) as writer:
        writer.write(b"new")
        assert read(path) == [b"old"]
        with pytest.raises(DataError, match="written already"):
            writer.__enter__()
    assert read(path) == [b"new"]
    assert os.listdir(path.parent) == ["a"]


def test_a_record_that_could_not_be_written_spoils_the_file(tmp_path, monkeypatch):
    def full(data):
        raise OSError("no space left")

    writer = TFRecordWriter(tmp_path / "a").__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_file", type("File", (), {"write": staticmethod(full)}))
        with pytest.raises(OSError, match="no space"):
            writer.write(b"x")
    writer.write(b"y")
    with pytest.raises(DataError, match="not kept"):
        writer.__exit__(None, None, None)
    assert os.listdir(tmp_path) == []


def test_a_writer_can_be_used_again(tmp_path):
    writer = TFRecordWriter(tmp_path / "a", "GZIP")
    for record in (b"one", b"two"):
        with writer:
            writer.write(record)
        assert read(tmp_path / "a") == [record]


@pytest.mark.parametrize("kind", KINDS)
def test_reading_begins_anywhere(tmp_path, kind):
    path = write(tmp_path / "a", compression=kind)
    for indexed in (False, True):
        assert index_of(path).exists() is indexed
        for start in (0, 1, 17, 39, 40):
            assert read(path, start=start) == RECORDS[start:]
        with pytest.raises(DataError, match="has 40 records, .* record 41 on"):
            read(path, start=41)
        RecordFile(path)
    with pytest.raises(ConfigError, match="start is -1"):
        read_records(path, start=-1)


def test_the_index_is_used_to_begin_anywhere(tmp_path, monkeypatch):
    path = write(tmp_path / "a")
    RecordFile(path)
    seen = []
    end = tfrecord._end
    monkeypatch.setattr(
        tfrecord, "_end", lambda data, path, number, *rest: seen.append(number) or end(data, path, number, *rest)
    )
    assert read(path, start=38) == RECORDS[38:]
    assert seen == [38, 39]


def test_records_in_any_order_from_many_threads(tmp_path):
    paths = {kind: write(tmp_path / str(kind), compression=kind) for kind in KINDS}
    wrong = []

    def look(file, seed):
        for number in np.random.default_rng(seed).permutation(len(file)).tolist():
            if bytes(file[number]) != RECORDS[number]:
                wrong.append(number)

    for path in paths.values():
        file = RecordFile(path)
        threads = [threading.Thread(target=look, args=(file, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_number_that_is_not_there(tmp_path):
    file = RecordFile(write(tmp_path / "a"))
    for number in (40, -41):
        with pytest.raises(IndexError, match=f"no record {number}, there are 40"):
            file[number]
    with pytest.raises(TypeError):
        file["3"]


# the index


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_is_kept_beside_the_file_or_where_it_was_asked_for(tmp_path, monkeypatch, kind):
    path, other = write(tmp_path / "x" / "a", compression=kind), write(tmp_path / "y" / "a", RECORDS[:7], kind)
    RecordFile(path)
    assert index_of(path).exists()
    for _ in range(2):
        assert len(RecordFile(path, index_dir=tmp_path / "index")) == 40
        assert len(RecordFile(other, index_dir=tmp_path / "index")) == 7
    assert len(os.listdir(tmp_path / "index")) == 2
    assert not index_of(other).exists()
    monkeypatch.setattr(tfrecord, "_make_index", None)
    assert [bytes(record) for record in RecordFile(path)] == RECORDS
    assert len(RecordFile(other, index_dir=tmp_path / "index")) == 7


def test_an_index_of_another_file_is_made_anew(tmp_path):
    path = write(tmp_path / "a")
    RecordFile(path)
    write(path, RECORDS[:3])
    assert [bytes(record) for record in RecordFile(path)] == RECORDS[:3]
    status = path.stat()
    path.write_bytes(b"".join(map(frame, reversed(RECORDS[:3]))))  # as long as before
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert [bytes(record) for record in RecordFile(path)] == RECORDS[2::-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_torn_or_altered_index_is_made_anew(tmp_path, kind):
    path = write(tmp_path / "a", RECORDS[:4], kind)
    RecordFile(path)
    index = index_of(path)
    good = index.read_bytes()
    for position in range(0, len(good), 3):
        bad = bytearray(good)
        bad[position] ^= 1
        for raw in (bytes(bad), good[:position]):
            index.write_bytes(raw)
            assert [bytes(record) for record in RecordFile(path)] == RECORDS[:4]
            assert index.read_bytes() == good
    for raw in (good + b"x", good * 1000):
        index.write_bytes(raw)
        assert len(RecordFile(path)) == 4


def test_an_index_that_lies_gives_errors_and_no_wrong_bytes(tmp_path):
    path = write(tmp_path / "a", RECORDS[:4])
    stamp = RecordFile(path)._mapped.stamp
    tfrecord._write_index(index_of(path), stamp, None, 3, np.array([0, 7, 1 << 60], np.uint64))
    file = RecordFile(path)
    assert bytes(file[0]) == RECORDS[0]
    for number in (1, 2):
        with pytest.raises(DataError, match=f"record {number} at byte"):
            file[number]
    write(path, RECORDS[:4], "GZIP")
    tfrecord._write_index(index_of(path), RecordFile(path)._mapped.stamp, "GZIP", 5, np.empty(0, np.uint64))
    with pytest.raises(DataError, match="ends after 4 records"):
        RecordFile(path)[4]
    tfrecord._write_index(index_of(path), RecordFile(path)._mapped.stamp, "GZIP", (1 << 64) - 1, np.empty(0, np.uint64))
    assert len(RecordFile(path)) == 4


def test_an_index_that_cannot_be_kept_is_not_missed(tmp_path):
    path = write(tmp_path / "a")
    (tmp_path / "file").touch()
    assert len(RecordFile(path, index_dir=tmp_path / "file" / "below")) == 40
    index_of(path).mkdir()
    assert len(RecordFile(path)) == 40
    assert sorted(os.listdir(tmp_path)) == [".a.index", "a", "file"]


def test_an_index_of_another_compression_is_not_used(tmp_path):
    path = write(tmp_path / "a", [b"x"], "ZLIB")
    RecordFile(path)
    with pytest.raises(DataError, match="damaged near byte .* GZIP stream"):
        RecordFile(path, compression="GZIP")
    with pytest.raises(DataError, match="`compression` is wrong"):
        RecordFile(path, compression=None)


def test_few_files_are_mapped_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord, "_MAX_MAPPED", 3)
    monkeypatch.setattr(tfrecord._Mapped, "_newest", type(tfrecord._Mapped._newest)())
    files = [RecordFile(write(tmp_path / str(i), [b"%d" % i, b"x"], KINDS[i % 3])) for i in range(10)]
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
    for number in (0, 1, 0):
        assert [bytes(file[number]) for file in files] == [[b"%d" % i, b"x"][number] for i in range(10)]
        assert sum(file._mapped._data is not None for file in files) <= 3
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) <= before + 1
    path = tmp_path / "0"
    path.write_bytes(frame(b"other") * 2)
    with pytest.raises(DataError, match="was changed while it was read"):
        files[0][0]


# compressed files


def test_what_is_passed_over_is_held_until_it_is_asked_for(tmp_path, monkeypatch):
    path = write(tmp_path / "a", compression="GZIP")
    opened = []
    stream = tfrecord._inflated_records
    monkeypatch.setattr(tfrecord, "_inflated_records", lambda *args: opened.append(args) or stream(*args))
    file = RecordFile(path)
    forward = file._forward
    opened.clear()
    order = [3, 0, 2, 1, 5, 4, 9]
    assert [file[number] for number in order] == [RECORDS[number] for number in order]
    assert sorted(forward._held) == [6, 7, 8]
    assert forward._size == sum(len(record) + 128 for record in RECORDS[6:9])
    assert not opened
    assert file[3] == RECORDS[3]
    assert len(opened) == 1
    assert sorted(forward._held) == [0, 1, 2]


def test_no_more_is_held_than_allowed(tmp_path, caplog):
    path = write(tmp_path / "a", [b""] * 1000 + [bytes(10_000)] * 50, "ZLIB")
    file = RecordFile(path, held_bytes=100_000)
    assert [len(file[number]) for number in range(1050)] == [0] * 1000 + [10_000] * 50
    assert len(file[1049]) == 10_000
    assert file._forward._size <= 100_000
    assert caplog.text == ""
    assert file[1] == b""  # which was dropped
    assert "smaller shuffle_buffer_size" in caplog.text
    assert [len(file[number]) for number in range(1050)] == [0] * 1000 + [10_000] * 50


def test_records_of_others_are_not_held(tmp_path):
    path = write(tmp_path / "a", [bytes(10_000)] * 100, "GZIP")
    file = RecordFile(path, records=slice(1, None, 50), held_bytes=20_000)
    assert len(file) == 2
    assert [len(file[number]) for number in (1, 0, 1, 0)] == [10_000] * 4


def test_several_gzip_files_behind_each_other_are_one(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"".join(gzip.compress(frame(record)) for record in RECORDS))
    assert read(path) == RECORDS


# damage


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (OFFSETS[7], "record 7 at byte .* a length whose CRC is wrong"),
        (OFFSETS[7] + 9, "record 7 at byte .* a length whose CRC is wrong"),
        (OFFSETS[7] + 12, "record 7 at byte .* bytes whose CRC is wrong; .* check=False"),
        (OFFSETS[8] - 1, "record 7 at byte .* bytes whose CRC is wrong"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_found(tmp_path, kind, position, text):
    raw = bytearray(b"".join(map(frame, RECORDS)))
    raw[position] ^= 4
    path = tmp_path / "a"
    path.write_bytes({None: bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}[kind](raw))
    with pytest.raises(DataError, match=text):
        read(path)
    with pytest.raises(DataError, match=f"{path}: {text}"):
        RecordFile(path)[7]
    if "bytes whose" in text:
        assert len(read(path, check=False)) == 40
        assert len(RecordFile(path, check=False)[7]) == len(RECORDS[7])


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_short(tmp_path, kind):
    path = write(tmp_path / "a", RECORDS[:3], kind)
    raw = path.read_bytes()
    ends = set(OFFSETS[:3]) if kind is None else {0}
    for size in range(len(raw)):  # an empty file is a file without records
        path.write_bytes(raw[:size])
        if size in ends:
            assert read(path) == RECORDS[: OFFSETS.index(size)]
            continue
        with pytest.raises(DataError, match=r"cut short|CRC is wrong"):
            read(path)
        with pytest.raises(DataError, match=r"cut short|CRC is wrong"):
            RecordFile(path)


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 12, b"x" * 100])
def test_trailing_bytes(tmp_path, extra):
    for kind, text in [(None, r"record 40 at byte \d+"), ("GZIP", "trailing bytes"), ("ZLIB", "trailing bytes")]:
        path = write(tmp_path / str(kind), compression=kind)
        path.write_bytes(path.read_bytes() + extra)
        with pytest.raises(DataError, match=text):
            read(path)


def test_compressed_damage(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\x1f\x8b\x08" + bytes(50))
    with pytest.raises(DataError, match="GZIP stream"):
        read(path)
    path.write_bytes(gzip.compress(frame(b"abc")[:-2]))
    with pytest.raises(DataError, match="record 0 at byte 0 is cut short: 3 of 3 bytes"):
        read(path)
    path.write_bytes(gzip.compress(frame(b"abc") + b"1234"))
    with pytest.raises(DataError, match="record 1 at byte 19 is cut short: 4 bytes are left"):
        read(path)


@pytest.mark.alone
@pytest.mark.parametrize("length", [100, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_forged_length_takes_no_memory(tmp_path, length):
    path = tmp_path / "a"
    for kind in KINDS:
        raw = frame(b"abc", length)
        path.write_bytes({None: bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}[kind](raw))
        taken, text = taken_bytes(read, path)
        assert taken < 1 << 20
        assert "cut short" in text or f"write max_record_bytes={length}" in text


@pytest.mark.alone
def test_a_bomb_takes_no_more_than_the_limit(tmp_path):
    """64 MiB of zeros in 64 kB; the CRC of its length is right."""
    path = write(tmp_path / "a", [bytes(64 << 20)], "ZLIB")
    assert path.stat().st_size < 100_000
    taken, text = taken_bytes(read, path, max_record_bytes=1 << 20)
    assert taken < 4 << 20
    assert "is 67108864 bytes long and the limit is 1048576; write max_record_bytes=67108864" in text
    assert taken_bytes(RecordFile, path, max_record_bytes=1 << 20)[0] < 4 << 20
    raw = struct.pack("<Q", 8 << 20)
    path.write_bytes(zlib.compress(raw + struct.pack("<I", masked(raw)) + bytes(4 << 20)))
    taken, text = taken_bytes(read, path)
    assert taken < 10 << 20
    assert "cut short" in text


def test_a_limit_may_be_raised(tmp_path):
    path = write(tmp_path / "a", [bytes(1000)])
    with pytest.raises(DataError, match="record 0 at byte 0 is 1000 bytes long and the limit is 999"):
        read(path, max_record_bytes=999)
    assert len(RecordFile(path, max_record_bytes=1000)) == 1
    with pytest.raises(DataError, match="the limit is 999"):  # the index that is there does not change that
        RecordFile(path, max_record_bytes=999)[0]


@pytest.mark.parametrize(
    "content", [b"\x1f\x8b", b"x\x9c", b"x\x01", b"hello, world: this is no file of records\n" * 3]
)
def test_other_files(tmp_path, content):
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cut short|no TFRecord file"):
        read(path)


def test_a_plain_file_that_looks_compressed_is_plain(tmp_path):
    """Lengths whose first bytes are those of GZIP and of ZLIB: the CRC of the length settles it."""
    for first in (b"\x1f\x8b", b"x\x9c", b"x\x01", b"x\xda"):
        record = bytes(int.from_bytes(first, "little"))
        path = write(tmp_path / "a", [record])
        assert path.read_bytes().startswith(first)
        assert read(path) == [record]
        assert RecordFile(path).compression is None


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            read_records(path)
        with pytest.raises(DataError, match="cannot be read"):
            RecordFile(path)
    for function in (read_records, RecordFile):
        with pytest.raises(ConfigError, match="compression is 'gz'; write 'auto', None, 'GZIP' or 'ZLIB'"):
            function(write(tmp_path / "a"), compression="gz")


# which files, and which records of them


def test_patterns(tmp_path):
    for name in ("b-1", "b-0", "a[1]", ".b-0.index"):
        (tmp_path / name).touch()
    (tmp_path / "b-dir").mkdir()
    names = lambda *patterns: [os.path.basename(name) for name in expand(*patterns)]
    assert names(tmp_path / "b-*") == ["b-0", "b-1"]
    assert names(f"{tmp_path}/*") == ["a[1]", "b-0", "b-1"]
    assert names(tmp_path / "a[1]", f"{tmp_path}/b-1", f"{tmp_path}/*") == ["a[1]", "b-1", "b-0"]
    with pytest.raises(DataError, match=r"no file matches .*c-\*"):
        expand(f"{tmp_path}/b-*", f"{tmp_path}/c-*")
    with pytest.raises(DataError, match=r"is a directory: write .*/\*"):
        expand(tmp_path)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_every_record_has_one_worker(tmp_path, count):
    paths = [str(write(tmp_path / str(i), RECORDS[i * 10 : i * 10 + 10], KINDS[i % 3])) for i in range(3)]
    dealt = [
        [bytes(record) for file, part in shard(paths, index, count) for record in RecordFile(file, records=part)]
        for index in range(count)
    ]
    assert sorted(sum(dealt, [])) == sorted(RECORDS[:30])
    assert all(dealt)
    if count > 3:
        assert {len(records) for records in dealt} <= {len(paths) * n for n in (10 // count, 10 // count + 1)}


def test_workers_that_are_not_there():
    for index in (-1, 2):
        with pytest.raises(ConfigError, match=f"no worker {index} of 2"):
            shard(["a"], index, 2)
