"""Data sets: rows by number as samples and batches, in an order of (seed, epoch), by any number of readers."""

from __future__ import annotations

import itertools
import logging
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data import Sample, Source, Stream, TensorSource, as_source
from plait.data.batching import BatchedSource
from plait.data.columns import Column
from plait.data.datasets import ColumnSource, Dataset, SkippedSample, column_source, shuffled, stacked
from plait.errors import ConfigError, DataError, FunctionError, OutOfRangeError

FIELDS = {"x": lambda number: torch.tensor([number, -number]), "name": str}


def make(rows=10, fields=FIELDS, **settings):
    return Dataset("rows", rows, fields, **settings)


def mixed(rows=10, seed=5, **settings):
    return make(rows, order=shuffled(rows, seed), seed=seed, **settings)


def noisy(dataset):
    """A column that draws."""
    return dataset.get(["x"])[0].map(lambda value, rng: value + rng.random())


def numbers(batches):
    """The numbers of the rows, of batches that are dicts or tuples with names last."""
    found = [batch["name"] if isinstance(batch, dict) else batch[-1] for batch in batches]
    return [[int(name) for name in names] if isinstance(names, list) else int(names) for names in found]


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("plait-reader")]


# Columns by name


def test_get_gives_the_columns_in_the_order_of_the_names():
    dataset = make()
    name, x = dataset.get(["name", "x"])
    assert (name.name, x.name) == ("name", "x")
    assert dataset.get(("x", "x"))[1] is x


def test_names_that_are_wrong():
    with pytest.raises(DataError, match="rows: no field 'y'; there are x, name"):
        make().get(["x", "y"])
    with pytest.raises(DataError, match=r"get\('x'\): give a list of names, get\(\['x'\]\)"):
        make().get("x")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"batch_size": 0}, "batch_size=0: write a whole number from 1 on, or None"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"num_epochs": -1}, "num_epochs=-1"),
        ({"readers": 0}, "readers=0: write a whole number from 1 on"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": None}, "capacity=None"),
    ],
)
def test_settings_that_are_wrong(setting, words):
    with pytest.raises(ConfigError, match=words):
        make(**setting)


def test_no_rows():
    with pytest.raises(DataError, match="rows: there are no samples"):
        make(0)


def test_fields_may_be_made_of_others():
    def fields(origin):
        first = Column(origin, "first", float, None)
        return {"first": first, "double": first * 2}

    dataset = make(3, fields)
    assert [batch["double"] for batch in dataset.batches(0, 0)] == [0.0, 2.0, 4.0]


# Order and place


def test_without_an_order_rows_come_as_they_are():
    dataset = make()
    assert numbers(dataset.batches(0, 0)) == numbers(dataset.batches(7, 0)) == list(range(10))


def test_the_order_is_a_function_of_seed_and_pass():
    dataset = mixed()
    passes = [numbers(dataset.batches(epoch, 0)) for epoch in (0, 1, 0)]
    assert passes[0] == passes[2] == numbers(mixed().batches(0, 0))
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    assert passes[0] != numbers(mixed(seed=6).batches(0, 0))


