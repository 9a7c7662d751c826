"""Tables of the tests' own writer; TensorFlow's own are in test_tf_bundle.py and test_tf_v1.py."""

from __future__ import annotations

import base64
import importlib.util
import io
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import CheckpointError
from plait.variables.tf_table import Table, is_table, masked_crc, read_message, read_varint, reading, unsnap

SPEC = importlib.util.spec_from_file_location("v1_writer", Path(__file__).with_name("v1_writer.py"))
v1_writer = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(v1_writer)
writer = v1_writer.base
snap, literal, copy = v1_writer.snap, v1_writer.literal, v1_writer.copy

LIMIT = 1 << 20
ROWS = {b"key" + bytes([65 + i]) * i: bytes([i]) * i * 9 for i in range(20)}


def opened(content: bytes, limit: int = LIMIT) -> Table:
    return Table(io.BytesIO(content), limit)


def rows(content: bytes, limit: int = LIMIT) -> dict[bytes, bytes]:
    return {key: bytes(value) for key, value in opened(content, limit).rows()}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("rows_each", [1, 4, 100])
def test_rows_come_back(compress: bool, rows_each: int):
    content = v1_writer.table(ROWS, compress=compress, rows_each=rows_each)
    assert rows(content) == ROWS
    assert list(rows(content)) == sorted(ROWS)
    assert rows(v1_writer.table({})) == {}


class Counting(io.BytesIO):
    """Counts what is read of it."""

    got = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.got += len(data)
        return data


@pytest.mark.parametrize("compress", [False, True])
def test_keys_are_found_without_reading_all(compress: bool):
    many = {b"%05d" % i: b"%d" % i * 99 for i in range(1000)}
    content = v1_writer.table(many, compress=compress, rows_each=5)
    stream = Counting(content)
    table = Table(stream, LIMIT)
    before = stream.got
    wanted = [b"00999", b"00000", b"00512", b"00513", b"nothing", b"", b"00512"]
    assert [(key, bytes(value)) for key, value in table.find(wanted)] == [
        (key, many[key]) for key in (b"00000", b"00512", b"00513", b"00999")
    ]
    assert stream.got - before < len(content) / 50
    assert list(table.find([])) == []


def test_tables_that_are_none():
    good = writer.table(sorted(ROWS.items()))
    pairs = [(b"", b"x"), (b"b", b"y"), (b"a", b"z")]
    far = struct.pack("<II", 0, 2**31)
    twice = [(b"a", writer.varint(0) + writer.varint(8)), (b"b", writer.varint(0) + writer.varint(8))]
    for content, words in (
        (b"", "does not end as a table"),
        (good[-47:], "does not end as a table"),
        (good[:-1], "it was cut"),
        (good[:-48] + b"\xff" * 40 + good[-8:], "does not end"),
        (good[:-48] + (b"\0\0" + b"\xff\x7f" * 2).ljust(40, b"\0") + good[-8:], "reaches past its end"),
        (writer.table(pairs), "keys are not in order at b'a'"),
        (writer.table(pairs[:1] * 2), "keys are not in order at b''"),
        (writer.assemble([(b"b", writer.block([])), (b"a", writer.block([]))]), "keys are not in order at b'a'"),
        (writer.table(pairs[:1], kind=2), r"is compressed in a way \(kind 2\)"),
        (writer.table(pairs[:1], kind=1), "compressed bytes"),
        (writer.assemble([(b"", b"")]), "has 0 bytes, too few for 0 restarts"),
        (writer.assemble([(b"", far)]), "too few for 2147483648 restarts"),
        (writer.assemble([(b"", b"\x01\x00\x00" + far[:4] + b"\0\0\0\0")]), "runs past its block"),
        (writer.assemble([(b"", b"\x00\x09\x00" + b"\0" * 8)]), "runs past its block"),
        (with_index(twice), "blocks overlap at 0"),
    ):
        with pytest.raises(CheckpointError, match=words):
            rows(content)


def with_index(handles: list[tuple[bytes, bytes]]) -> bytes:
    """A table of one empty block, whose index says what it likes."""
    out, index = writer.sealed(writer.block([])), writer.block(handles, 1)
    footer = writer.varint(0) + writer.varint(8) + writer.varint(len(out)) + writer.varint(len(index))
    return out + writer.sealed(index) + footer.ljust(40, b"\0") + struct.pack("<Q", writer.MAGIC)


def test_an_altered_block_is_refused():
    content = bytearray(writer.table(sorted(ROWS.items())))
    content[7] ^= 1
    table = opened(bytes(content))  # the index is whole
    with pytest.raises(CheckpointError, match="block at 0 was altered, its checksum is another"):
        next(table.rows())


def test_limits():
    assert rows(v1_writer.table(ROWS), 4000) == ROWS
    with pytest.raises(CheckpointError, match="names and values have more than 1000 bytes"):
        rows(v1_writer.table(ROWS, rows_each=1), 1000)
    with pytest.raises(CheckpointError, match="are allowed"):
        rows(v1_writer.table(ROWS, rows_each=99), 1000)
    with pytest.raises(CheckpointError, match="tell of .* no more than 1000 are allowed"):
        rows(v1_writer.table(ROWS, compress=True, rows_each=99), 1000)
    # few bytes that unpack into many: keys that share all but their end
    keys = [b"k" * 200 + bytes([i]) for i in range(200)]
    content = writer.assemble([(keys[-1], writer.block([(key, b"") for key in keys], 10**6))])
    with pytest.raises(CheckpointError, match="names and values have more"):
        rows(content, len(content))


