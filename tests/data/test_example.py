import struct
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.data import example
from plait.data.example import make_example, parse_example
from plait.errors import DataError

IMAGE = {"image/encoded": b"\xff\xd8" + bytes(300), "image/format": "JPEG", "image/class/label": 731, "box": [0.5, 1.0]}


def varint(value):
    value &= (1 << 64) - 1
    out = []
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number, content):
    """A field of bytes, or, of an int, a varint."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def four(number, value):
    return varint(number << 3 | 5) + struct.pack("<f", value)


def entry(name, *features):
    return field(1, field(1, name) + b"".join(field(2, feature) for feature in features))


def one(*features):
    """The list of an Example with one entry, of this Feature."""
    return parse_example(field(1, entry(b"x", *features)))["x"]


def same(got, expected):
    assert type(got) is type(expected)
    if isinstance(got, np.ndarray):
        assert got.dtype == expected.dtype
        got, expected = got.tolist(), expected.tolist()
    assert got == expected


def test_what_was_made_is_parsed():
    parsed = parse_example(make_example(IMAGE))
    assert list(parsed) == list(IMAGE)
    same(parsed["image/encoded"], [IMAGE["image/encoded"]])
    same(parsed["image/format"], [b"JPEG"])
    same(parsed["image/class/label"], np.array([731]))
    same(parsed["box"], np.array([0.5, 1.0], np.float32))


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        ([300, -1], "0a170a150a016112101a0e0a0cac02ffffffffffffffffff01"),
        ([1.5, -2.0], "0a130a110a0161120c120a0a080000c03f000000c0"),
        (["xy", b""], "0a0f0a0d0a016112080a060a0278790a00"),
        ([], "0a070a050a01611200"),
    ],
)
def test_the_bytes_are_those_of_tensorflow(value, raw):
    """As TensorFlow 2.21 writes them."""
    assert make_example({"a": value}).hex() == raw
    assert make_example({}).hex() == "0a00"


@pytest.mark.parametrize("record", [bytes, bytearray, memoryview, lambda raw: memoryview(b"ab" + raw)[2:]])
def test_records_of_every_kind(record):
    assert parse_example(record(make_example({"x": [1.5, 2.5], "y": "text"})))["x"].tolist() == [1.5, 2.5]
    assert parse_example(record(b"")) == {}


def test_only_some_names():
    raw = make_example(IMAGE)
    assert set(parse_example(raw, {"box"})) == {"box"}
    assert set(parse_example(raw, ["box", "missing", "image/format"])) == {"box", "image/format"}
    assert parse_example(raw, ()) == {}
    damaged = field(1, entry(b"x", b"\x0a\x05") + entry(b"y", field(3, field(1, b"\x07"))))
    assert parse_example(damaged, {"y"})["y"].tolist() == [7]
    with pytest.raises(DataError):
        parse_example(damaged)


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        ("grün", ["grün".encode()]),
        (b"\0\xff", [b"\0\xff"]),
        (["a", b"b", bytearray(b"c"), memoryview(b"d")], [b"a", b"b", b"c", b"d"]),
        (np.array(["a", "bc"]), [b"a", b"bc"]),
        (np.array([b"a", b"bc"], object), [b"a", b"bc"]),
        (np.str_("a"), [b"a"]),
        (3, np.array([3])),
        (True, np.array([1])),
        ([False, 2, np.int32(3), np.bool_(True)], np.array([0, 2, 3, 1])),
        ([-1, -(1 << 63), (1 << 63) - 1], np.array([-1, -(1 << 63), (1 << 63) - 1])),
        (np.uint8([[1, 2], [3, 255]]), np.array([1, 2, 3, 255])),
        (np.array([[1, 2], [3, 4]]).T, np.array([1, 3, 2, 4])),
        (np.array([True, False]), np.array([1, 0])),
        (np.uint64(5), np.array([5])),
        (torch.tensor([[1, 2]], dtype=torch.int32), np.array([1, 2])),
        (np.arange(1000) * 12345, np.arange(1000) * 12345),
        (1.5, np.float32([1.5])),
        ([1.5, float("inf"), np.float32(2)], np.float32([1.5, float("inf"), 2])),
        (np.float64([[1], [2]]), np.float32([1, 2])),
        (np.arange(4, dtype=">f8")[::-1], np.float32([3, 2, 1, 0])),
        (torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True), np.float32([1.5])),
        (torch.tensor(2.0), np.float32([2])),
        (np.zeros(0, np.float32), np.zeros(0, np.float32)),
        (np.zeros(0, np.int64), np.zeros(0, np.int64)),
        ((), []),
        ([], []),
    ],
)
def test_values_of_every_kind(value, parsed):
    same(parse_example(make_example({"x": value}))["x"], parsed)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2.0], r"field 'x' is of mixed kinds \(float, int\)"),
        (["a", 1], r"mixed kinds \(bytes, int\)"),
        (None, "holds a NoneType"),
        ([[1], [2]], "holds a list; write .* or an array"),
        ({"a": 1}, "holds a dict"),
        (1j, "holds a complex"),
        (np.array([1j]), "holds a complex"),
        ([torch.tensor(1)], "holds a Tensor"),
        (1 << 63, "int64 cannot hold"),
        (np.uint64(1 << 63), "int64 cannot hold"),
        (1e39, "float32 cannot hold"),
        (np.array([1e39]), "float32 cannot hold"),
        ("\ud800", "UTF-8 cannot write"),
    ],
)
def test_values_that_are_refused(value, text):
    with pytest.raises(DataError, match=text):
        make_example({"x": value})


def test_names_are_text():
    with pytest.raises(DataError, match="names in an Example are text, got 3"):
        make_example({3: "x"})
    assert list(parse_example(make_example({"": 1, "grün": 2}))) == ["", "grün"]


def test_an_example_may_not_be_longer_than_protobuf_allows(monkeypatch):
    monkeypatch.setattr(example, "_MAX_BYTES", 100)
    with pytest.raises(DataError, match="and 100 are allowed"):
        make_example({"x": bytes(100)})


def test_floats_are_views_of_the_record():
    raw = bytearray(make_example({"x": np.arange(100, dtype=np.float32)}))
    got = parse_example(raw)["x"]
    raw[-4:] = struct.pack("<f", 7)
    assert got[-1] == 7


def test_numbers_packed_or_not_or_both():
    pack = struct.pack("<3f", 1, 2, 3)
    same(one(field(2, field(1, pack))), np.float32([1, 2, 3]))
    same(one(field(2, four(1, 1) + four(1, 2))), np.float32([1, 2]))
    same(one(field(2, four(1, 9) + field(1, pack) + four(1, 8))), np.float32([9, 1, 2, 3, 8]))
    same(one(field(3, field(1, 1) + field(1, -1))), np.array([1, -1]))
    same(one(field(3, field(1, b"\x01\x80\x01") + field(1, 300) + field(1, b""))), np.array([1, 128, 300]))


def test_messages_that_come_in_parts_are_one():
    same(one(field(1, field(1, b"a")), field(1, field(1, b"b"))), [b"a", b"b"])
    same(one(field(1, field(1, b"a")), field(1, field(1, b"b")), field(1, field(1, b"c"))), [b"a", b"b", b"c"])
    same(one(field(3, field(1, 1)) + field(3, field(1, 2))), np.array([1, 2]))
    same(one(field(3, field(1, 1)) + field(1, field(1, b"b"))), [b"b"])  # the last kind wins
    raw = field(1, entry(b"x", field(3, field(1, 1)))) + field(1, entry(b"y") + entry(b"x", field(3, field(1, 2))))
    assert {name: list(value) for name, value in parse_example(raw).items()} == {"x": [2], "y": []}
    assert list(parse_example(field(1, field(1, field(1, b"a") + field(1, b"b"))))) == ["b"]
    assert list(parse_example(field(1, field(1, field(2, field(3, b"")))))) == [""]


def test_what_is_not_known_is_passed_over():
    extra = field(9, b"whatever") + field(1000, 5) + four(7, 1) + varint(8 << 3 | 1) + bytes(8)
    inner = field(1, extra + field(1, extra + field(1, b"x") + extra + field(2, extra + field(3, extra + field(1, 5)))))
    same(parse_example(extra + inner + extra)["x"], np.array([5]))
    same(one(extra), [])
    # a known number written in another way is as if it were unknown
    assert parse_example(field(1, 5)) == {}
    same(one(field(1, field(1, 5) + field(1, b"a"))), [b"a"])
    same(one(field(2, field(1, 5))), np.zeros(0, np.float32))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\x0a", "a number that does not end"),
        (b"\x0a\x05abc", "a field of 5 bytes where 3 are left"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "a field of 18446744073709551615 bytes"),
        (b"\x0a" + b"\xff" * 12, "a number that does not end"),
        (b"\x0b\x0c", "written in the way 3"),
        (b"\x0c", "written in the way 4"),
        (b"\x0e", "written in the way 6"),
        (b"\x0f", "written in the way 7"),
        (b"\x02\x00", "a field of number 0"),
        (varint((1 << 32) | 2) + b"\x00", "a field of number"),
        (b"\x08\xff", "a number that does not end"),
        (b"\x0d\x00", "a field of 4 bytes where 1 are left"),
        (b"\x09\x00", "a field of 8 bytes where 1 are left"),
        (field(1, entry(b"\xff")), "a name that is not UTF-8"),
        (field(1, entry(b"x", field(2, field(1, b"abc")))), "4 does not divide"),
        (field(1, entry(b"x", field(2, field(1, b"ab") + field(1, b"ab")))), "cut short"),
        (field(1, entry(b"x", field(3, field(1, b"\x80")))), "does not end"),
        (field(1, entry(b"x", field(3, field(1, b"\x80") + field(1, b"\x01")))), "cut short"),
        (field(1, entry(b"x", field(3, field(1, b"\x01" * 60 + b"\x80")))), "cut short"),
        (field(1, entry(b"x", field(3, field(1, b"\x80" * 60 + b"\x01")))), "does not end"),
        (field(1, entry(b"x", field(3, field(1, b"\x80" * 10)) + field(1, b""))), "does not end"),
        (field(1, entry(b"x", field(1, b"\x78") + field(1, b"\x01"))), "does not end"),  # cut off, and gone on with
        (field(1, entry(b"x", b"\x78", b"\x01")), "does not end"),
        (field(1, field(1, field(1, b"\xff") + field(1, b"x"))), "not UTF-8"),
    ],
)
def test_what_is_no_example(raw, text):
    with pytest.raises(DataError, match=text):
        parse_example(raw)


@pytest.mark.parametrize("record", ["text", None, 3, [1, 2], np.zeros((2, 2))[:, :1]])
def test_what_is_no_bytes(record):
    with pytest.raises(DataError, match="an Example is read from bytes, got a"):
        parse_example(record)


int64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 300)


@given(st.lists(int64, max_size=80), st.booleans())
def test_integers_of_any_length(numbers, packed):
    content = field(1, b"".join(map(varint, numbers))) if packed else b"".join(field(1, number) for number in numbers)
    same(one(field(3, content)), np.array(numbers, np.int64))


@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_of_integers(monkeypatch, block):
    monkeypatch.setattr(example, "_BLOCK", block)
    numbers = [(-1) ** i * 3**i for i in range(39)] * 3
    same(one(field(3, field(1, b"".join(map(varint, numbers))))), np.array(numbers))


fields = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.lists(st.binary(max_size=200)) | st.lists(int64) | st.lists(st.floats(width=32, allow_nan=False)),
    max_size=5,
)


@given(fields)
def test_any_example_comes_back(values):
    parsed = parse_example(make_example(values))
    assert {name: list(value) for name, value in parsed.items()} == values


@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_bytes_are_an_example_or_an_error(raw, cut):
    good = make_example(IMAGE)
    for record in (
        raw,
        good[:cut] + raw + good[cut:],
        field(1, entry(b"x", raw)),
        field(1, entry(b"x", field(3, raw))),
    ):
        try:
            parse_example(record)
        except DataError:
            continue


def test_a_long_list_in_small_parts_takes_no_time_to_speak_of():
    """Twice the parts may take about twice the time, not four times."""
    parts = 20_000
    raws = [
        field(1, entry(b"x", *[field(1, field(1, b"a"))] * parts)),
        field(1, entry(b"x", field(3, field(1, 1)) * parts)),
        field(1, entry(b"x", field(3, field(1, 1) * parts))),
        field(1, entry(b"x", field(2, four(1, 1) * parts))),
        field(1, entry(b"x", (field(3, field(1, 1)) + field(1, field(1, b"a"))) * parts)),
    ]
    begin = time.process_time()
    lengths = [len(parse_example(raw)["x"]) for raw in raws]
    assert time.process_time() - begin < 5
    assert lengths == [parts, parts, parts, parts, 1]
