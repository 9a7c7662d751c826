"""What an `input_fn` may return, and how a batch becomes features and labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait import train
from plait.data import Sample, TensorSource
from plait.data.parts import PartSource
from plait.errors import ConfigError, DataError
from plait.train.inputs import FixedSource, call_named, features_and_labels, sample_of

CPU = torch.device("cpu")


def test_arrays_come_in_batches_with_text_and_numbers():
    x = {"n": np.arange(5, dtype=np.float32), "t": np.array(["a", "b", "c", "d", "e"], dtype=object)}
    source = train.numpy_input_fn(x, np.arange(5), batch_size=2, shuffle=False)()
    batches = list(source.batches(0, 0))
    assert [labels.tolist() for _, labels in batches] == [[0, 1], [2, 3], [4]]
    assert batches[1][0]["t"].tolist() == ["c", "d"]
    assert source.count(0) == 3
    assert [y.tolist() for _, y in source.batches(0, 2)] == [[4]]


def test_an_order_belongs_to_its_pass():
    source = train.numpy_input_fn(np.arange(100), shuffle=True, batch_size=10, num_epochs=2, seed=3)()
    passes = [[int(one) for x, _ in source.batches(epoch, 0) for one in x] for epoch in (0, 1, 0)]
    assert passes[0] == passes[2] != passes[1]
    assert sorted(passes[0]) == list(range(100))
    assert [int(one) for x, _ in source.batches(0, 7) for one in x] == passes[0][70:]


def test_the_order_is_that_of_a_tensor_source():
    ours = train.numpy_input_fn(np.arange(50), shuffle=True, batch_size=50, seed=3)()
    theirs = TensorSource([torch.arange(50)], 50, shuffle=True, seed=3)
    for epoch in (0, 1):
        assert next(ours.batches(epoch, 0))[0].tolist() == next(theirs.batches(epoch, 0))[0].tolist()


def test_workers_share_the_batches():
    source = train.numpy_input_fn(np.arange(8), np.arange(8), batch_size=2, shuffle=False)()
    part = PartSource(source, 1, 2, together=True)
    assert [y.tolist() for _, y in part.batches(0, 0)] == [[2, 3], [6, 7]]


def test_a_remainder_may_be_dropped():
    source = train.numpy_input_fn(np.arange(8), batch_size=3, shuffle=False, drop_remainder=True)()
    assert [x.tolist() for x, _ in source.batches(0, 0)] == [[0, 1, 2], [3, 4, 5]]


def test_labels_may_have_names_or_be_missing():
    source = train.numpy_input_fn(np.arange(4), {"a": np.arange(4), "b": np.arange(4)}, 3, shuffle=False)()
    assert next(source.batches(0, 0))[1]["b"].tolist() == [0, 1, 2]
    assert next(train.numpy_input_fn(np.arange(4), shuffle=False)().batches(0, 0))[1] is None


def test_passes_are_told():
    assert train.numpy_input_fn(np.arange(4), num_epochs=3, shuffle=False)().num_epochs == 3
    assert train.numpy_input_fn(np.arange(4), num_epochs=None, shuffle=False)().num_epochs > 10**9


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: train.numpy_input_fn(np.arange(4)), "shuffle=None"),
        (lambda: train.numpy_input_fn(np.arange(4), np.arange(3), shuffle=False), "rows"),
        (lambda: train.numpy_input_fn({"x": 3}, shuffle=False), "one value"),
        (lambda: train.numpy_input_fn({}, np.arange(3), shuffle=False), "rows"),
        (lambda: train.numpy_input_fn(np.arange(4), batch_size=0, shuffle=False), "batch_size=0"),
        (lambda: train.numpy_input_fn(np.arange(4), num_epochs=0, shuffle=False), "num_epochs=0"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(make, text):
    with pytest.raises((ConfigError, DataError), match=text):
        make()


def test_tensors_are_one_batch():
    for data in (({"x": torch.ones(2)}, torch.ones(2)), {"x": np.ones(2)}, torch.ones(2)):
        assert isinstance(sample_of(data).source, FixedSource)
    sample = sample_of([torch.ones(2)])
    assert not isinstance(sample.source, FixedSource)
    assert sample_of(sample) is sample


def test_a_pair_is_features_and_labels():
    features, labels = features_and_labels(Sample.of(({"x": np.ones(2), "t": np.array(["a"])}, np.arange(2))), CPU)
    assert torch.equal(features["x"], torch.ones(2, dtype=torch.float64))
    assert features["t"].tolist() == ["a"]
    assert labels.tolist() == [0, 1]
    assert features_and_labels(Sample.of({"x": torch.ones(1)}), CPU) == ({"x": torch.ones(1)}, None)
    assert features_and_labels(Sample.of(torch.ones(1)), CPU)[1] is None


def test_a_function_gets_the_arguments_that_it_has():
    given = {"mode": 1, "params": 2}
    assert call_named(lambda params: params, **given) == 2
    assert call_named(lambda: 5, **given) == 5
    assert call_named(lambda **named: named, **given) == given
