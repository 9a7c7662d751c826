import json
import math
import random
import re
import resource
import struct
import sys
import traceback
import tracemalloc
import warnings
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ConfigError, FederalError
from plait.federal import wire
from plait.federal.wire import DTYPES, Frame, FrameError, Kind, VersionError, decode, encode_json, encode_tensor

COUNTS = {"session": 0x1122334455667788, "number": 5, "received": 4, "consumed": 3}
PAGE = Path(__file__).parents[2] / "docs" / "federal-wire.md"
CANARY = "canary-7351"
JSON_KINDS = [Kind.HELLO, Kind.WORD, Kind.FAIL, Kind.BYE]


def tensor_frame(tensor, **options):
    return encode_tensor(7, 12, tensor, **COUNTS, **options)


def word_frame(value, **options):
    return encode_json(Kind.WORD, value, topic="t", **COUNTS, **options)


def seal(frame):
    """The frame with the checksums that its bytes ask for: what a peer that means harm would send."""
    frame = bytearray(frame)
    described = int.from_bytes(frame[6:8], "little")
    begin = 64 + described + -described % 16
    frame[52:56] = bytes(4)
    if frame[5] & 1:
        frame[48:52] = zlib.crc32(frame[begin:]).to_bytes(4, "little")
    frame[52:56] = zlib.crc32(frame[:begin]).to_bytes(4, "little")
    return bytes(frame)


def build(kind=2, description=b"", payload=b"", flags=0, **changed):
    """A frame by hand, after the page."""
    fields = {"magic": b"PLT", "version": 1, "length": len(payload), "described": len(description), **changed}
    head = struct.pack(
        "<3sBBBHQQQQQII8x", fields["magic"], fields["version"], kind, flags, fields["described"], 1, 2, 3, 4,
        fields["length"], 0, 0,
    )  # fmt: skip
    return seal(head + description + bytes(-len(description) % 16) + payload)


def describe(shape=(), wire_code=2, code=2, flags=0, scale=0.0, ndim=None):
    ndim = len(shape) if ndim is None else ndim
    return struct.pack("<IQBBBBf", 7, 12, flags, wire_code, code, ndim, scale) + struct.pack(f"<{len(shape)}Q", *shape)


def example(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-100, 100, shape, generator=generator)
    return values > 0 if dtype is torch.bool else values.to(dtype)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 1, 3), (0,), (4, 0, 2), (1,) * 16])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_tensors_come_as_they_went(dtype, shape, checksum):
    tensor = example(dtype, shape)
    frame = decode(tensor_frame(tensor, gradient=True, checksum=checksum))
    assert (frame.kind, frame.session, frame.number) == (Kind.TENSOR, COUNTS["session"], 5)
    assert (frame.received, frame.consumed, frame.slot, frame.turn, frame.gradient) == (4, 3, 7, 12, True)
    assert frame.tensor.dtype == dtype
    assert frame.tensor.shape == shape
    assert torch.equal(frame.tensor, tensor)


@settings(max_examples=40)
@given(
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=8 * 256, max_size=8 * 256),
)
def test_any_bits_come_as_they_went(dtype, shape, slot, turn, bits):
    """Nans with their payloads, negative zeros and denormals, too: bytes are compared."""
    count = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        bits = bytes(byte & 1 for byte in bits)
    raw = torch.frombuffer(bytearray(bits), dtype=torch.uint8)[:count]
    tensor = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    frame = decode(encode_tensor(slot, turn, tensor, **COUNTS))
    assert (frame.slot, frame.turn, frame.gradient) == (slot, turn, False)
    assert frame.tensor.shape == tensor.shape
    assert frame.tensor.reshape(-1).view(torch.uint8).tolist() == raw.tolist()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[:, ::2],
        lambda t: t[2],
        lambda t: t[:, 1:3].permute(1, 0),
        lambda t: t[:1].expand(5, 8),
        lambda t: t.reshape(3, 2, 4).transpose(0, 2),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: torch.nn.Parameter(t) * 2,
        lambda t: t[1, 3],
    ],
)
def test_any_strides(view):
    tensor = view(torch.arange(24.0).reshape(3, 8))
    assert torch.equal(decode(tensor_frame(tensor)).tensor, tensor)


