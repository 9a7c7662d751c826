"""Batches that forked processes make are those that threads make, to the bit, whatever is in them."""

from __future__ import annotations

import logging
import os
import random
import time

import numpy as np
import pytest
import torch

from plait.data.columns import SkippedSample
from plait.data.datasets import Dataset, column_source, shuffled
from plait.data.rows import Form, SharedBatches, forms_of
from plait.errors import DataError, FunctionError

LARGE = (3, 40, 50)
"""As floats, more than the 16 KiB from which on values are put into the batch at once."""


def picture(number):
    return np.full(LARGE, number, np.float32)


FIELDS = {
    "large": picture,
    "second": lambda number: torch.full((200, 30), float(number), dtype=torch.float64),
    "label": int,
    "small": lambda number: torch.tensor([number, -number]),
    "name": lambda number: f"number {number}",
    "half": lambda number: torch.tensor(number).to(torch.bfloat16),
    "array": lambda number: np.array([number], np.int16),
}


def make(forks, fields=FIELDS, rows=23, **settings):
    given = {"readers": 3, "seed": 5, "order": shuffled(rows, 5), **settings}
    return Dataset("numbers", rows, fields, forks=forks, **given)


def read(dataset, *names, epoch=0, start=0, batch_size=4, change=None):
    columns = {name: dataset.columns[name] for name in names or dataset.columns}
    if change is not None:
        columns = {name: change(column) for name, column in columns.items()}
    source = column_source(columns)
    return list((source if dataset.batch_size else source.batched(batch_size)).batches(epoch, start))


def same(one, other):
    assert len(one) == len(other)
    for first, second in zip(one, other, strict=True):
        assert first.keys() == second.keys()
        for key, value in first.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == second[key].dtype
                assert torch.equal(value, second[key]), key
            else:
                assert value == second[key]


@pytest.mark.parametrize("settings", [{}, {"drop_remainder": True}, {"batch_size": 5}, {"readers": 1}, {"readers": 7}])
def test_the_same_batches(settings):
    same(read(make(True, **settings)), read(make(False, **settings)))


@pytest.mark.parametrize(("epoch", "start"), [(0, 3), (2, 0), (1, 5), (0, 6)])
def test_from_any_place(epoch, start):
    same(read(make(True), epoch=epoch, start=start), read(make(False), epoch=epoch, start=start))


def test_several_passes_of_one_source():
    source = column_source(dict(make(True).columns)).batched(4)
    plain = column_source(dict(make(False).columns)).batched(4)
    for epoch in range(3):
        same(list(source.batches(epoch, 0)), list(plain.batches(epoch, 0)))


def test_every_third_batch():
    source = column_source(dict(make(True).columns)).batched(4)
    plain = column_source(dict(make(False).columns)).batched(4)
    same(list(source.every(0, 1, 3)), list(plain.every(0, 1, 3)))


def test_what_is_drawn_is_the_same():
    def noisy(column):
        return column.map(lambda value, rng: torch.as_tensor(value) + rng.random())

    same(read(make(True), "large", change=noisy), read(make(False), "large", change=noisy))


def test_they_are_made_in_other_processes():
    dataset = make(True, {"large": picture, "pid": lambda number: os.getpid()})
    assert os.getpid() not in {pid for batch in read(dataset) for pid in batch["pid"].tolist()}


def test_batches_that_are_kept_stay_what_they_are():
    rows = 4 * 40
    kept = read(make(True, rows=rows, capacity=8), "large", "label")  # many more than there are blocks
    order = [number for batch in kept for number in batch["label"].tolist()]
    assert sorted(order) == list(range(rows))
    assert [float(value) for batch in kept for value in batch["large"][:, 0, 0, 0]] == order


def test_memory_is_used_again():
    source = column_source(dict(make(True, rows=4 * 40, capacity=8).columns)).batched(4)
    places = {batch["large"].data_ptr() for batch in source.batches(0, 0)}
    assert len(places) <= 2 + 5  # those on their way, and room


def test_values_of_other_forms_are_what_they_are_with_threads():
    def odd(number):
        return np.zeros((4, 60 + (number == 9), 50), np.float32)

    for forks in (True, False):
        with pytest.raises(DataError, match=r"samples of the shapes .* do not make a batch"):
            read(make(forks, {"large": odd}))


