"""The Open Inference Protocol, version 2: what a request's bytes mean, and the bytes of an answer.

A body is JSON; or JSON and, after it, the bytes of the tensors that say how many are theirs (`binary_data_size`), in
their order. The header `Inference-Header-Content-Length` says where the JSON ends. Every mistake of the client is a
`DataError`, and its text is for the client: it names tensors, types and shapes, never values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from plait.errors import DataError

__all__ = ["DATATYPES", "Request", "Spec", "Tensors", "describe", "read_request", "specs_of", "write_response"]

Tensors = dict[str, NDArray[Any]]

DATATYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "bool": ("BOOL", np.dtype("?")),
    "uint8": ("UINT8", np.dtype("u1")),
    "uint16": ("UINT16", np.dtype("<u2")),
    "uint32": ("UINT32", np.dtype("<u4")),
    "uint64": ("UINT64", np.dtype("<u8")),
    "int8": ("INT8", np.dtype("i1")),
    "int16": ("INT16", np.dtype("<i2")),
    "int32": ("INT32", np.dtype("<i4")),
    "int64": ("INT64", np.dtype("<i8")),
    "float16": ("FP16", np.dtype("<f2")),
    "float32": ("FP32", np.dtype("<f4")),
    "float64": ("FP64", np.dtype("<f8")),
}
"""By torch's name of a type: the protocol's, and how the bytes lie."""
KINDS = {"b": "bui", "u": "bui", "i": "bui", "f": "buif"}
"""What NumPy may find in a JSON list for a type of this kind; a bool is 0 or 1."""
SHOWN = 60
"""Characters of a client's own text that an error repeats."""


@dataclass(frozen=True)
class Spec:
    """A tensor that a model takes or gives; None in `shape` is any size."""

    name: str
    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    @property
    def sizes(self) -> list[int]:
        """The shape as the protocol writes it: -1 is any size."""
        return [-1 if size is None else size for size in self.shape]

    @property
    def has_rows(self) -> bool:
        """Whether the first dimension is the batch."""
        return bool(self.shape) and self.shape[0] is None

    def fits(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.shape) and all(
            want is None or want == got for want, got in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True)
class Request:
    id: str | None
    inputs: Tensors
    outputs: dict[str, bool]
    """The outputs that are wanted, and whether as bytes."""
    rows: int = 1
    """Of the batch; 1 where no input has any."""


def specs_of(entries: Sequence[Mapping[str, Any]]) -> dict[str, Spec]:
    """The tensors that model.json lists."""
    found = {}
    for entry in entries:
        dtype = str(entry["dtype"]).removeprefix("torch.")
        if dtype not in DATATYPES:
            raise DataError(
                f"tensor {entry['name']!r} has type {dtype}, which cannot be sent: export {list(DATATYPES)}"
            )
        found[entry["name"]] = Spec(entry["name"], *DATATYPES[dtype], tuple(entry["shape"]))
    return found


def describe(specs: Mapping[str, Spec]) -> list[dict[str, Any]]:
    """Tensors as the protocol's metadata lists them."""
    return [{"name": spec.name, "datatype": spec.datatype, "shape": spec.sizes} for spec in specs.values()]


# ---- requests


def read_request(
    body: bytes, header_length: str | None, inputs: Mapping[str, Spec], outputs: Mapping[str, Spec]
) -> Request:
    """Take a body apart; `header_length` is the header's text, None if there is no such header."""
    end = len(body) if header_length is None else _json_end(header_length, len(body))
    content = _json(body[:end])
    tensors = _inputs(content, None if header_length is None else memoryview(body)[end:], inputs)
    identity = content.get("id")
    if identity is not None and not isinstance(identity, str):
        raise DataError(f"id is {_shown(identity)}; write a string, or leave it out")
    rows = next((len(tensor) for name, tensor in tensors.items() if inputs[name].has_rows), 1)
    return Request(identity, tensors, _wanted(content, outputs), rows)


def _json_end(text: str, length: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19 and 0 < int(text) <= length):
        raise DataError(
            f"Inference-Header-Content-Length is {_shown(text)} and the body has {length} bytes; "
            "write how many of them are the JSON"
        )
    return int(text)