@pytest.mark.alone
def test_a_contiguous_tensor_is_copied_once():
    tensor = torch.zeros(1 << 20)
    tracemalloc.start()
    try:
        frame = tensor_frame(tensor)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(frame) == 64 + 32 + (4 << 20)
    assert peak < len(frame) + 10_000


def test_a_decoded_tensor_lies_on_the_frame():
    frame = tensor_frame(torch.arange(1000.0).reshape(10, 100))
    start = np.frombuffer(frame, dtype=np.uint8).ctypes.data
    tensor = decode(frame).tensor
    assert tensor.data_ptr() == start + 64 + 48
    assert tensor.data_ptr() % 16 == 0
    del frame
    assert tensor.sum().item() == 499500.0


def test_nobody_hears_that_bytes_cannot_be_written_to():
    frame = tensor_frame(torch.ones(3))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        decode(frame).tensor.add_(1)
    assert heard == []


@pytest.mark.parametrize("gradient", [False, True])
def test_an_absent_tensor(gradient):
    data = tensor_frame(None, gradient=gradient)
    frame = decode(data)
    assert (frame.tensor, frame.gradient, frame.slot, frame.turn) == (None, gradient, 7, 12)
    assert len(data) == 96


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("shape", [(5, 4), (0, 4), ()])
def test_fewer_bits(precision, shape):
    tensor = example(torch.float32, shape)
    data = tensor_frame(tensor, precision=precision, checksum=True)
    back = decode(data).tensor
    payload = tensor.numel() * (1 if precision == "int8" else 2)
    assert len(data) == 64 + (20 + 8 * len(shape) + 15) // 16 * 16 + payload
    assert (back.dtype, back.shape) == (torch.float32, tensor.shape)
    torch.testing.assert_close(back, tensor, rtol=2**-8, atol=0.5)
    if payload:
        back += 1  # rounded tensors have memory of their own


def test_fewer_bits_leave_integers_alone():
    tensor = torch.tensor([2**40, -1])
    assert torch.equal(decode(tensor_frame(tensor, precision="int8")).tensor, tensor)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("kind", JSON_KINDS)
@pytest.mark.parametrize("value", [None, 0, "ü\n\0😀", {"a": [1, 2.5, {"b": None}], "": False}, [], 2**70])
def test_json_comes_as_it_went(kind, value, checksum):
    topic = "t/ü" if kind is Kind.WORD else ""
    frame = decode(encode_json(kind, value, topic=topic, checksum=checksum, **COUNTS))
    assert frame == Frame(kind, *COUNTS.values(), value=value, topic=topic)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.text(), values)
def test_any_word_comes_as_it_went(topic, value):
    frame = decode(encode_json(Kind.WORD, value, topic=topic, session=1))
    assert (frame.topic, frame.value) == (topic, value)


@pytest.mark.parametrize("size", [wire.MAX_TEXT_BYTES - 30, wire.MAX_TEXT_BYTES - 10, 1 << 20])
def test_long_words_go_in_the_payload(size):
    data = word_frame("x" * size, checksum=True)
    assert struct.unpack_from("<Q", data, 40)[0] == (size + 2 if size > wire.MAX_TEXT_BYTES - 20 else 0)
    frame = decode(data)
    assert frame.topic == "t"
    assert frame.value == "x" * size


def test_an_ack_is_its_header():
    data = encode_json(Kind.ACK, None, session=9, received=3, consumed=2)
    assert len(data) == 64
    assert decode(data) == Frame(Kind.ACK, 9, 0, 3, 2)


def test_a_frame_shows_nothing_of_its_contents():
    shown = repr(decode(tensor_frame(torch.tensor([7351.0])))) + repr(decode(word_frame(CANARY)))
    assert "7351" not in shown
    assert "slot=7" in shown


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.ones((1,) * 17),
        torch.ones(1).expand(1 << 28),
        torch.empty(0, 1 << 40),
    ],
)
def test_what_cannot_be_sent(tensor):
    with pytest.raises(FrameError, match="float16|may have|may be sent"):
        tensor_frame(tensor)