@pytest.mark.parametrize("compress", [False, True])
def test_nonsense_is_refused_or_read(compress: bool):
    """With checksums that are right, which whoever alters a file can see to."""
    draw, refused = random.Random(3), 0
    block = writer.block(sorted(ROWS.items()), 4)
    good = snap(block) if compress else block
    for _ in range(1000):
        bad = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        del bad[draw.choice([len(bad), draw.randrange(len(bad))]) :]
        try:
            rows(writer.assemble([(b"\xff", bytes(bad))], int(compress)))
        except CheckpointError:
            refused += 1
    assert refused > 500


def test_what_is_a_table(tmp_path: Path):
    (tmp_path / "table").write_bytes(writer.table([]))
    (tmp_path / "short").write_bytes(b"abc")
    assert is_table(tmp_path / "table")
    for other in ("short", "gone", ".", "zero\0byte"):
        assert not is_table(tmp_path / other)


SNAPPYS = b"kwNYY29udjEvd2VpZ2h0cy9Nb21lbnR1bSAyFwAFDhgyL2JpYXNlCQ3+MgD+MgBGMgAAAP4BAP4BAP4BAA0BCGVuZA=="


def test_what_snappy_itself_compressed():
    text = b"conv1/weights/Momentum conv1/weights conv2/biases " * 4 + bytes(200) + b"end"
    assert unsnap(base64.b64decode(SNAPPYS), LIMIT) == text


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.text("ab", max_size=300).map(str.encode)), st.integers(1, 400))
def test_any_bytes_come_back(data: bytes, times: int):
    data = data * times if len(data) * times < 20000 else data
    assert unsnap(snap(data), LIMIT) == data
    assert unsnap(writer.varint(len(data)) + literal(data), LIMIT) == data


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 63, 64, 2047, 2048, 65535, 65536])
@pytest.mark.parametrize("size", [1, 4, 11, 12, 64])
def test_copies_near_and_far(offset: int, size: int):
    start = np.random.default_rng(1).bytes(70000)
    wanted = bytearray(start)
    for _ in range(size):
        wanted.append(wanted[-offset])
    assert unsnap(writer.varint(len(wanted)) + literal(start) + copy(offset, size), LIMIT) == wanted


BAD_STREAMS = {
    "nothing": (b"", "does not end"),
    "no length": (b"\xff\xff", "does not end"),
    "a forged length": (b"\xff\xff\xff\xff\x0f" + literal(b"a"), "7 compressed bytes tell of 4294967295"),
    "more than there can be": (b"\x80\x20" + literal(b"a" * 60), "63 compressed bytes tell of 4096"),
    "too short": (b"\x05" + literal(b"abcd"), "do not make the 5"),
    "too long": (b"\x03" + literal(b"abcd"), "do not make the 3"),
    "too long by a copy": (b"\x05" + literal(b"abcd") + copy(1, 4), "do not make the 5"),
    "a cut literal": (b"\x04" + literal(b"abcd")[:-1], "do not make the 4"),
    "a cut length": (b"\x04" + b"\xf4\x03", "do not make the 4"),
    "a cut copy": (b"\x08" + literal(b"abcd") + b"\x0e\x01", "do not make the 8"),
    "four gigabytes of literal": (b"\x04" + b"\xfc\xff\xff\xff\xff" + b"abcd", "do not make the 4"),
    "a copy of nothing": (b"\x04" + copy(1, 4), "copy from 1 back after 0"),
    "a copy from before": (b"\x08" + literal(b"abcd") + copy(5, 4), "copy from 5 back after 4"),
    "a copy of itself": (b"\x08" + literal(b"abcd") + copy(0, 4), "copy from 0 back"),
    "something behind": (b"\x04" + literal(b"abcd") + b"\0", "do not make the 4"),
}


@pytest.mark.parametrize("case", BAD_STREAMS)
def test_streams_that_are_none(case: str):
    data, words = BAD_STREAMS[case]
    with pytest.raises(CheckpointError, match=words):
        unsnap(data, 1 << 40)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_refused_or_unpacked_within_its_bounds(data: bytes):
    try:
        assert len(unsnap(data, 1000)) <= min(1000, 22 * len(data))
    except CheckpointError:
        return


def test_messages():
    data = writer.field(1, 5) + writer.field(2, b"ab") + writer.field(1, -3) + writer.field(2, b"c")
    data += b"\x1d" + struct.pack("<I", 7) + b"\x21" + struct.pack("<Q", 2**63)
    numbers, nested = read_message(data)
    assert numbers == {1: -3, 3: 7, 4: 2**63}
    assert {field: [bytes(found) for found in every] for field, every in nested.items()} == {2: [b"ab", b"c"]}
    assert read_message(memoryview(b"")) == ({}, {})
    for bad, words in ((b"\x0b", "wire type 3"), (b"\x12\x03ab", "past its entry"), (b"\x1d\0", "past its entry")):
        with pytest.raises(CheckpointError, match=words):
            read_message(bad)


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3))
def test_numbers(number: int, before: bytes):
    data = before + writer.varint(number)
    assert read_varint(data + b"x", len(before)) == (number, len(data))
    with pytest.raises(CheckpointError, match="does not end"):
        read_varint(data[:-1], len(before))


def test_checksums():
    # of 32 zero bytes CRC-32C is 8a9136aa, which RFC 3720 prints; the mask turns and adds
    assert masked_crc(bytes(32)) == (((0x8A9136AA >> 15) | (0x8A9136AA << 17)) + 0xA282EAD8) % 2**32
    assert masked_crc(np.zeros(32, np.uint8)) == masked_crc(bytes(32))


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError(), FileNotFoundError(2, "not there")])
def test_whatever_goes_wrong_names_the_file(error: Exception):
    with pytest.raises(CheckpointError, match="some/file cannot be read: "), reading(Path("some/file")):
        raise error
    with pytest.raises(CheckpointError, match="some/file: is bad"), reading(Path("some/file")):
        raise CheckpointError("is bad")
