from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster.ps import wire
from plait.cluster.ps.wire import MAX_HEADER, MAX_TENSORS, WireError, decode, encode
from plait.errors import ClusterError

DTYPES = [*wire._DTYPES.values()]


def over_the_wire(frames):
    """The frames as they arrive: bytes of their own, in frames of ZeroMQ."""
    return [zmq.Frame(bytes(memoryview(frame))) for frame in frames]


def header(*specs, version=wire.VERSION, kind="push", number=7, head=None):
    return json.dumps([version, kind, number, {} if head is None else head, list(specs)]).encode()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_tensors_arrive_as_they_were(dtype, shape):
    sent = (torch.arange(24).remainder(2 if dtype is torch.bool else 100)[: int(np.prod(shape))]).to(dtype).view(shape)
    got = decode(over_the_wire(encode("push", {"step": 3}, [sent], number=9)))
    assert (got.kind, got.head, got.number) == ("push", {"step": 3}, 9)
    assert got.tensors[0].dtype == dtype
    assert got.tensors[0].shape == shape
    assert torch.equal(got.tensors[0], sent)


def test_extreme_bits_survive():
    sent = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324, -1.7e308], dtype=torch.float64)
    got = decode(over_the_wire(encode("a", {}, [sent]))).tensors[0]
    assert torch.equal(got.view(torch.int64), sent.view(torch.int64))


def test_a_tensor_with_gradient_and_one_that_is_not_contiguous_can_be_sent():
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    got = decode(over_the_wire(encode("a", {}, [weight, weight.t()]))).tensors
    assert torch.equal(got[0], weight)
    assert torch.equal(got[1], weight.t())
    assert not got[0].requires_grad


def test_nothing_is_copied_on_either_side():
    sent = torch.arange(10_000.0)
    frames = encode("a", {}, [sent])
    assert frames[1].ctypes.data == sent.data_ptr()
    frame = zmq.Frame(bytes(memoryview(frames[1])))
    got = decode([frames[0], frame]).tensors[0]
    assert got.data_ptr() == np.frombuffer(frame, np.uint8).ctypes.data
    del frame  # the tensor keeps the frame's memory
    assert torch.equal(got, sent)


@pytest.mark.parametrize("offset", range(1, 9))
def test_a_frame_that_begins_anywhere_gives_an_aligned_tensor(offset):
    sent = torch.arange(50, dtype=torch.int64)
    memory = bytearray(offset) + sent.numpy().tobytes()
    got = decode([header(["int64", [50]]), memoryview(memory)[offset:]]).tensors[0]
    assert torch.equal(got, sent)
    assert got.data_ptr() % 8 == 0