def test_large_values_that_are_only_sometimes_large():
    def growing(number):
        return np.zeros((8000 if number >= 8 else 1000,), np.float32)

    fields = {"value": growing, "label": int}
    same(read(make(True, fields, rows=16, order=None)), read(make(False, fields, rows=16, order=None)))


def test_samples_that_are_left_out(caplog):
    def holes(number):
        if number in (6, 11):
            raise SkippedSample(f"no {number}")
        return picture(number)

    fields = {"large": holes, "label": int}
    dataset, plain = make(True, fields), make(False, fields)
    with caplog.at_level(logging.WARNING, "plait"):
        same(read(dataset), read(plain))
    assert dataset.skipped == plain.skipped == 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert all(any(f"no {number}" in line for line in said) for number in (6, 11))


class StrangeError(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("wrong"), r"'large', a field of numbers, failed for sample 9: ValueError: wrong"),
        (StrangeError(1, 2), "StrangeError: 1 and 2"),
    ],
)
def test_an_error_is_the_one_that_threads_give(error, words):
    def failing(number):
        if number == 9:
            raise error
        return picture(number)

    for forks in (True, False):
        with pytest.raises(FunctionError, match=words):
            read(make(forks, {"large": failing}))


def test_what_cannot_be_handed_over_is_named():
    dataset = make(True, {"large": picture, "function": lambda number: [lambda: number]})
    with pytest.raises(DataError, match=r"a sample has a function, which one process cannot give to another: map it"):
        read(dataset)


def test_single_samples_and_rows_for_a_function_of_the_users_are_read_by_threads():
    dataset = make(True, {"pid": lambda number: os.getpid()})
    assert {int(pid) for (pid,) in column_source(dataset.get(["pid"])).batches(0, 0)} == {os.getpid()}
    joined = make(True, {"pid": lambda number: os.getpid()}, batch_size=4, join=lambda rows: [[pid for (pid,) in rows]])
    assert {pid for batch in read(joined) for pid in batch["pid"]} == {os.getpid()}


def test_blocks_of_shared_batches():
    shared = SharedBatches({0: Form((2, 3), np.dtype(np.float32), torch.float32)}, 5, 8)
    taken = shared.take(4)
    (number, batch) = taken[0]
    assert batch.shape == (4, 2, 3)
    batch.fill_(7)
    assert shared.arrays({0: number}, 4)[0].tolist() == batch.tolist()
    held = [shared.take(5) for _ in range(7)]
    assert all(held)
    assert shared.take(5) == {}
    del held
    assert shared.take(5) != {}


def test_forms_of_a_row():
    row = [picture(1), torch.zeros(3, 9000), "word", np.zeros(3), np.array(["x"] * 9000), torch.zeros(9000).bfloat16()]
    assert forms_of(row) == {
        0: Form(LARGE, np.dtype(np.float32), torch.float32),
        1: Form((3, 9000), np.dtype(np.float32), torch.float32),
    }


def test_the_row_that_shows_the_form_may_fail_or_be_left_out():
    def holes(number):
        if number in (0, 1):
            raise SkippedSample(f"no {number}")
        return picture(number)

    dataset = make(True, {"large": holes}, order=None, rows=8)
    assert [len(batch["large"]) for batch in read(dataset)] == [2, 4]
    assert dataset.skipped == 2

    def failing(number):
        if number == 0:
            raise ValueError("wrong")
        return picture(number)

    with pytest.raises(FunctionError, match="failed for sample 0: ValueError: wrong"):
        read(make(True, {"large": failing}, order=None))


def test_global_generators_differ_from_process_to_process_and_from_pass_to_pass():
    def drawn(number):
        time.sleep(0.01)  # so that all processes have something to do
        return np.array([random.random(), np.random.rand(), float(torch.rand(()))])  # noqa: NPY002 - as users do

    dataset = make(True, {"drawn": drawn}, rows=24)
    found = torch.cat([batch["drawn"] for epoch in (0, 1) for batch in read(dataset, epoch=epoch)])
    assert len(found.unique()) == 2 * 24 * 3


def test_what_functions_print_is_printed_once(capfd):
    def printing(number):
        print(f"row {number}\n", end="")  # noqa: T201 - which is the point; in one piece
        return number

    print("before", end="")  # noqa: T201 - left in the buffer
    read(make(True, {"x": printing}, rows=8, order=None))
    words = capfd.readouterr().out
    assert words.count("before") == 1
    assert all(words.count(f"row {number}\n") == (2 if number == 0 else 1) for number in range(8))  # 0 shows the form
