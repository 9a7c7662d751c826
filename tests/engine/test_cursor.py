"""Columns as fetches: one sample a run, whichever columns are asked for, until no pass is left."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch

import plait
from plait.data.columns import SkippedSample
from plait.data.datasets import Dataset, shuffled
from plait.engine.cursor import Cursor, column_ops
from plait.engine.hooks import SessionRunArgs, SessionRunHook
from plait.engine.monitored import MonitoredSession
from plait.engine.session import Session
from plait.errors import DataError, FetchError, FunctionError, OutOfRangeError


class Pair(NamedTuple):
    left: object
    right: object


def make(rows=5, name="rows", **settings):
    return Dataset(name, rows, {"x": torch.tensor, "name": str}, **settings)


@pytest.fixture
def session():
    with Session() as session:
        yield session


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("plait-reader")]


# Fetches


def test_a_run_gives_one_sample(session):
    (x,) = make().get(["x"])
    assert [session.run(x) for _ in range(3)] == [0, 1, 2]


def test_results_have_the_nesting_of_the_fetches(session):
    x, name = make().get(["x", "name"])
    assert session.run([x, name]) == [0, "0"]
    assert session.run((name, [x, x])) == ("1", [1, 1])
    assert session.run({"both": Pair(x, name), "none": None}) == {"both": Pair(2, "2"), "none": None}
    assert session.run([[x], {"name": name}]) == [[3], {"name": "3"}]


def test_columns_stand_beside_ops(session):
    (x,) = make().get(["x"])
    calls = []
    assert session.run([x + 10, plait.op(lambda: calls.append(1) or "op")]) == [10, "op"]
    assert session.run([x + 10, plait.op(lambda: "another")]) == [11, "another"]
    assert calls == [1]


def test_feeding_something_else_changes_nothing(session):
    (x,) = make().get(["x"])
    fed = plait.placeholder(name="fed")
    assert [session.run([x, fed], feed_dict={fed: n})[0] for n in (7.0, 8.0)] == [0, 1]


def test_columns_cannot_be_fed(session):
    (x,) = make().get(["x"])
    with pytest.raises(FetchError, match="key of type Column"):
        session.run(x, feed_dict={x: 1})


def test_several_sets_of_fetches_go_on_from_the_same_place(session):
    x, name = make(100).get(["x", "name"])
    double = x * 2
    assert [
        session.run(x),
        session.run([x, name]),
        session.run(double),
        session.run(x),
        session.run({"x": x, "double": double}),
        session.run(name),
    ] == [0, [1, "1"], 4, 3, {"x": 4, "double": 8}, "5"]


def test_changing_the_fetches_changes_no_draw():
    def run(fetches):
        dataset = make(20, seed=3, order=shuffled(20, 3), readers=4)
        x, name = dataset.get(["x", "name"])
        noisy = x.map(lambda value, rng: float(value) + rng.random())
        with Session() as session:
            return [session.run(fetches(n, noisy, name))[0] for n in range(30)]

    assert run(lambda n, noisy, name: [noisy]) == run(lambda n, noisy, name: [noisy, name][: 1 + n % 2])


def test_two_data_sets_in_one_run_move_on_each_at_its_own_length(session):
    (x,) = make(3).get(["x"])
    (y,) = make(2, "others").get(["x"])
    assert [session.run([x, y + 10]) for _ in range(5)] == [[0, 10], [1, 11], [2, 10], [0, 11], [1, 10]]
    assert session.run(y) == 1
    assert session.run(x) == 2


def test_data_sets_of_batches_give_batches(session):
    x, name = make(batch_size=2).get(["x", "name"])
    assert [session.run([x.sum(), name]) for _ in range(4)] == [
        [1, ["0", "1"]],
        [5, ["2", "3"]],
        [4, ["4"]],
        [1, ["0", "1"]],
    ]


def test_each_session_has_its_own_place():
    (x,) = make().get(["x"])
    with Session() as one, Session() as other:
        assert [one.run(x), one.run(x), other.run(x), one.run(x)] == [0, 1, 0, 2]


def test_one_reading_serves_all_columns_of_a_run():
    calls = []
    dataset = Dataset("rows", 5, {"x": lambda number: calls.append(number) or number}, capacity=1, readers=1)
    (x,) = dataset.get(["x"])
    with Session() as session:
        assert session.run([x, x + 1, [x * 2]]) == [0, 1, [0]]
    assert sorted(calls) == sorted(set(calls))


def test_ops_are_named_after_columns_and_data_sets():
    x, name = make().get(["x", "name"])
    ops = column_ops([x, {"name": name}, None], {})
    assert [op.name for op in ops.values()] == ["x", "name"]
    assert {op.inputs[0].name for op in ops.values()} == {"read rows"}


# Passes and their end


def test_passes_follow_each_other_in_their_own_orders(session):
    dataset = make(6, order=shuffled(6, 1))
    (x,) = dataset.get(["x"])
    found = [int(session.run(x)) for _ in range(18)]
    assert found == [*dataset.order(0), *dataset.order(1), *dataset.order(2)]


def test_the_end_of_the_passes_is_out_of_range(session):
    (x,) = make(3, num_epochs=2).get(["x"])
    assert [session.run(x) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="rows: no pass is left of 2"):
            session.run(x)
    assert readers() == []


def test_a_monitored_session_ends_with_the_data():
    (x,) = make(3, num_epochs=2).get(["x"])
    seen = []
    with MonitoredSession() as session:
        while not session.should_stop():
            seen.append(int(session.run(x)))
    assert seen == [0, 1, 2, 0, 1, 2]


def test_hooks_may_fetch_columns_of_the_same_sample():
    x, name = make().get(["x", "name"])
    seen = []

    class Names(SessionRunHook):
        def before_run(self, context):
            return SessionRunArgs({"name": name})

        def after_run(self, context, values):
            seen.append(values.results["name"])

    with MonitoredSession(hooks=[Names()]) as session:
        assert [session.run(x) for _ in range(3)] == [0, 1, 2]
    assert seen == ["0", "1", "2"]


def test_dropped_remainders_may_leave_nothing(session):
    (x,) = make(3, batch_size=4, drop_remainder=True).get(["x"])
    with pytest.raises(DataError, match="rows: pass 0 gave no sample; .*not smaller than a batch"):
        session.run(x)


# Samples that are left out


def with_holes(*holes, rows=6, **settings):
    def field(number):
        if number in holes:
            raise SkippedSample(f"{number} is broken")
        return number

    return Dataset("rows", rows, {"x": field}, **settings)


def test_samples_that_are_left_out_are_passed_over(session):
    dataset = with_holes(0, 3, 5)
    (x,) = dataset.get(["x"])
    assert [session.run(x) for _ in range(7)] == [1, 2, 4, 1, 2, 4, 1]
    assert session.run([x, x]) == [2, 2]
    assert dataset.skipped >= 6


@pytest.mark.parametrize("num_epochs", [None, 1])
def test_a_pass_in_which_all_is_left_out_is_an_error(session, num_epochs):
    (x,) = with_holes(*range(6), num_epochs=num_epochs).get(["x"])
    with pytest.raises(DataError, match="pass 0 gave no sample; look at the warnings"):
        session.run(x)
    assert readers() == []


# Errors


def test_an_error_comes_at_its_run_and_the_place_stays(session):
    tries = []

    def fails_twice(value):
        if value == 2:
            tries.append(1)
            if len(tries) < 3:
                raise KeyError("two")
        return value

    column = make().get(["x"])[0].map(fails_twice)
    assert [session.run(column) for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(FunctionError, match="'fails_twice', applied to a column of rows, failed for sample 2: Key"):
            session.run(column)
        assert readers() == []
    assert [session.run(column) for _ in range(4)] == [2, 3, 4, 0]


# Threads


def test_closing_a_session_ends_its_readers(session):
    x, name = make(1000, readers=2).get(["x", "name"])
    (other,) = make(1000, "others", readers=2).get(["x"])
    session.run([x, other])
    session.run(name)
    assert readers()
    session.close()
    assert readers() == []
    with pytest.raises(FetchError, match="this session is closed"):
        session.run(x)


def test_an_error_in_a_with_block_ends_the_readers():
    (x,) = make(1000).get(["x"])
    failing = plait.op(lambda: {}["mine"])
    with pytest.raises(KeyError, match="mine"), MonitoredSession() as session:
        session.run([x, failing])
    assert readers() == []


def test_a_cursor_reads_with_one_set_of_readers():
    x, name = make(1000, readers=2).get(["x", "name"])
    cursor = Cursor(x.origin.owner)
    for columns in ((x,), (name,), (x, name), (name, x)):
        cursor.read(columns)
        assert len(readers()) <= 2
    assert (cursor.epoch, cursor.position) == (0, 4)
    cursor.close()
    cursor.close()
    assert readers() == []
    assert cursor.read((x,)) == (4,)
    cursor.close()