def test_bools_are_zero_or_one_whatever_came():
    got = decode([header(["bool", [4]]), bytes([0, 1, 2, 255])]).tensors[0]
    assert got.view(torch.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "without frames"),
        ([b""], "not JSON"),
        ([b"\xff\xfe"], "not JSON"),
        ([b"{}"], "list of five"),
        ([b"[1,2,3]"], "list of five"),
        ([b"[" * 1000], "not JSON"),
        ([b" " * (MAX_HEADER + 1)], f"{MAX_HEADER} is the most"),
        ([header(number=-1)], "number"),
        ([header(number=True)], "number"),
        ([header(number=1 << 60)], "number"),
        ([header(number="1")], "number"),
        ([header(version=2)], "version 2"),
        ([header(kind="")], "kind"),
        ([header(kind="a b")], "kind"),
        ([header(kind="a" * 33)], "kind"),
        ([header(kind=["a"])], "kind"),
        ([header(head=[])], "no object"),
        ([header(head={"a": float("nan")})], "not JSON"),
        ([b'[1,"a",1,{"a":-Infinity},[]]'], "not JSON"),
        ([b'[1,"a",1,{"a":1e999},[]]'], "not JSON"),
        ([b'[1,"a",1,{"a":' + b"9" * 10_000 + b"},[]]"], "not JSON"),
        ([b'[1,"a",1,{"a":' + b"[" * 40 + b"]" * 40 + b"},[]]"], "deep"),
        ([b'[1,"a",1,{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"},[]]"], "not JSON"),
        ([b'[1,"a",1,{},{}]'], "header lists"),
        ([header(["float32", [1]])], "came with 0 tensors"),
        ([header(), b"1234"], "came with 1 tensors"),
        ([header(["float32", [1]]), b"1234", b"1234"], "came with 2 tensors"),
        ([header("float32"), b"1234"], "type"),
        ([header(["float33", [1]]), b"1234"], "type"),
        ([header(["complex64", [1]]), b"12345678"], "type"),
        ([header([["float32"], [1]]), b"1234"], "type"),
        ([header(["float32", 1]), b"1234"], "shape"),
        ([header(["float32", [-1, -1]]), b"1234"], "shape"),
        ([header(["float32", [1.0]]), b"1234"], "shape"),
        ([header(["float32", [True]]), b"1234"], "shape"),
        ([header(["float32", [1] * 17]), b"1234"], "shape"),
        ([header(["float32", [1 << 60]]), b"1234"], "shape"),
        ([header(["float32", [2]]), b"1234"], "4 bytes"),
        ([header(["float32", [1]]), b"12345"], "5 bytes"),
        ([header(["float32", [1 << 40]]), b"1234"], "4 bytes"),
        ([header(["float32", [1 << 53] * 16]), b"1234"], "4 bytes"),
        ([header(["float32", [0, 1 << 53, 1 << 53]]), b""], "too long"),
    ],
)
def test_anything_else_is_refused_with_a_reason(frames, words):
    with pytest.raises(WireError, match=words):
        decode(frames)


def test_the_error_knows_the_number_where_it_could_be_read():
    with pytest.raises(WireError) as readable:
        decode([header(["float32", [2]], number=12), b"1234"])
    with pytest.raises(WireError) as unreadable:
        decode([b"nothing"])
    assert readable.value.number == 12
    assert unreadable.value.number is None
    assert isinstance(readable.value, ClusterError)


def test_many_tensors_are_not_taken_for_deep_values():
    got = decode(over_the_wire(encode("a", {"deep": [[[{"a": [1]}]]]}, [torch.ones(1)] * 200)))
    assert len(got.tensors) == 200


@pytest.mark.parametrize(
    ("head", "tensors", "words"),
    [
        ({"a": float("nan")}, [], "finite"),
        ({"a": {1}}, [], "JSON"),
        ({"a": torch.ones(1)}, [], "JSON"),
        ({"a": "x" * MAX_HEADER}, [], "the most"),
        ({}, [torch.ones(1)] * (MAX_TENSORS + 1), "the most"),
        ({}, [torch.ones(1, dtype=torch.complex64)], "complex64"),
        ({}, [torch.eye(2).to_sparse()], "dense"),
        ({}, [torch.ones(1, device="meta")], "dense"),
    ],
)
def test_what_cannot_be_sent_is_refused(head, tensors, words):
    with pytest.raises(WireError, match=words):
        encode("push", head, tensors)


def test_a_head_that_holds_itself_is_refused():
    head = {}
    head["head"] = head
    with pytest.raises(WireError, match="JSON"):
        encode("a", head)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.integers(0, 1 << 53))
@settings(max_examples=100, deadline=None)
def test_heads_arrive_as_they_were(head, number):
    got = decode(over_the_wire(encode("a", head, number=number)))
    assert (got.head, got.number) == (head, number)


def test_altered_messages_are_messages_or_refused_and_nothing_else():
    draw = random.Random(0)
    whole = [bytes(memoryview(f)) for f in encode("push", {"worker": 1, "x": [1.5]}, [torch.ones(3), torch.arange(4)])]
    refused = 0
    for _ in range(3000):
        frames = [bytearray(frame) for frame in whole]
        for _ in range(draw.randrange(1, 4)):
            frame = draw.choice(frames)
            if frame and draw.random() < 0.7:
                frame[draw.randrange(len(frame))] = draw.randrange(256)
            else:
                del frame[draw.randrange(len(frame) + 1) :]
        if draw.random() < 0.2:
            draw.shuffle(frames)
        try:
            decode(frames)
        except WireError:
            refused += 1
    assert 1000 < refused < 3000