def test_a_wrong_precision_or_number_cannot_be_sent():
    with pytest.raises(ConfigError, match="'half'"):
        tensor_frame(torch.ones(1), precision="half")
    with pytest.raises(FederalError, match="as int8"):
        tensor_frame(torch.tensor([math.nan]), precision="int8")
    assert decode(tensor_frame(torch.tensor([math.nan]))).tensor.isnan().all()


def nested(depth):
    value = CANARY
    for _ in range(depth):
        value = [value]
    return value


class Unknown:
    pass


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (math.nan, "nan"),
        ([math.inf], "nan"),
        (Unknown(), "Unknown"),
        ({(1, 2): CANARY}, "keys must be"),
        (CANARY + "\ud800", "half a character"),
        (nested(64), "deeper than 64"),
        (nested(5000), "deep"),
        (CANARY * (2 << 20), "say less"),
        ([0] * (wire.MAX_VALUES + 2), "values"),
    ],
)
def test_words_that_cannot_be_sent(value, why):
    with pytest.raises(FrameError, match=why) as caught:
        word_frame(value)
    assert CANARY not in str(caught.value)


def test_as_deep_as_it_may_be():
    assert decode(word_frame(nested(63))).value == nested(63)
    assert decode(word_frame([nested(62), {"a": nested(61)}, '[{"\\' * 100])).value[2] == '[{"\\' * 100


def test_long_facts_cannot_be_sent():
    with pytest.raises(FrameError, match="HELLO: .* bytes of JSON, and 49152"):
        encode_json(Kind.HELLO, "x" * (wire.MAX_TEXT_BYTES - 1), session=0)


def test_another_endian_is_refused(monkeypatch):
    data = tensor_frame(torch.ones(1))
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(FrameError, match="big-endian"):
        tensor_frame(torch.ones(1))
    with pytest.raises(FrameError, match="big-endian"):
        decode(data)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_told_from_damage(version):
    with pytest.raises(VersionError, match=f"version {version}, this one of version 1") as caught:
        decode(b"PLT" + bytes([version]) + b"who knows")
    assert caught.value.theirs == version


