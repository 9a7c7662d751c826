import copy
import sys
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from plait.data.sample import Sample
from plait.data.sources import ConstantSource, IterableSource, LoaderSource, SequenceSource, TensorSource
from plait.errors import DataError

X, Y = torch.arange(6.0).reshape(3, 2), torch.arange(3)


def test_fields_by_name_attribute_and_number():
    sample = Sample.of({"x": X, "y": Y})
    assert sample["x"] is sample.x is sample[0] is X
    assert sample["y"] is sample.y is sample[1] is sample[-1] is Y
    assert list(sample) == list(sample.keys()) == ["x", "y"]
    assert list(sample.values()) == [X, Y]
    assert dict(sample.items()) == {"x": X, "y": Y}
    assert "x" in sample
    assert "z" not in sample
    assert len(sample) == 2
    assert sample.batch_size == 3
    assert sample.op is None
    with pytest.raises(DataError, match="no source"):
        sample.source
    assert repr(sample) == "Sample(x: float32[3, 2], y: int64[3])"


@pytest.mark.parametrize("made", [tuple, list])
def test_tuples_unpack(made):
    sample = Sample.of(made([X, Y]))
    x, y = sample
    assert x is X
    assert y is Y
    assert sample[1] is Y
    assert list(sample.keys()) == [0, 1]
    assert len(sample) == 2


def test_rarer_kinds_of_batches():
    class Pair(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    pair = Pair(X, Y)
    x, y = Sample.of(pair)
    assert x is X
    assert y is Y
    assert Sample.of(pair).y is Y
    assert list(Sample.of(OrderedDict(x=X))) == ["x"]
    assert Sample.of(X)[0] is X
    assert Sample.of(X).batch_size == 3
    sample = Sample.of({"x": X})
    assert Sample.of(sample) is sample


def test_unknown_fields_are_named():
    sample = Sample.of({"x": X, "y": Y})
    with pytest.raises(KeyError, match="no field 'z'; there are 'x', 'y'"):
        sample["z"]
    with pytest.raises(AttributeError, match="no field 'z'; there are 'x', 'y'"):
        sample.z
    with pytest.raises(KeyError, match="no field 2"):
        sample[2]
    assert not hasattr(sample, "z")


def test_fields_cannot_be_set():
    sample = Sample.of({"x": X})
    with pytest.raises(AttributeError):
        sample.x = Y
    with pytest.raises(TypeError):
        sample["x"] = Y
    assert sample.x is X
    sample.op = "an op"
    assert sample.op == "an op"


@pytest.mark.parametrize("raw", [3, "text", None, {1, 2}])
def test_other_batches_are_an_error(raw):
    with pytest.raises(DataError, match=f"a batch is a {type(raw).__name__}.*dict, a tuple"):
        Sample.of(raw)


def test_arrays_become_tensors_and_other_values_stay():
    frozen = np.arange(4)
    frozen.flags.writeable = False
    names = np.array(["a", "b"])
    big_endian = np.arange(3, dtype=">f4")
    array = np.arange(4.0)
    sample = Sample.of({"a": array, "b": np.arange(4)[::-1], "c": frozen, "d": names, "e": big_endian, "n": 7})
    assert sample.a.data_ptr() == array.ctypes.data
    assert sample.b.tolist() == [3, 2, 1, 0]
    assert sample.c.tolist() == [0, 1, 2, 3]
    assert sample.e.tolist() == [0, 1, 2]
    assert sample.d is names
    assert sample.n == 7
    assert sample.batch_size == 4
    assert Sample.of({"n": 7, "s": torch.tensor(1.0)}).batch_size is None


def test_columns_join_side_by_side():
    columns = {"wide": ["y", "x", lambda fields: fields["y"] * 2.0]}
    sample = Sample.of({"x": X, "y": Y}).grouped(columns)
    assert sample.wide.tolist() == [[0, 0, 1, 0], [1, 2, 3, 2], [2, 4, 5, 4]]
    assert list(sample) == ["x", "y", "wide"]
    x, y = Sample.of((X, Y)).grouped({"wide": [1, 0]})
    assert x is X
    assert y is Y


def test_wrong_columns_say_so():
    sample = Sample.of({"x": X, "y": Y, "short": torch.zeros(2)})
    with pytest.raises(DataError, match="group 'g' wants no field 'z'; there are 'x'"):
        sample.grouped({"g": ["z"]})
    with pytest.raises(DataError, match="'x' is a field already"):
        sample.grouped({"x": ["y"]})
    with pytest.raises(DataError, match=r"\[3, 2\], \[2, 1\]"):
        sample.grouped({"g": ["x", "short"]})
    with pytest.raises(DataError, match="tensor with rows"):
        sample.grouped({"g": [lambda fields: 3]})
    for wrong in ("x", [], [3.5]):
        with pytest.raises(DataError, match="write a list of field names"):
            Sample({"x": X}, {"g": wrong})


def test_a_fixed_batch_has_fields_at_once():
    sample = Sample({"x": X, "y": Y.numpy()}, {"wide": ["x", "y"]})
    assert sample.x is X
    assert sample.wide.shape == (3, 3)
    assert sample.batch_size == 3
    assert isinstance(sample.source, ConstantSource)
    assert list(sample.source.fields) == ["x", "y"]
    assert list(sample.columns) == ["wide"]


@pytest.mark.parametrize(
    ("features", "kind"),
    [
        ([{"x": X}], SequenceSource),
        (iter([{"x": X}]), IterableSource),
        (DataLoader([1, 2]), LoaderSource),
        (TensorSource((X, Y), 2), TensorSource),
    ],
)
def test_a_handle_has_a_source_and_no_fields(features, kind):
    sample = Sample(features, {"g": ["x"]})
    assert isinstance(sample.source, kind)
    assert len(sample) == 0
    assert sample
    assert sample.batch_size is None
    assert repr(sample) == f"Sample(over {kind.__name__})"
    with pytest.raises(AttributeError, match="only inside a step"):
        sample.x


def test_to_moves_nested_tensors():
    sample = Sample.of({"x": X, "deep": {"a": [Y]}, "n": 7}).to("meta")
    assert sample.x.device.type == sample.deep["a"][0].device.type == "meta"
    assert sample.n == 7
    x, y = Sample.of((X, Y)).to("meta")
    assert y.device.type == "meta"


def test_copies():
    sample = copy.copy(Sample.of((X, Y)))
    x, _ = sample
    assert x is X


def test_of_costs_one_call():
    raw, calls = {"x": X, "y": Y}, []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
    Sample.of(raw)
    sys.setprofile(None)
    assert calls == ["of"]


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Graph:
    """An object that knows how it moves, as those of other packages do."""

    def __init__(self, device="cpu"):
        self.device = device

    def to(self, device):
        return Graph(str(device))


def test_to_moves_named_tuples_packed_sequences_and_what_knows_how():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    sample = Sample.of({"pair": Pair(X, Y), "packed": packed, "graph": Graph(), "n": 7}).to("meta")
    assert isinstance(sample.pair, Pair)
    assert sample.pair.left.device.type == sample.pair.right.device.type == "meta"
    assert sample.packed.data.device.type == "meta"
    assert sample.packed.batch_sizes.device.type == "cpu"  # which torch wants there
    assert sample.graph.device == "meta"


def test_columns_of_a_group_that_are_on_two_devices_are_brought_together():
    sample = Sample.of({"text": X, "number": Y.to("meta")}).grouped({"wide": ["text", "number"]})
    assert sample.wide.device.type == "meta"
    assert list(sample.wide.shape) == [3, 3]
