"""Reading in parallel: in order, a bounded number ahead, and over at once where something fails or nobody listens."""

from __future__ import annotations

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.reading import read_groups

PATIENCE = 5.0
"""Seconds that a thread is waited for before the test has failed."""


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("plait-reader")]


def in_groups(count, size):
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


SKIPPED = object()


def read(groups, work=lambda item: item, join=lambda items, results: results, *, threads=4, ahead=8, at_once=1):
    class Made:
        def __init__(self, items):
            self.items, self.results = items, [SKIPPED] * len(items)

        def work(self, places):
            for place in places:
                self.results[place] = work(self.items[place])

        def result(self):
            return join(self.items, self.results)

    return read_groups(iter(groups), Made, threads=threads, ahead=ahead, at_once=at_once)


class Started:
    """A `work` that counts, and waits at a gate until it is opened."""

    def __init__(self, *, is_open=True):
        self.items = []
        self.changed = threading.Condition()
        self.gate = threading.Event()
        if is_open:
            self.gate.set()

    def __call__(self, item):
        with self.changed:
            self.items.append(item)
            self.changed.notify_all()
        assert self.gate.wait(PATIENCE)
        return item

    def settled(self, count):
        """How many were started, once there are `count`, and time for more was given."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.items) >= count, PATIENCE)
        time.sleep(0.02)
        return len(self.items)


# Order


@given(
    st.lists(st.lists(st.integers(), max_size=20), max_size=12),
    st.integers(1, 6),
    st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_groups_come_in_order_with_their_items(groups, threads, ahead):
    found = read(groups, lambda item: -item, lambda items, results: (items, results), threads=threads, ahead=ahead)
    assert list(found) == [(items, [-item for item in items]) for items in groups]
    assert readers() == []


def test_slow_items_do_not_lose_their_place():
    def work(item):
        time.sleep(0.01 if item % 7 == 0 else 0)
        return item

    assert list(read(in_groups(60, 5), work)) == in_groups(60, 5)


def test_what_is_left_out_keeps_its_place():
    groups = [[1, 2, 3]]
    assert list(read(groups, lambda item: SKIPPED if item == 2 else item)) == [[1, SKIPPED, 3]]


def test_a_group_of_nothing_is_joined_too():
    assert list(read([[], [1], []])) == [[], [1], []]


def test_one_group_is_worked_out_by_all_threads():
    together = threading.Barrier(4, timeout=PATIENCE)

    def work(item):
        together.wait()
        return item

    assert list(read([[1, 2, 3, 4]], work, threads=4)) == [[1, 2, 3, 4]]


def test_each_item_is_worked_out_once_and_each_group_joined_once():
    work, joined = Started(), []
    list(read(in_groups(100, 7), work, lambda items, results: joined.append(items)))
    assert sorted(work.items) == list(range(100))
    assert sorted(joined) == in_groups(100, 7)


# How far ahead


def test_nothing_begins_before_the_first_is_asked_for():
    work = Started()
    groups = read(in_groups(10, 2), work)
    time.sleep(0.02)
    assert work.items == []
    assert readers() == []
    groups.close()


@pytest.mark.parametrize(("size", "ahead", "expected"), [(1, 5, 5), (4, 4, 4), (4, 10, 12), (8, 3, 8), (8, 64, 64)])
def test_what_is_ahead_is_bounded(size, ahead, expected):
    work = Started()
    groups = read(in_groups(400, size), work, ahead=ahead)
    for consumed in range(size, 6 * size, size):
        next(groups)
        assert work.settled(consumed + expected) == consumed + expected
    groups.close()
    assert len(work.items) == 5 * size + expected


def test_the_groups_themselves_are_not_run_through():
    endless = itertools.count()
    groups = read(([number] for number in endless), ahead=3)
    assert [next(groups) for _ in range(5)] == [[0], [1], [2], [3], [4]]
    groups.close()
    assert next(endless) <= 5 + 3 + 1


def test_the_next_group_is_worked_out_while_one_is_looked_at():
    second = threading.Event()
    groups = read([[1], [2]], lambda item: item == 2 and second.set(), threads=1, ahead=1)
    next(groups)
    assert second.wait(PATIENCE)
    groups.close()


# Errors


def failing_at(*places, error=KeyError):
    def work(item):
        if item in places:
            raise error(item)
        return item

    return work


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_an_error_comes_at_its_group(threads, size):
    groups = read(in_groups(48, size), failing_at(20), threads=threads, ahead=48)
    for expected in in_groups(48, size)[: 20 // size]:
        assert next(groups) == expected
    with pytest.raises(KeyError, match="20"):
        next(groups)
    assert readers() == []
    assert next(groups, "over") == "over"


def test_the_first_group_that_fails_counts_not_the_first_failure():
    late = threading.Event()

    def work(item):
        if item == 5:
            late.set()
            raise KeyError(item)
        if item == 0:
            assert late.wait(PATIENCE)
            raise IndexError(item)
        return item

    with pytest.raises(IndexError):
        next(read(in_groups(8, 2), work))
    assert readers() == []


def test_after_an_error_no_more_is_begun():
    work = Started()

    def failing(item):
        work(item)
        raise KeyError(item)

    with pytest.raises(KeyError):
        next(read(in_groups(10_000, 2), failing, ahead=12))
    assert len(work.items) <= 2 + 12


def test_a_group_with_an_error_is_not_joined():
    joined = []
    with pytest.raises(KeyError):
        list(read(in_groups(12, 6), failing_at(7), lambda items, results: joined.append(items)))
    assert joined == [[0, 1, 2, 3, 4, 5]]


def test_an_error_in_join_comes_at_its_group():
    def join(items, results):
        if 4 in items:
            raise ValueError(items)
        return results

    groups = read(in_groups(30, 2), join=join)
    assert [next(groups), next(groups)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"\[4, 5\]"):
        next(groups)
    assert readers() == []


def test_an_error_in_the_groups_ends_the_readers():
    def groups():
        yield [1]
        raise LookupError("the list of files")

    with pytest.raises(LookupError):
        list(read(groups()))
    assert readers() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration])
def test_errors_of_any_kind_are_raised_where_the_group_is_waited_for(error):
    groups = read([[1], [2]], failing_at(2, error=error))
    assert next(groups) == [1]
    with pytest.raises(RuntimeError if error is StopIteration else error):
        next(groups)
    assert readers() == []


# The end


def test_at_the_end_no_thread_is_left():
    groups = read(in_groups(20, 3))
    assert len(list(groups)) == 7
    assert readers() == []


@pytest.mark.parametrize("end", ["close", "throw", "drop"])
def test_readers_end_with_the_one_who_listens(end):
    groups = read(in_groups(10_000, 4), ahead=64)
    next(groups)
    assert readers()
    if end == "close":
        groups.close()
    elif end == "throw":
        with pytest.raises(KeyboardInterrupt):
            groups.throw(KeyboardInterrupt())
    else:
        del groups
    assert readers() == []


def begun_closing(pool, groups):
    closing = pool.submit(groups.close)
    until = time.monotonic() + PATIENCE
    while not groups.gi_running and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.05)  # it is inside, and needs a moment to say so to the readers
    return closing


def test_closing_waits_for_what_is_running_and_drops_the_rest():
    work = Started(is_open=False)
    groups = read([[0], *in_groups(100, 1)], lambda item: work(item) if item else None, threads=2, ahead=50)
    next(groups)
    assert work.settled(2) == 2
    with ThreadPoolExecutor(1) as pool:
        closing = begun_closing(pool, groups)
        assert not closing.done()
        work.gate.set()
        closing.result(PATIENCE)
    assert len(work.items) <= 4
    assert readers() == []


def test_a_part_that_is_running_stops_after_its_item():
    work = Started(is_open=False)
    groups = read([[0], list(range(1, 17))], lambda item: work(item) if item else None, threads=2)
    next(groups)
    assert work.settled(2) == 2
    with ThreadPoolExecutor(1) as pool:
        closing = begun_closing(pool, groups)
        work.gate.set()
        closing.result(PATIENCE)
    assert sorted(work.items) == [1, 9]


@pytest.mark.parametrize("seed", range(8))
def test_anything_at_any_time(seed):
    """Many small readings with errors in parts and in joins, closed anywhere: what comes is right, and all ends."""
    chance = random.Random(seed)
    for _ in range(40):
        count, size = chance.randint(1, 60), chance.randint(1, 9)
        bad = {chance.randrange(count) for _ in range(chance.randint(0, 2))}
        bad_joins = {chance.randrange(count) // size for _ in range(chance.randint(0, 1))}
        stop = chance.choice([None, chance.randrange(1 + count // size)])
        threads, ahead = chance.randint(1, 6), chance.randint(1, 30)
        _one_reading(in_groups(count, size), bad, bad_joins, stop, threads, ahead)


def _one_reading(groups, bad, bad_joins, stop, threads, ahead):
    def join(items, results):
        if groups.index(items) in bad_joins:
            raise ValueError(items)
        return results

    expected = [
        KeyError if bad & set(items) else ValueError if n in bad_joins else items for n, items in enumerate(groups)
    ]
    found, reading = [], read(groups, failing_at(*bad), join, threads=threads, ahead=ahead)
    try:
        found.extend(itertools.islice(reading, stop))
    except (KeyError, ValueError) as error:
        found.append(type(error))
    reading.close()
    errors = [n for n, value in enumerate(expected) if isinstance(value, type)]
    until = min([len(expected) if stop is None else stop, *(n + 1 for n in errors[:1])])
    assert found == expected[:until]
    assert readers() == []
