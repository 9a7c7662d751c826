"""A worker's part of the data: all parts together are the source."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from plait.data import Sample, TensorSource
from plait.data.datasets import Dataset, shuffled
from plait.data.episodes import EpisodeSource, tensor_classes
from plait.data.parts import OwnPart, PartSource, Strided, is_part
from plait.data.sources import ConstantSource, IterableSource, LoaderSource, SequenceSource
from plait.data.stream import Stream
from plait.errors import DataError, OutOfRangeError

NUMBERS = torch.arange(22.0)


def columns(**settings):
    return Dataset("numbers", 11, {"x": float}, order=shuffled(11, 3), readers=2, **settings)


def episodes():
    classes = tensor_classes(torch.arange(40.0)[:, None], torch.arange(40) % 5)
    return EpisodeSource(classes, ways=2, length=7)


SOURCES = {
    "tensors": lambda: TensorSource({"x": NUMBERS}, 2),
    "shuffled tensors": lambda: TensorSource({"x": NUMBERS}, 3, shuffle=True, seed=5),
    "tuples": lambda: TensorSource((NUMBERS, -NUMBERS), 3),
    "dropped remainder": lambda: TensorSource({"x": NUMBERS}, 4, drop_remainder=True),
    "list": lambda: SequenceSource([{"x": torch.tensor([float(i)])} for i in range(11)]),
    "shuffled list": lambda: SequenceSource([{"x": torch.tensor([float(i)])} for i in range(11)], shuffle=True),
    "iterable": lambda: IterableSource([{"x": torch.tensor([float(i)])} for i in range(7)]),
    "loader": lambda: LoaderSource(DataLoader(NUMBERS, batch_size=2, shuffle=True, generator=torch.Generator())),
    "columns": lambda: columns().batched(2),
    "columns one by one": lambda: columns().everything(),
    "columns in batches": lambda: columns(batch_size=3, drop_remainder=True).everything(),
    "data set": columns,
    "episodes": episodes,
}
STRIDED = [name for name in SOURCES if name not in ("iterable", "loader", "data set")]


def values(batches):
    """Batches as plain numbers."""
    return [[torch.as_tensor(value).tolist() for value in Sample.of(batch).values()] for batch in batches]


def parts(source, count, *, together=False, epoch=0, start=0):
    return [values(PartSource(source, index, count, together=together).batches(epoch, start)) for index in range(count)]


@pytest.fixture(params=SOURCES, ids=lambda name: name.replace(" ", "-"))
def source(request):
    return SOURCES[request.param]()


@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_all_parts_together_are_the_source(source, count):
    whole, found = values(source.batches(1, 0)), parts(source, count, epoch=1)
    assert [found[number % count][number // count] for number in range(len(whole))] == whole
    assert sum(map(len, found)) == len(whole)


@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_together_all_parts_are_equally_long_and_only_the_last_group_is_dropped(source, count):
    whole = len(values(source.batches(0, 0)))
    assert {len(part) for part in parts(source, count, together=True)} == {whole // count}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("start", [1, 2])
def test_a_part_goes_on_where_it_was(source, start, together):
    whole = parts(source, 3, together=together)
    assert parts(source, 3, together=together, start=start) == [part[start:] for part in whole]


def test_past_the_end_there_is_nothing(source):
    if source.seekable:
        assert parts(source, 2, together=True, start=9) == parts(source, 2, start=9) == [[], []]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.integers(1, 7), st.booleans(), st.booleans(), st.data())
def test_of_any_size(batches, count, together, strided, data):
    items = list(range(batches))
    source = SequenceSource(items) if strided else IterableSource(items)
    last = batches - batches % count if together else batches
    for number in range(count):
        own = items[number:last:count]
        start = data.draw(st.integers(0, len(own)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an iterable cannot seek
            assert list(PartSource(source, number, count, together=together).batches(0, start)) == own[start:]


@pytest.mark.parametrize("start", [0, 2])
def test_an_error_of_the_source_is_not_its_end(start):
    def broken():
        yield from range(4)
        raise DataError("batch 4 is broken")

    class Broken:
        def __iter__(self):
            return broken()

    with pytest.raises(DataError, match="batch 4 is broken"):
        list(PartSource(IterableSource(Broken()), 0, 2, together=False).batches(0, start))


def test_data_that_is_shorter_than_it_was_is_an_error():
    with pytest.raises(DataError, match="the data is shorter than it was"):
        list(PartSource(IterableSource([0, 1, 2]), 0, 2, together=False).batches(0, 3))


def test_batches_of_others_are_not_made():
    asked = []

    class Rows(list):
        def __getitem__(self, place):
            asked.append(place)
            return super().__getitem__(place)

    list(PartSource(SequenceSource(Rows(range(9))), 1, 3, together=True).batches(0, 0))
    assert asked == [1, 4, 7]


@pytest.mark.parametrize("name", SOURCES)
def test_which_sources_can_leave_batches_out(name):
    assert isinstance(SOURCES[name](), Strided) is (name in STRIDED)


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize(("start", "step"), [(0, 1), (1, 2), (2, 3), (90, 1)])
def test_every_so_many_are_those_of_the_whole(name, start, step):
    source = SOURCES[name]()
    whole = values(source.batches(2, 0))
    assert source.count(2) == len(whole)
    assert values(source.every(2, start, step)) == whole[start::step]


class Noting:
    """A source whose passes say when they end."""

    num_epochs, batch_size, seekable = 2, 4, False

    def __init__(self):
        self.closed = 0

    def batches(self, epoch, start):
        try:
            yield from range(start, 9)
        finally:
            self.closed += 1

    def fingerprint(self):
        return {"kind": "noting"}


class NotingStrided(Noting):
    def count(self, epoch):
        return 9

    def every(self, epoch, start, step):
        try:
            yield from range(start, 9, step)
        finally:
            self.closed += 1


@pytest.mark.parametrize("kind", [Noting, NotingStrided])
@pytest.mark.parametrize("take", [1, 4, 9])
def test_a_pass_that_is_given_up_or_over_ends_its_readers(kind, take):
    source = kind()
    batches = PartSource(source, 0, 2, together=True).batches(0, 0)
    assert list(itertools.islice(batches, take)) == [0, 2, 4, 6][:take]
    batches.close()
    assert source.closed == 1


def test_it_says_what_its_source_says():
    part = PartSource(Noting(), 1, 3, together=True)
    assert (part.num_epochs, part.batch_size, part.seekable) == (2, 4, False)
    assert part.fingerprint() == {"kind": "part", "index": 1, "count": 3, "of": {"kind": "noting"}}


def test_a_stream_over_a_part_counts_the_parts_batches():
    stream = Stream(PartSource(SequenceSource([{"x": torch.tensor(i)} for i in range(7)]), 1, 2, together=True))
    seen = []
    for _ in range(3):
        seen.append(int(stream.read().x))
        stream.commit()
    with pytest.raises(OutOfRangeError, match="pass 0 is over after 3 batches"):
        stream.read()
    assert (seen, stream.epoch, stream.position) == ([1, 3, 5], 1, 0)


class TestOwnPart:
    def test_it_is_read_as_it_is(self):
        own = OwnPart([{"x": 1}, {"x": 2}])
        assert list(own.batches(0, 1)) == [{"x": 2}]
        assert own.fingerprint() == SequenceSource([{}, {}]).fingerprint()

    def test_it_has_what_its_source_has(self):
        own = OwnPart(TensorSource({"x": NUMBERS}, 4, num_epochs=3))
        assert (own.num_epochs, own.batch_size, own.seekable) == (3, 4, True)

    def test_it_is_not_divided_again(self):
        assert is_part(OwnPart([1]))


def test_what_gives_every_worker_its_part_by_itself():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    assert is_part(LoaderSource(DataLoader(range(8), sampler=sampler)))
    assert is_part(ConstantSource({"x": NUMBERS}))


def test_what_does_not():
    assert not is_part(SequenceSource([1]))
    assert not is_part(LoaderSource(DataLoader(range(8))))
