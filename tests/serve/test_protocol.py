"""The protocol by itself: what goes in comes out, and every mistake is a DataError."""

from __future__ import annotations

import contextlib
import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import DataError
from plait.serve.protocol import DATATYPES, describe, read_request, specs_of, write_response

INPUTS = specs_of(
    [
        {"name": "x", "dtype": "float32", "shape": [None, 2]},
        {"name": "i", "dtype": "int64", "shape": [None]},
    ]
)
OUTPUTS = specs_of(
    [{"name": "y", "dtype": "float32", "shape": [None, 2]}, {"name": "k", "dtype": "int64", "shape": [None]}]
)
GOOD = {
    "id": "7",
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2.5, 3, 4]},
        {"name": "i", "datatype": "INT64", "shape": [2], "data": [5, -6]},
    ],
}


def read(content, header_length=None, rest=b""):
    return read_request(json.dumps(content).encode() + rest, header_length, INPUTS, OUTPUTS)


def changed(index=0, **entry):
    inputs = [dict(one) for one in GOOD["inputs"]]
    inputs[index].update(entry)
    return {**GOOD, "inputs": inputs}


def test_a_request_in_json():
    request = read(GOOD)
    assert request.id == "7"
    assert request.inputs["x"].dtype == np.float32
    assert request.inputs["x"].tolist() == [[1, 2.5], [3, 4]]
    assert request.inputs["i"].tolist() == [5, -6]
    assert request.outputs == {"y": False, "k": False}


def test_nested_lists_are_the_same():
    assert read(changed(data=[[1, 2.5], [3, 4]])).inputs["x"].tolist() == [[1, 2.5], [3, 4]]


def test_bytes_follow_the_json_in_the_inputs_order():
    x, i = np.array([[1, 2], [3, np.nan]], "f4"), np.array([5, 6], "i8")
    inputs = [
        {"name": "i", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}},
        {"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}},
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    request = read_request(head + i.tobytes() + x.tobytes(), str(len(head)), INPUTS, OUTPUTS)
    np.testing.assert_array_equal(request.inputs["x"], x)
    np.testing.assert_array_equal(request.inputs["i"], i)
    assert request.outputs == {"y": True, "k": True}


def test_a_tensor_may_be_bytes_and_another_json():
    content = changed(1, parameters={"binary_data_size": 16})
    length = str(len(json.dumps(content)))
    assert read(content, length, np.array([5, 6]).tobytes()).inputs["i"].tolist() == [5, 6]


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"inputs": {}},
        {"inputs": [7]},
        {"inputs": [{"name": 7}]},
        {**GOOD, "id": 7},
        {**GOOD, "inputs": GOOD["inputs"][:1]},
        {**GOOD, "inputs": [*GOOD["inputs"], GOOD["inputs"][0]]},
        {**GOOD, "parameters": 7},
        {**GOOD, "parameters": {"binary_data_output": "yes"}},
        {**GOOD, "outputs": [{"name": "nope"}]},
        {**GOOD, "outputs": [{"name": "y"}, {"name": "y"}]},
        {**GOOD, "outputs": [{"name": "y", "parameters": {"classification": 3}}]},
        changed(name="z"),
        changed(datatype="FP64"),
        changed(datatype=None),
        changed(shape=[2, 3]),
        changed(shape=[4]),
        changed(shape=[2.0, 2]),
        changed(shape=[True, 2]),
        changed(shape=[-1, 2]),
        changed(shape=[2**40, 2]),
        changed(shape="22"),
        changed(shape=[1, 2], data=[1, 2]),
        changed(shape=[0, 2], data=[]),
        changed(data=None),
        changed(data="1234"),
        changed(data=["1", "2", "3", "4"]),
        changed(data=[1, 2, 3]),
        changed(data=[1, 2, 3, None]),
        changed(data=[[1, 2], [3]]),
        changed(data=[[1, 2, 3, 4]]),
        changed(data=[1, 2, 3, 1e39]),
        changed(1, data=[1, 2.5]),
        changed(1, data=[1, 2**63]),
        changed(1, data=[1, 2**80]),
        changed(data=[1.5, 2, 3, 10**400]),
        changed(data=[[[1, 2], [3, 4]]]),
        changed(data=[[1, 2], 3, 4]),
        changed(data=[[], [], [], []]),
        changed(parameters=[]),
        changed(parameters={"binary_data_size": 16}),
    ],
)
def test_mistakes(content):
    with pytest.raises(DataError):
        read(content)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"NaN", b"[" * 100_000, b'{"inputs": NaN}', b"9" * 5000])
def test_what_is_no_json(body):
    with pytest.raises(DataError):
        read_request(body, None, INPUTS, OUTPUTS)


@pytest.mark.parametrize("length", ["", "0", "-1", "x", "1e3", "²", "99999", "9" * 400])
def test_a_wrong_header_length(length):
    with pytest.raises(DataError, match="Inference-Header-Content-Length"):
        read(GOOD, length)