def _json(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 are a ValueError, too
        raise DataError(f"the body is not JSON ({type(error).__name__}); write an object with `inputs`") from error
    if not isinstance(content, dict):
        raise DataError(f"the body is {_kind(content)}; write an object with `inputs`")
    return content


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _inputs(content: dict[str, Any], data: memoryview | None, specs: Mapping[str, Spec]) -> Tensors:
    tensors: Tensors = {}
    position = 0
    for entry in _entries(content, "inputs"):
        spec = specs.get(entry["name"])
        if spec is None or spec.name in tensors:
            what = "unknown" if spec is None else "there twice"
            raise DataError(f"input {_shown(entry['name'])} is {what}; write each of {list(specs)} once")
        shape = _shape(entry, spec)
        size = _parameters(entry).get("binary_data_size")
        if size is None:
            tensors[spec.name] = _from_list(entry, spec, shape)
        else:
            tensors[spec.name] = _from_bytes(spec, shape, size, data, position)
            position += size
    if len(tensors) < len(specs):
        raise DataError(f"inputs {[name for name in specs if name not in tensors]} are missing: write each once")
    if data is not None and position != len(data):
        raise DataError(f"{len(data)} bytes follow the JSON, the inputs' binary_data_size are {position} together")
    _check_rows(tensors, specs)
    return tensors


def _entries(content: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = content.get(key)
    if not isinstance(entries, list):
        raise DataError(f"`{key}` is {_kind(entries)}; write a list of objects with a `name`")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise DataError(f"`{key}` has an entry without a name; write a list of objects with a `name`")
    return entries


def _parameters(entry: dict[str, Any]) -> dict[str, Any]:
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise DataError(f"`parameters` is {_kind(parameters)}; write an object, or leave it out")
    return parameters


def _shape(entry: dict[str, Any], spec: Spec) -> list[int]:
    if entry.get("datatype") != spec.datatype:
        raise DataError(f"input {spec.name!r} has datatype {_shown(entry.get('datatype'))}; write {spec.datatype!r}")
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise DataError(f"input {spec.name!r} has shape {_shown(shape)}; write whole numbers that fit {spec.sizes}")
    if not spec.fits(shape):
        raise DataError(f"input {spec.name!r} has shape {_shown(shape)}; write one that fits {spec.sizes}")
    return shape


def _from_bytes(spec: Spec, shape: list[int], size: Any, data: memoryview | None, start: int) -> NDArray[Any]:
    if data is None:
        raise DataError(
            f"input {spec.name!r} has binary_data_size, but the header Inference-Header-Content-Length is not there"
        )
    want = math.prod(shape) * spec.dtype.itemsize
    if type(size) is not int or size != want:
        raise DataError(f"input {spec.name!r} has binary_data_size {_shown(size)}; its shape and type need {want}")
    if start + size > len(data):
        raise DataError(f"{len(data)} bytes follow the JSON; input {spec.name!r} ends at {start + size}")
    part = data[start : start + size]
    if spec.dtype.kind == "b":  # another byte than 0 or 1 is no bool that a runtime may see
        return np.not_equal(np.frombuffer(part, np.uint8), 0).reshape(shape)
    return np.frombuffer(part, spec.dtype).reshape(shape)


def _from_list(entry: dict[str, Any], spec: Spec, shape: list[int]) -> NDArray[Any]:
    flat = _flat(entry.get("data"), shape)
    if flat is None:
        raise DataError(f"input {spec.name!r} has not the data of shape {shape}; write {math.prod(shape)} numbers")
    array = _array(flat)
    if array is None or (array.size and array.dtype.kind not in KINDS[spec.dtype.kind]):
        raise DataError(f"input {spec.name!r} has data that is no {spec.datatype}")
    return _cast(array, spec).reshape(shape)


def _array(flat: list[Any]) -> NDArray[Any] | None:
    """Of numbers alone: in an array of texts each would have the room of the longest one."""
    if not set(map(type, flat)) <= {bool, int, float}:
        return None
    try:
        return np.array(flat)
    except OverflowError:  # a whole number that no float can hold
        return None


def _flat(data: Any, shape: list[int]) -> list[Any] | None:
    """What is in lists, or in lists of lists, one after the other; None if it does not fit the shape."""
    if not isinstance(data, list):
        return None
    sizes = [len(data)]
    while set(map(type, data)) == {list}:
        lengths = set(map(len, data))
        if len(lengths) > 1 or len(sizes) >= len(shape):
            return None
        sizes.append(lengths.pop())
        data = list(chain.from_iterable(data))
    fits = sizes == shape if len(sizes) > 1 else len(data) == math.prod(shape)
    return data if fits else None


def _cast(array: NDArray[Any], spec: Spec) -> NDArray[Any]:
    """The same numbers in the model's type; those that it cannot hold are an error, not another number."""
    if spec.dtype.kind in "iu" and array.size:
        limits = np.iinfo(spec.dtype)
        if array.dtype.kind != "b" and not limits.min <= int(array.min()) <= int(array.max()) <= limits.max:
            raise DataError(f"input {spec.name!r} has numbers outside of {spec.datatype}")
    if spec.dtype.kind == "b" and array.dtype.kind in "ui" and array.size and not np.isin(array, (0, 1)).all():
        raise DataError(f"input {spec.name!r} has numbers that are no BOOL; write true and false")
    with np.errstate(over="ignore"):
        cast = array.astype(spec.dtype)
    if spec.dtype.kind == "f" and not np.isfinite(cast).all():
        raise DataError(f"input {spec.name!r} has numbers outside of {spec.datatype}")
    return cast


def _check_rows(tensors: Tensors, specs: Mapping[str, Spec]) -> None:
    """Tables and single numbers have no rows of the batch."""
    rows = {name: tensor.shape[0] for name, tensor in tensors.items() if specs[name].has_rows}
    if len(set(rows.values())) > 1 or 0 in rows.values():
        raise DataError(f"the inputs have {rows} rows; write the same number for each, at least 1")


def _wanted(content: dict[str, Any], specs: Mapping[str, Spec]) -> dict[str, bool]:
    everything = _flag(_parameters(content), "binary_data_output", default=False)
    if content.get("outputs") is None or content["outputs"] == []:
        return dict.fromkeys(specs, everything)
    wanted = {}
    for entry in _entries(content, "outputs"):
        if entry["name"] not in specs or entry["name"] in wanted:
            what = "there twice" if entry["name"] in wanted else "unknown"
            raise DataError(f"output {_shown(entry['name'])} is {what}; write some of {list(specs)}, each once")
        parameters = _parameters(entry)
        if parameters.get("classification"):
            raise DataError("classification is not computed here: ask for the output, and sort it")
        wanted[entry["name"]] = _flag(parameters, "binary_data", default=everything)
    return wanted


def _flag(parameters: dict[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise DataError(f"{name} is {_shown(value)}; write true or false")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _kind(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


# ---- answers


def write_response(
    model: str, version: str, request: Request, results: Tensors, specs: Mapping[str, Spec]
) -> tuple[bytes, int | None]:
    """The body, and where its JSON ends if bytes follow it. In JSON, a number that is none (NaN, infinite) is null."""
    outputs, parts = [], []
    for name, binary in request.outputs.items():
        spec, array = specs[name], np.ascontiguousarray(results[name], specs[name].dtype)
        entry: dict[str, Any] = {"name": name, "datatype": spec.datatype, "shape": list(array.shape)}
        if binary:
            parts.append(array.tobytes())
            entry["parameters"] = {"binary_data_size": array.nbytes}
        else:
            entry["data"] = _list(array)
        outputs.append(entry)
    content: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": outputs}
    if request.id is not None:
        content["id"] = request.id
    head = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return (b"".join([head, *parts]), len(head)) if parts else (head, None)


def _list(array: NDArray[Any]) -> list[Any]:
    flat = array.ravel()
    values: list[Any] = flat.tolist()
    if array.dtype.kind == "f" and not np.isfinite(flat).all():
        return [value if math.isfinite(value) else None for value in values]
    return values
