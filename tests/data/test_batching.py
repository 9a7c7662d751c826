from __future__ import annotations

import itertools

import pytest
import torch

from plait.data import Sample, SequenceSource, Stream
from plait.data.batching import BatchedSource
from plait.data.sources import IterableSource, Source
from plait.errors import DataError, OutOfRangeError

SAMPLES = [(torch.tensor([float(i), 0.0]), i) for i in range(10)]


def rows(batches):
    return [batch[1].tolist() for batch in batches]


def test_samples_are_stacked_and_the_last_batch_may_be_shorter():
    batches = list(BatchedSource(SequenceSource(SAMPLES), 4).batches(0, 0))
    assert rows(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [list(batch[0].shape) for batch in batches] == [[4, 2], [4, 2], [2, 2]]


def test_it_is_a_source_with_the_facts_of_its_samples():
    samples = SequenceSource(SAMPLES, shuffle=True, num_epochs=3, seed=5)
    source = BatchedSource(samples, 4)
    assert isinstance(source, Source)
    assert (source.batch_size, source.num_epochs, source.seekable) == (4, 3, True)
    assert source.fingerprint() == {"kind": "batched", "batch_size": 4, "samples": samples.fingerprint()}


@pytest.mark.parametrize("start", range(4))
def test_a_start_counts_batches(start):
    source = BatchedSource(SequenceSource(SAMPLES), 4)
    assert rows(source.batches(0, start)) == rows(source.batches(0, 0))[start:]


@pytest.mark.parametrize("epoch", [0, 1])
def test_passes_have_the_order_of_their_samples(epoch):
    samples = SequenceSource(SAMPLES, shuffle=True)
    flat = itertools.chain.from_iterable(rows(BatchedSource(samples, 4).batches(epoch, 0)))
    assert list(flat) == [number for _, number in samples.batches(epoch, 0)]


def test_a_stream_resumes_in_the_middle_of_a_pass():
    first = Stream(BatchedSource(SequenceSource(SAMPLES, shuffle=True), 3))
    for _ in range(2):
        first.read()
        first.commit()
    second = Stream(BatchedSource(SequenceSource(SAMPLES, shuffle=True), 3))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.read()[0], first.read()[0])


def test_another_batch_size_is_other_data():
    first, second = (Stream(BatchedSource(SequenceSource(SAMPLES), size)) for size in (3, 4))
    with pytest.raises(DataError, match="not the one that the checkpoint was made with"):
        second.load_state_dict(first.state_dict())


def test_samples_that_cannot_seek_are_read_again():
    source = BatchedSource(IterableSource(SAMPLES), 4)
    assert not source.seekable
    assert rows(source.batches(0, 1)) == [[4, 5, 6, 7], [8, 9]]
    ended = pytest.raises(DataError, match="ended after 10 of the 12")
    with pytest.warns(UserWarning, match="cannot seek; reading 12 batches again"), ended:
        next(source.batches(0, 3))


def test_a_generator_gives_one_pass():
    stream = Stream(BatchedSource(IterableSource(iter(SAMPLES)), 4))
    for _ in range(3):
        stream.read()
        stream.commit()
    with pytest.raises(OutOfRangeError, match="pass 0 is over after 3 batches"):
        stream.read()
    assert stream.spent


@pytest.mark.parametrize(
    ("samples", "fields"),
    [
        ([torch.zeros(2), torch.ones(2)], [0]),
        ([{"x": torch.zeros(2), "y": 1}, {"x": torch.ones(2), "y": 0}], ["x", "y"]),
        ([(torch.zeros(2), "a"), (torch.ones(2), "b")], [0, 1]),
        ([(torch.zeros(2).numpy(), 1.5)] * 2, [0, 1]),
    ],
)
def test_samples_of_any_kind(samples, fields):
    (batch,) = BatchedSource(SequenceSource(samples), 2).batches(0, 0)
    sample = Sample.of(batch)
    assert list(sample.keys()) == fields
    assert list(sample[fields[0]].shape) == [2, 2]


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(2), torch.zeros(3)],
        [{"x": 1}, {"y": 1}],
        [object(), object()],
        [(1,), (1, 2)],
    ],
)
def test_samples_that_do_not_stack_say_so(samples):
    source = BatchedSource(SequenceSource(samples), 2)
    with pytest.raises(DataError, match="2 samples do not stack into a batch: .* equal shapes, or ready batches and"):
        list(source.batches(0, 0))


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_at_least_one_sample(size):
    with pytest.raises(DataError, match=f"batch_size={size}: write a number from 1 on"):
        BatchedSource(SequenceSource(SAMPLES), size)