@given(
    st.integers(1, 30),
    st.none() | st.integers(1, 8),
    st.booleans(),
    st.integers(1, 5),
    st.integers(0, 35),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_seeking_equals_skipping(rows, batch_size, drop, threads, start, own_batches):
    def source():
        dataset = mixed(rows, readers=threads, drop_remainder=drop, batch_size=batch_size if own_batches else None)
        columns = {"noisy": noisy(dataset), "name": dataset.get(["name"])[0]}
        found = column_source(columns)
        return found if own_batches or batch_size is None else found.batched(batch_size)

    skipped = list(source().batches(2, 0))[start:]
    found = list(source().batches(2, start))
    assert numbers(found) == numbers(skipped)
    assert all(torch.equal(a["noisy"], b["noisy"]) for a, b in zip(found, skipped, strict=True))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_the_number_of_readers_and_the_capacity_change_nothing(batch_size):
    def read(**settings):
        return [value for (value,) in column_source(noisy(mixed(40, batch_size=batch_size, **settings))).batches(1, 0)]

    expected = read(readers=1, capacity=1)
    for settings_ in ({"readers": 8}, {"readers": 3, "capacity": 5}, {"readers": 16, "capacity": 1000}):
        found = read(**settings_)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_a_pass_may_be_read_while_another_is():
    source = mixed(30).everything()
    first, second = source.batches(0, 0), source.batches(1, 5)
    both = [(next(first), next(second)) for _ in range(10)]
    assert numbers(one for one, _ in both) == numbers(source.batches(0, 0))[:10]
    assert numbers(other for _, other in both) == numbers(source.batches(1, 5))[:10]
    first.close()
    second.close()


# Samples and batches


def test_samples_have_the_form_of_the_columns():
    dataset = make(2)
    x, name = dataset.get(["x", "name"])
    assert [type(next(as_source(form).batches(0, 0))) for form in (x, (x,), [x, name], {"x": x})] == [
        tuple, tuple, tuple, dict,
    ]  # fmt: skip
    assert list(next(dataset.batches(0, 0))) == ["x", "name"]


def test_rows_are_stacked_into_batches():
    batches = list(make().batched(4).batches(0, 0))
    assert [batch["x"].tolist() for batch in batches[:2]] == [
        [[0, 0], [1, -1], [2, -2], [3, -3]],
        [[4, -4], [5, -5], [6, -6], [7, -7]],
    ]
    assert numbers(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("own", [True, False], ids=["its own batches", "batched"])
def test_remainders_may_be_dropped(own):
    dataset = make(drop_remainder=True, batch_size=4 if own else None)
    source = dataset if own else dataset.batched(4)
    assert numbers(source.batches(0, 0)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_columns_of_a_data_set_with_a_batch_size_are_of_batches():
    shapes = []
    dataset = make(batch_size=4)
    x, name = dataset.get(["x", "name"])
    seen = x.map(lambda batch: shapes.append(list(batch.shape)) or batch.sum())
    assert numbers(column_source((seen, name)).batches(0, 0)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sorted(shapes) == [[2, 2], [4, 2], [4, 2]]


def test_batches_draw_as_batches():
    (x,) = mixed(batch_size=4).get(["x"])
    drawn = [value for (value,) in column_source(x.map(lambda batch, rng: rng.random())).batches(0, 0)]
    assert len(set(drawn)) == 3
    assert column_source(x).batched(5).batch_size == 4


def test_what_a_batch_is_made_of_is_worked_out_once():
    calls = []
    dataset = make(10, {"x": lambda number: calls.append(number) or number, "y": float}, batch_size=4)
    x, y = dataset.get(["x", "y"])
    list(column_source((x, x + 1, y * x)).batches(0, 0))
    assert sorted(calls) == list(range(10))


def test_rows_may_be_joined_by_a_function():
    dataset = make(5, batch_size=2, join=lambda rows: [torch.cat([x for x, _ in rows]), "-".join(n for _, n in rows)])
    assert [batch["name"] for batch in dataset.batches(0, 0)] == ["0-1", "2-3", "4"]


def test_a_join_that_fails_says_for_which_batch():
    def join(rows):
        if rows[0][1] == "2":
            raise ZeroDivisionError("mine")
        return stacked(rows)

    batches = make(5, batch_size=2, join=join).batches(0, 0)
    next(batches)
    words = "rows: the batch that begins with sample 2 could not be made: ZeroDivisionError: mine"
    with pytest.raises(FunctionError, match=words):
        next(batches)
    assert readers() == []


def test_values_and_what_they_stack_to():
    turned = np.arange(2, dtype=">i4")[::-1]  # neither its bytes nor its steps are torch's
    rows = [
        [1, 1.5, True, "a", b"a", torch.tensor(1), np.float32(1), np.arange(2), turned, {"k": 1}],
        [2, 2.5, False, "b", b"b", torch.tensor(2), np.float32(2), np.arange(2), turned, {"k": 2}],
    ]
    found = stacked(rows)
    assert [value.dtype for value in found[:3]] == [torch.int64, torch.float64, torch.bool]
    assert found[3:5] == [["a", "b"], [b"a", b"b"]]
    assert found[5].tolist() == [1, 2]
    assert found[6].dtype == torch.float32
    assert found[7].tolist() == [[0, 1], [0, 1]]
    assert found[8].tolist() == [[1, 0], [1, 0]]
    assert found[9]["k"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([torch.ones(2, 3), torch.ones(3, 3)], r"shapes \[2, 3\], \[3, 3\] do not make a batch: give image_size="),
        ([np.ones(2), np.ones(3)], r"shapes \[2\], \[3\] do not make a batch"),
        ([torch.ones(2), 1], "type Tensor, int do not make a batch: map them to tensors or numbers"),
        ([None, None], "type NoneType do not make a batch"),
        ([1, "a"], "type int, str do not make a batch"),
        ([{"a": 1}, {"b": 1}], "type dict do not make a batch"),
        ([np.array([None]), np.array([None])], "type ndarray do not make a batch"),
    ],
    ids=["tensors", "arrays", "kinds", "None", "words", "keys", "objects"],
)
@pytest.mark.parametrize("own", [True, False], ids=["its own batches", "batched"])
def test_values_that_do_not_stack(values, words, own):
    dataset = make(2, {"value": values.__getitem__}, batch_size=2 if own else None)
    with pytest.raises(DataError, match=words):
        next((dataset if own else dataset.batched(2)).batches(0, 0))
    assert readers() == []


# Samples that are left out


def with_holes(*holes, rows=10, **settings):
    def field(number):
        if number in holes:
            raise SkippedSample(f"{number} is broken")
        return torch.tensor(number)

    return make(rows, {"x": field, "name": str}, **settings)


@pytest.mark.parametrize("own", [True, False], ids=["its own batches", "batched"])
def test_a_sample_that_is_left_out_shortens_its_batch_and_is_counted(own, caplog):
    caplog.set_level(logging.WARNING, "plait")
    dataset = with_holes(1, 2, 9, batch_size=4 if own else None)
    source = dataset if own else dataset.batched(4)
    assert numbers(source.batches(0, 0)) == [[0, 3], [4, 5, 6, 7], [8]]
    assert dataset.skipped == 3
    said = [record.getMessage() for record in caplog.records]
    assert {line.rpartition(": ")[2] for line in said} == {"1 is broken", "2 is broken", "9 is broken"}
    assert sorted(int(line.split("left out, ")[1].split()[0]) for line in said) == [1, 2, 3]
    assert numbers(source.batches(0, 1)) == [[4, 5, 6, 7], [8]]


def test_a_function_of_a_column_may_leave_a_sample_out():
    def odd_only(value):
        if value[0] % 2 == 0:
            raise SkippedSample("even")
        return value

    dataset = make(6)
    x, name = dataset.get(["x", "name"])
    assert numbers(column_source((x.map(odd_only), name)).batched(4).batches(0, 0)) == [[1, 3], [5]]
    assert dataset.skipped == 3


def test_samples_that_are_left_out_do_not_change_what_others_draw():
    def drawn(*holes):
        (x,) = with_holes(*holes).get(["x"])
        drawn = column_source((x, x.map(lambda value, rng: rng.random()))).batched(5)
        return {int(n): float(d) for ns, ds in drawn.batches(0, 0) for n, d in zip(ns, ds, strict=True)}

    whole, less = drawn(), drawn(0, 4, 7)
    assert less == {number: value for number, value in whole.items() if number not in (0, 4, 7)}


@pytest.mark.parametrize("own", [True, False], ids=["its own batches", "batched"])
def test_a_batch_of_nothing_is_an_error(own):
    dataset = with_holes(4, 5, 6, 7, batch_size=4 if own else None)
    batches = (dataset if own else dataset.batched(4)).batches(0, 0)
    next(batches)
    with pytest.raises(DataError, match="rows: all 4 samples of a batch had to be left out; look at the files"):
        next(batches)
    assert readers() == []


def test_single_samples_cannot_be_left_out():
    samples = with_holes(2).batches(0, 0)
    assert numbers([next(samples), next(samples)]) == [0, 1]
    with pytest.raises(DataError, match="which only batches can: give a batch_size") as caught:
        next(samples)
    assert readers() == []
    assert caught.tb is not None  # it may live long, and must not keep the readers


# Reading ahead, and its end


@pytest.mark.parametrize(("batch_size", "capacity", "expected"), [(None, 6, 6), (4, 10, 12), (8, 2, 16)])
def test_the_capacity_bounds_what_is_read_ahead(batch_size, capacity, expected):
    begun = []
    changed = threading.Condition()

    def field(number):
        with changed:
            begun.append(number)
            changed.notify_all()
        return number

    batches = make(200, {"x": field}, batch_size=batch_size, capacity=capacity, readers=4).batches(0, 0)
    assert begun == []
    for consumed in range(1, 4):
        next(batches)
        limit = consumed * (batch_size or 1) + expected
        with changed:
            assert changed.wait_for(lambda limit=limit: len(begun) >= limit, 5)
        time.sleep(0.02)
        assert sorted(begun) == list(range(limit))
    batches.close()


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_reading_that_is_broken_off_leaves_no_thread(batch_size, end):
    batches = make(1000, batch_size=batch_size, readers=4).batches(0, 0)
    list(itertools.islice(batches, 3))
    assert readers()
    if end == "close":
        batches.close()
    else:
        del batches
    assert readers() == []


@pytest.mark.parametrize("batch_size", [None, 3])
def test_an_error_comes_at_its_step_and_ends_the_readers(batch_size):
    def fails(value):
        if value[0] == 7:
            raise KeyError("seven")
        return value

    dataset = make(100, readers=4)
    x, name = dataset.get(["x", "name"])
    source = column_source((x.map(fails), name))
    batches = (source.batched(batch_size) if batch_size else source).batches(0, 0)
    list(itertools.islice(batches, 7 // (batch_size or 1)))
    with pytest.raises(FunctionError, match="'fails', applied to a column of rows, failed for sample 7: KeyError"):
        next(batches)
    assert readers() == []


# As a source


def test_columns_and_data_sets_are_inputs():
    dataset = make(num_epochs=2, batch_size=4)
    x, name = dataset.get(["x", "name"])
    assert as_source(dataset) is dataset
    for data in (x, [x, name], (x, name), {"x": x, "name": name}):
        source = as_source(data)
        assert type(source) is ColumnSource
        assert isinstance(source, Source)
        assert (source.num_epochs, source.batch_size, source.seekable) == (2, 4, True)
    assert as_source(source) is source


def test_other_inputs_stay_what_they_were():
    assert column_source([torch.ones(2)]) is None
    assert column_source({"x": torch.ones(2)}) is None
    assert column_source(TensorSource({"x": torch.ones(4)}, 2)) is None
    assert column_source([]) is None
    assert column_source("x") is None


def test_columns_do_not_go_with_other_things_or_other_data_sets():
    (x,) = make().get(["x"])
    with pytest.raises(DataError, match="columns and a Tensor do not go together: return columns of one data set"):
        as_source({"x": x, "y": torch.ones(3)})
    with pytest.raises(DataError, match=r"columns of different data sets \(rows, rows\) do not go together"):
        as_source([x, make().get(["x"])[0]])


def test_a_stream_reads_to_the_end_of_the_passes():
    stream = Stream(as_source(mixed(num_epochs=2, batch_size=4)))
    seen, ends = [], 0
    while not stream.spent:
        try:
            seen.append(stream.read()["name"])
            stream.commit()
        except OutOfRangeError:
            ends += 1
    assert ends == 2
    assert [[int(n) for n in names] for names in seen] == [
        *numbers(mixed().batched(4).batches(0, 0)),
        *numbers(mixed().batched(4).batches(1, 0)),
    ]
    with pytest.raises(OutOfRangeError, match="no pass is left of 2"):
        stream.read()


def test_a_stream_goes_on_from_its_saved_place_with_other_readers():
    first = Stream(column_source({"noisy": noisy(mixed(50, readers=8))}).batched(4))
    for _ in range(5):
        first.read()
        first.commit()
    second = Stream(column_source({"noisy": noisy(mixed(50, readers=2, capacity=3))}).batched(4))
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        assert torch.equal(first.read()["noisy"], second.read()["noisy"])
        first.commit()
        second.commit()
    first.close()
    second.close()


def test_a_step_that_failed_is_given_its_sample_again():
    tries = []

    def fails_once(value):
        if value[0] == 2:
            tries.append(1)
            if len(tries) == 1:
                raise KeyError("once")
        return value

    stream = Stream(as_source(make().get(["x"])[0].map(fails_once)))
    for _ in range(2):
        stream.read()
        stream.commit()
    with pytest.raises(FunctionError, match="sample 2"):
        stream.read()
    assert stream.read()[0].tolist() == [2, -2]
    stream.close()


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (lambda: mixed(9).batched(4), "rows"),
        (lambda: mixed(seed=1).batched(4), "seed"),
        (lambda: mixed().batched(5), "batch_size"),
        (lambda: mixed(drop_remainder=True).batched(4), "drop_remainder"),
        (lambda: mixed(facts={"files": "b"}).batched(4), "files"),
        (lambda: column_source(mixed().get(["x"])[0]).batched(4), "columns"),
        (mixed, "batch_size"),
    ],
)
def test_the_fingerprint_tells_other_data_apart(other, key):
    state = Stream(mixed().batched(4)).state_dict()
    Stream(mixed(readers=1, capacity=3).batched(4)).load_state_dict(state)
    with pytest.raises(DataError, match=rf"not the one that the checkpoint was made with:\n.*\n  {key} +\S.*\ngive"):
        Stream(other()).load_state_dict(state)


def test_batches_made_in_the_readers_are_those_of_a_batched_source():
    dataset = mixed()
    (x,) = dataset.get(["x"])
    readers_own = list(column_source({"x": x}).batched(4).batches(1, 0))
    outside = list(BatchedSource(column_source({"x": x}), 4).batches(1, 0))
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(readers_own, outside, strict=True))


def test_a_sample_may_be_made_of_columns():
    x, name = make().get(["x", "name"])
    source = Sample({"x": x, "name": name}).source
    assert next(iter(source.batches(0, 3)))["name"] == "3"