ONE = struct.pack("<f", 1.0)
WRONG = {
    "nothing": (b"", "do not begin"),
    "the magic alone": (b"PLT", "do not begin"),
    "another magic": (b"GET / HTTP/1.1\r\n" + bytes(64), "no plait"),
    "a short header": (b"PLT\x01" + bytes(59), "of 63 bytes"),
    "kind 0": (build(kind=0), "kind 0"),
    "kind 7": (build(kind=7), "kind 7"),
    "an unknown flag": (build(kind=4, flags=2), "zeros"),
    "reserved bytes": (seal(build(kind=4)[:60] + b"\1\0\0\0"), "zeros"),
    "padding": (seal(build(kind=6, description=b"{}")[:-1] + b"\1"), "zeros"),
    "an unsaid checksum": (seal(build(kind=4)[:48] + b"\1\0\0\0" + build(kind=4)[52:]), "checksum of .* payload"),
    "a payload that is not there": (build(kind=3, length=1 << 63), "cut or mixed up"),
    "a payload unsaid": (build(kind=4, payload=b"x", length=0), "cut or mixed up"),
    "a description that is not there": (build(kind=4, described=65535), "cut or mixed up"),
    "an ack with a description": (build(kind=4, description=b"{}"), "16 bytes after"),
    "an ack with a payload": (build(kind=4, payload=b"x"), "1 bytes after"),
    "no description": (build(payload=ONE), "has 0 bytes"),
    "half a description": (build(description=describe()[:19]), "19 bytes"),
    "dimensions missing": (build(description=describe((1,), ndim=2), payload=ONE), "28 bytes, 2 dimensions"),
    "dimensions unsaid": (build(description=describe((1,), ndim=0), payload=ONE), "28 bytes, 0 dimensions"),
    "17 dimensions": (build(description=describe((1,) * 17), payload=ONE), "17 dimensions"),
    "255 dimensions": (build(description=describe((2**64 - 1,) * 255), payload=ONE), "255 dimensions"),
    "a tensor's flag": (build(description=describe(flags=4), payload=ONE), "flags 4"),
    "dtype 0": (build(description=describe(code=0), payload=ONE), "dtype 0"),
    "dtype 11": (build(description=describe(wire_code=11), payload=ONE), "wire 11"),
    "float32 as float64": (build(description=describe(wire_code=1), payload=bytes(8)), "cannot come as"),
    "int64 as int8": (build(description=describe(wire_code=8, code=5, scale=1.0), payload=bytes(1)), "cannot come as"),
    "fp16 as bf16": (build(description=describe(wire_code=4, code=3), payload=bytes(2)), "cannot come as"),
    "a scale for float32": (build(description=describe(scale=1.0), payload=ONE), "scale"),
    "no scale for int8": (build(description=describe(wire_code=8), payload=bytes(1)), "scale"),
    "a negative scale": (build(description=describe(wire_code=8, scale=-1.0), payload=bytes(1)), "scale"),
    "a nan for a scale": (build(description=describe(wire_code=8, scale=math.nan), payload=bytes(1)), "scale"),
    "an infinite scale": (build(description=describe(wire_code=8, scale=math.inf), payload=bytes(1)), "scale"),
    "one element too few": (build(description=describe((2,)), payload=ONE), r"4 bytes .* it has 8"),
    "one byte too many": (build(description=describe(), payload=ONE + b"x"), r"5 bytes .* it has 4"),
    "elements of none": (build(description=describe((0,)), payload=ONE), r"4 bytes .* it has 0"),
    "2 ** 64 elements": (build(description=describe((2**32, 2**32))), "bytes"),
    "no elements, huge strides": (build(description=describe((0, 2**63, 2**63))), "bytes"),
    "absent with elements": (build(description=describe(flags=2), payload=ONE), "absent"),
    "absent with a shape": (build(description=describe((1,), flags=2, wire_code=0, code=0)), "absent"),
    "a payload for hello": (build(kind=1, description=b"{}", payload=b"{}"), "at most 49152 and 0"),
    "a long hello": (build(kind=1, description=b"1" * 50_000), "at most 49152"),
    "a long word": (build(kind=3, description=b'{"topic":""}', payload=bytes((16 << 20) + 1)), "16777216"),
    "no JSON": (build(kind=1, description=b"{"), "should be JSON"),
    "no JSON at all": (build(kind=6), "should be JSON"),
    "no UTF-8": (build(kind=1, description=b'"\xff"'), "should be JSON"),
    "nan": (build(kind=1, description=b"NaN"), "should be JSON"),
    "minus infinity": (build(kind=1, description=b"[-Infinity]"), "should be JSON"),
    "half a character": (build(kind=1, description=b'"\\ud800"'), "should be JSON"),
    "very many digits": (build(kind=1, description=b"1" * 40_000), "should be JSON"),
    "very deep": (build(kind=1, description=b"[" * 40_000), "deeper"),
    "too deep": (build(kind=1, description=b'{"":' * 65 + b"0" + b"}" * 65), "deeper"),
    "very deep in a payload": (build(kind=3, description=b'{"topic":""}', payload=b"[" * (1 << 20)), "deeper"),
    "very many values": (build(kind=3, description=b'{"topic":""}', payload=b"[]," * (1 << 20)), "values"),
    "a word without a topic": (build(kind=3, description=b'{"value":1}'), "of topic and value"),
    "a word without a value": (build(kind=3, description=b'{"topic":""}'), "of topic and value"),
    "a word with two values": (build(kind=3, description=b'{"topic":"","value":1}', payload=b"1"), "object of topic"),
    "a word of a list": (build(kind=3, description=b'["topic","value"]'), "of topic and value"),
    "a topic that is no text": (build(kind=3, description=b'{"topic":[],"value":1}'), "of topic and value"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_frame_is_refused_with_the_reason(name):
    data, why = WRONG[name]
    with pytest.raises(FrameError, match=why):
        decode(data)


def test_the_frames_by_hand_are_right_but_for_what_is_wrong():
    frame = decode(build(description=describe((1,)), payload=ONE))
    assert (frame.tensor.tolist(), frame.session, frame.consumed) == ([1.0], 1, 4)
    assert decode(build(kind=3, description=b'{"topic":"a","value":[1,1.5]}')).value == [1, 1.5]
    assert decode(build(kind=1, description=b'{"a":1,"a":2}')).value == {"a": 2}
    assert decode(build(kind=1, description=b'"\\ud83d\\ude00"')).value == "😀"
    assert decode(build(description=describe((4,), 10, 10), payload=b"\0\1\2\xff")).tensor.tolist() == [0, 1, 1, 1]


def test_every_single_altered_bit_is_noticed():
    data = tensor_frame(torch.tensor([1.5, -2.0]), checksum=True)
    for place in range(8 * len(data)):
        altered = bytearray(data)
        altered[place // 8] ^= 1 << place % 8
        with pytest.raises(FrameError):
            decode(bytes(altered))


def test_without_a_checksum_only_the_payload_is_unprotected():
    data = tensor_frame(torch.tensor([1.5, -2.0]))
    for place in range(len(data) - 8):
        altered = bytearray(data)
        altered[place] ^= 255
        with pytest.raises(FrameError):
            decode(bytes(altered))
    assert decode(data[:-1] + b"\0").tensor[0] == 1.5


def test_every_cut_and_every_addition_is_noticed():
    data = tensor_frame(torch.tensor([1.5, -2.0]), checksum=True)
    for length in range(len(data)):
        with pytest.raises(FrameError):
            decode(data[:length])
        with pytest.raises(FrameError):
            decode(data + data[: length + 1])


def test_frames_and_tensors_past_the_limit_are_refused():
    data = tensor_frame(torch.ones(100), precision="int8")
    assert decode(data, max_bytes=400).tensor.numel() == 100
    with pytest.raises(FrameError, match="399 bytes"):
        decode(data, max_bytes=399)  # the tensor, not the frame
    with pytest.raises(FrameError, match="at most"):
        decode(data, max_bytes=len(data) - 1)


def test_no_error_shows_what_a_frame_holds():
    text = json.dumps({"topic": CANARY, "value": CANARY}).encode()
    altered = [text[:-1], text + b"}", b"[" * 100 + text, text + b"\xff", text[:-1] + b',"x":NaN}']
    for description in altered:
        with pytest.raises(FrameError) as caught:
            decode(build(kind=3, description=description))
        assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_the_example_on_the_page():
    section = PAGE.read_text(encoding="utf-8").split("## An example", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    tensor = torch.tensor([[1.5, -2.0, 0.25]])
    data = encode_tensor(3, 12, tensor, gradient=True, checksum=True, session=0x1122334455667788, number=5, received=4, consumed=3)  # fmt: skip # noqa: E501
    assert bytes.fromhex("".join(lines)) == data
    assert torch.equal(decode(data).tensor, tensor)


def test_the_page_has_every_number():
    page = PAGE.read_text(encoding="utf-8")
    for code, dtype in DTYPES.items():
        assert re.search(
            rf"^\| {code} \| {str(dtype).removeprefix('torch.')} \| {dtype.itemsize} \|", page, re.MULTILINE
        )
    for kind in Kind:
        assert re.search(rf"^\| {kind.value} \| {kind.name} \|", page, re.MULTILINE)
    for limit in (wire.MAX_BYTES, wire.MAX_TEXT_BYTES, wire.MAX_WORD_BYTES, wire.MAX_VALUES):
        assert f"{limit:,}" in page
    for limit in (wire.MAX_DEPTH, wire.MAX_DIMENSIONS):
        assert re.search(rf"\b{limit}\b", page)


def whole_frames():
    """Frames of every kind, small ones: an alteration shall hit what matters."""
    tensors = [example(dtype, (2, 3)) for dtype in DTYPES.values()] + [torch.tensor(1.5), torch.empty(0, 3), None]
    frames = [tensor_frame(tensor, checksum=index % 2 == 0) for index, tensor in enumerate(tensors)]
    frames += [tensor_frame(torch.ones(3, 2), precision=name) for name in ("fp16", "bf16", "int8")]
    hello = {"party": "leader", "life": "8f2c:3", "fresh": True, "peer": None, "facts": {"a": [1, 2]}, "received": 0}
    frames += [encode_json(kind, hello, topic="t" * (kind is Kind.WORD), **COUNTS) for kind in JSON_KINDS]
    frames += [word_frame("x" * wire.MAX_TEXT_BYTES), encode_json(Kind.ACK, None, session=1)]
    return frames


def fuzzed(random, frames):
    """One frame that is altered, cut, extended, mixed of two, or only noise; most with right checksums."""
    data = bytearray(random.choice(frames))
    for _ in range(random.choice((1, 1, 2, 5))):
        way = random.randrange(7)
        at = random.randrange(min(len(data), 200)) if data else 0
        if way == 0:
            data[at : at + 1] = random.randbytes(1)
        elif way == 1:
            data[at : at + 8] = random.choice((bytes(8), b"\xff" * 8, b"\1" + bytes(7), random.randbytes(8)))
        elif way == 2:
            del data[at:]
        elif way == 3:
            data += random.randbytes(random.randrange(40))
        elif way == 4:
            other = random.choice(frames)
            data = data[:at] + other[at:]
        elif way == 5:
            data[at:at] = random.choice((b"[", b'{"a":', b'"', b"\\u", b"NaN", b"1e999", b"\xff")) * random.randrange(9)
        else:
            data = bytearray(random.randbytes(random.randrange(200)))
    if random.random() < 0.75 and len(data) >= 64:
        data[:4] = b"PLT\1"
        if random.random() < 0.7:  # lengths that fit, so that what lies behind them is read
            described = min(int.from_bytes(data[6:8], "little"), len(data) - 64)
            described -= (described + -described % 16 > len(data) - 64) * (described % 16)
            data[6:8] = described.to_bytes(2, "little")
            data[40:48] = (len(data) - 64 - (described + -described % 16)).to_bytes(8, "little")
        data = seal(data)
    return bytes(data)


@contextmanager
def little_memory(extra):
    """In this block the process may take so many bytes more, and no others."""
    if not sys.platform.startswith("linux"):
        yield
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(count, seed):
    source, frames = random.Random(seed), whole_frames()
    reasons, good = {}, 0
    with little_memory(64 << 20):
        for _ in range(count):
            data = fuzzed(source, frames)
            try:
                frame = decode(data)
            except FrameError as error:
                reason = re.sub(r"\d+|torch\.\w+", "n", str(error))[:40]
                reasons[reason] = reasons.get(reason, 0) + 1
            else:
                assert frame.kind in Kind
                if frame.tensor is not None:
                    frame.tensor.sum()  # all of its memory is there
                good += 1
    return reasons, good


@pytest.mark.alone
@pytest.mark.parametrize("seed", range(10))
def test_100_000_fuzzed_frames(seed):
    reasons, good = fuzz(10_000, seed)
    assert len(reasons) >= 18  # not all die at the door
    assert good >= 100
    assert sum(reasons.values()) + good == 10_000


@pytest.mark.parametrize("tensor", [torch.ones(2, 3), None])
def test_words_ride_on_a_tensor(tensor):
    words = [("step", {"go": "TRAIN:", "turn": 3}), ("check", [1, None])]
    data = encode_tensor(
        1, 2, tensor, session=3, number=4, received=5, consumed=6, gradient=True, words=wire.dump_words(words)
    )
    frame = decode(data)
    assert frame.words == words
    assert (frame.tensor is None) == (tensor is None)
    assert tensor is None or torch.equal(frame.tensor, tensor)


@pytest.mark.parametrize("text", [b"{}", b"[1]", b'[["a"]]', b"[[1, 2]]", b'[["a", 1]', b"\xff"])
def test_what_rides_on_a_tensor_and_is_no_list_of_words_is_refused(text):
    data = encode_tensor(1, 2, None, session=3, number=4, received=5, consumed=6, gradient=True, words=text)
    with pytest.raises(FrameError):
        decode(data)


def test_too_many_words_for_a_tensor_are_refused_by_who_sends_them():
    with pytest.raises(FrameError, match="say less"):
        wire.dump_words([("a", "b" * 50_000)])
