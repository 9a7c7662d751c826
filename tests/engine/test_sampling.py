"""What inputs tell of their sampling."""

from __future__ import annotations

import types

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from plait.data import PoissonSource, Sample, Stream, TensorSource
from plait.data.parts import OwnPart, part_of
from plait.engine.sampling import check_rows, sampling_of, uses_of
from plait.engine.task import MODE, TaskScope
from plait.errors import ConfigError, DataError

X = torch.zeros(100, 2)
SCOPE = TaskScope(MODE.TRAIN, None)


def drawn_rows():
    return PoissonSource({"x": X}, 10, seed=3)


def model_of(data, workers=1, merge=1, in_step=True):
    strategy = types.SimpleNamespace(worker_num=workers, in_step=in_step and workers > 1, gradient_merge=merge)
    sample = Sample(data)
    stream = Stream(part_of(sample.source, 0, workers, together=True))
    return types.SimpleNamespace(inputs={SCOPE: sample}, streams={SCOPE: stream}, strategy=strategy, said=set())


def rate_of(data, samples=None, first=None, **strategy):
    return sampling_of(model_of(data, **strategy), None, first, samples).rate


def test_the_share_of_rows_in_a_logical_batch():
    source = TensorSource({"x": X}, 10)
    assert rate_of(source) == 0.1
    assert rate_of(source, workers=2) == 0.2
    assert rate_of(source, workers=2, in_step=False) == 0.1
    assert rate_of(source, merge=3) == pytest.approx(0.3)
    assert rate_of(source, workers=4, merge=5) == 1.0
    assert rate_of(source, samples=1000) == 0.01


def test_workers_with_rows_of_their_own():
    assert rate_of(OwnPart(TensorSource({"x": X}, 10)), workers=2) == 0.1


def test_other_inputs():
    assert rate_of(DataLoader(TensorDataset(X), batch_size=20)) == 0.2
    assert rate_of({"x": X}) == 1.0
    assert rate_of([{"x": X[:5]}], samples=50, first=5) == 0.1
    with pytest.raises(ConfigError, match="samples="):
        rate_of([{"x": X[:5]}], first=5)


def test_drawn_rows():
    found = sampling_of(model_of(drawn_rows()), None, None, None)
    assert (found.rate, found.expected) == (0.1, 10.0)
    with pytest.raises(ConfigError, match="gradient_merge=2"):
        rate_of(drawn_rows(), merge=2)


def test_drawn_rows_of_several_workers():
    """All divide by the same, whoever has a row more."""
    shared = sampling_of(model_of(drawn_rows(), workers=3), None, None, None)
    assert (shared.rate, shared.expected) == (0.1, pytest.approx(10 / 3))
    own = sampling_of(model_of(OwnPart(drawn_rows()), workers=3), None, None, None)
    assert (own.rate, own.expected) == (0.1, 10.0)


def test_the_warning_is_given_once_and_not_for_drawn_rows(caplog):
    model = model_of(TensorSource({"x": X}, 10))
    for _ in range(2):
        sampling_of(model, None, None, None)
    assert caplog.text.count("not a promise") == 1
    caplog.clear()
    rate_of(drawn_rows())
    assert not caplog.text


def test_how_often_a_row_was_used():
    stream = Stream(TensorSource({"x": X}, 10))
    uses = uses_of(stream)
    assert uses() == 1
    stream.epoch, stream.position = 4, 3
    assert uses() == 5
    constant = Stream(Sample({"x": X}).source)
    constant.position = 7
    assert uses_of(constant)() == 8
    drawn = Stream(OwnPart(drawn_rows()))
    drawn.epoch, drawn.position = 2, 5
    assert uses_of(drawn)() == drawn_rows().uses(2, 5) > 1


def test_micro_batches_of_equal_size():
    check_rows(12, 4, SCOPE)
    with pytest.raises(DataError, match="12 rows, which 5 micro-batches"):
        check_rows(12, 5, SCOPE)