@pytest.mark.parametrize(("size", "rest"), [(16, 15), (16, 17), (15, 15), (-16, 16), (True, 1), ("16", 16), (1e1, 10)])
def test_bytes_that_do_not_fit(size, rest):
    content = changed(1, parameters={"binary_data_size": size})
    with pytest.raises(DataError):
        read(content, str(len(json.dumps(content))), b"\0" * rest)


def test_texts_take_no_room():
    """As an array, each of them would have the room of the longest: a few kilobytes would become gigabytes."""
    many = changed(shape=[10_000, 2], data=["a" * 1_000_000] + ["b"] * 19_999)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="no FP32"):
            read(many)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_tables_and_single_numbers_have_no_rows():
    shapes = {"x": [None, 2], "table": [3, 2], "scale": []}
    specs = specs_of([{"name": name, "dtype": "float32", "shape": shape} for name, shape in shapes.items()])
    sizes = {"table": [3, 2], "scale": [], "x": [5, 2]}
    inputs = [
        {"name": name, "datatype": "FP32", "shape": shape, "data": [1] * math.prod(shape)}
        for name, shape in sizes.items()
    ]
    request = read_request(json.dumps({"inputs": inputs}).encode(), None, specs, OUTPUTS)
    assert request.rows == 5
    assert {name: list(value.shape) for name, value in request.inputs.items()} == sizes


def test_an_error_repeats_little_and_no_values():
    with pytest.raises(DataError) as caught:
        read(changed(name="n" * 10_000))
    assert len(str(caught.value)) < 300
    with pytest.raises(DataError) as caught:
        read(changed(data=[123456.5, 2, 3]))
    assert "123456" not in str(caught.value)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(st.data())
def test_whatever_is_put_in_place_of_a_part_is_read_or_refused(data):
    content = json.loads(json.dumps(GOOD))
    key = data.draw(st.sampled_from(["id", "inputs", "outputs", "parameters"]))
    inside = data.draw(st.sampled_from(["", "name", "datatype", "shape", "data", "parameters"]))
    if inside:
        content["inputs"][0][inside] = data.draw(anything)
    else:
        content[key] = data.draw(anything)
    length = data.draw(st.none() | st.integers(-5, 400).map(str))
    with contextlib.suppress(DataError):
        read(content, length, data.draw(st.binary(max_size=20)))


@given(st.binary(max_size=200), st.none() | st.integers(0, 200).map(str))
def test_any_bytes_are_refused(body, length):
    with pytest.raises(DataError):
        read_request(body, length, INPUTS, OUTPUTS)


def test_bools_are_0_and_1():
    specs = specs_of([{"name": "b", "dtype": "bool", "shape": [None]}])
    entry = {"name": "b", "datatype": "BOOL", "shape": [3]}
    read_bools = lambda **more: read_request(json.dumps({"inputs": [{**entry, **more}]}).encode(), None, specs, OUTPUTS)
    assert read_bools(data=[True, False, 1]).inputs["b"].tolist() == [True, False, True]
    with pytest.raises(DataError, match="true and false"):
        read_bools(data=[0, 1, 2])
    head = json.dumps({"inputs": [{**entry, "parameters": {"binary_data_size": 3}}]}).encode()
    array = read_request(head + b"\0\1\7", str(len(head)), specs, OUTPUTS).inputs["b"]
    assert array.view("u1").tolist() == [0, 1, 1]


@pytest.mark.parametrize("name", DATATYPES)
def test_every_type_goes_there_and_back(name):
    datatype, dtype = DATATYPES[name]
    specs = specs_of([{"name": "t", "dtype": f"torch.{name}", "shape": [None]}])
    values = np.array([0, 1, 1], dtype)
    for binary in (True, False):
        entry = {"name": "t", "datatype": datatype, "shape": [3], "data": values.tolist()}
        asked = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": binary}}).encode()
        request = read_request(asked, None, specs, specs)
        body, length = write_response("m", "1", request, request.inputs, specs)
        found = json.loads(body[:length])["outputs"][0]
        back = np.frombuffer(body[length:], dtype) if binary else np.array(found["data"], dtype)
        np.testing.assert_array_equal(back, values)
        assert (found["datatype"], found["shape"]) == (datatype, [3])


def test_a_type_that_cannot_be_sent():
    with pytest.raises(DataError, match="complex64"):
        specs_of([{"name": "t", "dtype": "complex64", "shape": [None]}])


def test_an_answer():
    request = read({**GOOD, "outputs": [{"name": "k", "parameters": {"binary_data": True}}, {"name": "y"}]})
    results = {"y": np.array([[1, np.nan], [np.inf, 2]], "f4"), "k": np.array([1, 2], "i8")}
    body, length = write_response("m", "3", request, results, OUTPUTS)
    content = json.loads(body[:length])
    assert (content["model_name"], content["model_version"], content["id"]) == ("m", "3", "7")
    k, y = content["outputs"]
    assert k == {"name": "k", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}}
    assert y["data"] == [1.0, None, None, 2.0]
    assert body[length:] == results["k"].tobytes()


def test_metadata():
    assert describe(INPUTS) == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 2]},
        {"name": "i", "datatype": "INT64", "shape": [-1]},
    ]
