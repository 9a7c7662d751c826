"""When a run's checkpoints are made, with a state of a few numbers in the place of a model."""

from __future__ import annotations

import logging

import pytest
import torch

from plait.engine.checkpoints import Checkpoints
from plait.engine.op import GlobalStep
from plait.engine.strategy import Local
from plait.errors import CheckpointError, MismatchError, NanLossError
from plait.variables.checkpoint import CheckpointDir, verify
from plait.version import __version__


class Counter:
    """A state that is one tensor; `bad` makes it not worth keeping."""

    def __init__(self, project="one"):
        self.global_step = GlobalStep()
        self.value = torch.zeros(2)
        self.project = project
        self.bad = False

    def capture(self, directory=None):
        return {"step": self.global_step.value, "value": self.value, "project": self.project}

    def restore(self, tree, project, directory=None):
        self.global_step.value = tree["step"]
        self.value.copy_(tree["value"])
        return project is None or tree["project"] == project

    def check(self):
        if self.bad:
            raise NanLossError("bad")

    def step(self):
        self.global_step.increment()
        self.value += 1


@pytest.fixture
def opened(tmp_path):
    made = []

    def make(state=None, **kwargs):
        made.append(Checkpoints(state or Counter(), CheckpointDir(tmp_path, keep=None), **kwargs))
        return made[-1]

    yield make
    for checkpoints in made:
        checkpoints.close()


@pytest.fixture
def steps(tmp_path):
    return lambda: [info.step for info in CheckpointDir(tmp_path).list()]


def run(checkpoints, state, count):
    for _ in range(count):
        state.step()
        checkpoints.boundary()


def test_every_save_steps_counted_from_the_last_save(opened, steps):
    state = Counter()
    checkpoints = opened(state, save_steps=2)
    checkpoints.save_first()
    run(checkpoints, state, 5)
    checkpoints.save_last()
    assert steps() == [0, 2, 4, 5]


def test_after_save_secs(opened, steps, monkeypatch):
    state = Counter()
    monkeypatch.setattr("plait.engine.checkpoints.time.monotonic", lambda: 10.0 * state.global_step.value)
    checkpoints = opened(state, save_secs=30)
    checkpoints.save_first()
    run(checkpoints, state, 7)
    checkpoints.wait()
    assert steps() == [0, 3, 6]


def test_without_either_only_at_the_start_and_the_end(opened, steps):
    state = Counter()
    checkpoints = opened(state)
    checkpoints.save_first()
    run(checkpoints, state, 3)
    checkpoints.save_last()
    assert steps() == [0, 3]


def test_nothing_is_saved_twice(opened, steps):
    state = Counter()
    checkpoints = opened(state, save_steps=3)
    checkpoints.save_first()
    checkpoints.save_first()
    run(checkpoints, state, 3)
    checkpoints.save_last()
    assert steps() == [0, 3]


def test_a_stage_that_took_long_is_saved_and_a_short_one_is_not(opened, steps, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("plait.engine.checkpoints.time.monotonic", lambda: now[0])
    state = Counter()
    checkpoints = opened(state)
    checkpoints.save_first()
    state.step()
    now[0] = 9.0
    checkpoints.after_stage()
    now[0] = 10.0
    checkpoints.after_stage()
    checkpoints.wait()
    assert steps() == [0, 1]


def test_what_is_saved_is_the_state_at_that_moment(opened, tmp_path):
    state = Counter()
    checkpoints = opened(state, save_steps=1)
    run(checkpoints, state, 1)
    state.value += 100  # while it is being written
    checkpoints.wait()
    assert CheckpointDir(tmp_path).read_latest()[1]["value"].tolist() == [1, 1]


def test_restore_takes_the_newest_and_says_so(opened, caplog):
    state = Counter()
    checkpoints = opened(state, save_steps=1)
    run(checkpoints, state, 3)
    checkpoints.wait()
    fresh = Counter()
    with caplog.at_level(logging.INFO, "plait"):
        assert opened(fresh).restore("one") is True
    assert (fresh.global_step.value, fresh.value.tolist()) == (3, [3, 3])
    assert "going on at global step 3, from" in caplog.text


def test_restore_finds_nothing_in_an_empty_directory(opened):
    assert opened().restore("one") is False


class OfAnotherModel(Counter):
    def capture(self, directory=None):
        return {**super().capture(), "global_step": self.global_step.value}

    def restore(self, tree, project, directory=None):
        raise MismatchError("the weights differ")


def test_a_checkpoint_of_another_model_is_passed_over_if_nothing_was_trained(opened, steps, caplog):
    first = opened(OfAnotherModel())
    first.save_first()
    first.save_last()
    second = opened(OfAnotherModel())
    with caplog.at_level(logging.WARNING, "plait"):
        assert not second.restore("one")
    (said,) = caplog.messages
    assert said.startswith("nothing was trained in ")
    assert said.endswith("starting anew (the weights differ)")
    second.save_first()
    second.save_last()
    assert steps() == [0, 0]


def test_a_checkpoint_of_another_model_that_was_trained_is_an_error(opened):
    state = OfAnotherModel()
    first = opened(state)
    run(first, state, 1)
    first.save_last()
    with pytest.raises(MismatchError, match="the weights differ"):
        opened(OfAnotherModel()).restore("one")


def test_after_a_restore_the_first_save_is_not_made_again(opened, steps):
    begun = opened()
    begun.save_first()
    begun.wait()
    again = opened(Counter())
    again.restore("one")
    again.save_first()
    again.wait()
    assert steps() == [0]


def test_another_project_saves_its_own_start(opened, steps, caplog):
    begun = opened()
    begun.save_first()
    begun.wait()
    other = opened(Counter("two"))
    with caplog.at_level(logging.INFO, "plait"):
        other.restore("two")
    other.save_first()
    other.wait()
    assert steps() == [0, 0]
    assert "starting project 'two' with the weights at global step 0" in caplog.text


def test_a_bad_state_is_not_saved(opened, steps):
    state = Counter()
    checkpoints = opened(state, save_steps=1)
    run(checkpoints, state, 1)
    state.bad = True
    with pytest.raises(NanLossError):
        run(checkpoints, state, 1)
    checkpoints.wait()
    assert steps() == [1]


def test_an_error_in_the_background_comes_with_the_next_call(opened, monkeypatch):
    state = Counter()
    checkpoints = opened(state, save_steps=1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plait.variables.checkpoint._write", full)
    run(checkpoints, state, 1)
    with pytest.raises(CheckpointError, match="cannot write a checkpoint.*No space left.*Name a directory .*with room"):
        run(checkpoints, state, 1)


def test_the_version_is_written_down(opened, tmp_path):
    checkpoints = opened()
    checkpoints.save_first()
    checkpoints.wait()
    assert verify(CheckpointDir(tmp_path).list()[0].path).plait == __version__


class InStep(Local):
    """A worker in step with a chief who says `told`; what it is asked is noted."""

    worker_num, in_step = 2, True

    def __init__(self, worker_id=0, told=None):
        super().__init__()
        self.worker_id = worker_id
        self.told = told
        self.asked = []
        self.is_whole = self.keeps = True
        self.durables = []

    def tell(self, value):
        self.asked.append(value)
        return value if self.told is None else self.told.pop(0)

    def is_saver(self):
        return self.worker_id == 0

    def whole(self):
        return self.is_whole

    def rejoin(self):
        self.asked.append("rejoin")

    def durable(self, state, directory):
        self.durables.append((state, directory))
        return self.keeps


class Shared(Counter):
    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy

    def capture(self, directory=None):
        self.captured = directory
        return {**super().capture(), "cluster": {"servers": "here"}}


class TestWorkersInStep:
    def test_all_take_part_in_a_save_and_the_chief_writes(self, opened, steps, tmp_path):
        worker = Shared(InStep(1))
        run(opened(worker, save_steps=1), worker, 1)
        assert (worker.captured, steps()) == (str(tmp_path), [])
        chief = Shared(InStep(0))
        checkpoints = opened(chief, save_steps=1)
        run(checkpoints, chief, 1)
        checkpoints.wait()
        assert steps() == [1]
        assert chief.strategy.durables == [({"servers": "here"}, str(tmp_path))]

    def test_a_save_that_the_cluster_cannot_make_is_none(self, opened, steps):
        class Full(InStep):
            def durable(self, state, directory):
                raise CheckpointError("server 1 could not save its share")

        state = Shared(Full())
        checkpoints = opened(state)
        checkpoints.save()
        with pytest.raises(CheckpointError, match="server 1 could not save its share"):
            checkpoints.wait()
        assert steps() == []

    def test_one_that_a_server_has_lost_is_not_kept(self, opened, steps):
        state = Shared(InStep())
        checkpoints = opened(state, save_steps=1)
        run(checkpoints, state, 1)
        checkpoints.wait()
        state.strategy.keeps = False
        run(checkpoints, state, 1)
        checkpoints.wait()
        assert steps() == [1]

    def test_nothing_is_saved_while_workers_have_different_variables(self, opened, steps):
        state = Shared(InStep())
        checkpoints = opened(state, save_steps=2)
        state.strategy.is_whole = False
        run(checkpoints, state, 3)
        state.strategy.is_whole = True
        run(checkpoints, state, 2)
        checkpoints.wait()
        assert steps() == [4]

    def test_the_chiefs_clock_says_when_it_is_time(self, opened, monkeypatch):
        monkeypatch.setattr("plait.engine.checkpoints.time.monotonic", lambda: 0.0)  # here, time stands still
        state = Shared(InStep(1, told=[[False, 3], [True, 9]]))
        checkpoints = opened(state, save_secs=60)
        saved = []
        monkeypatch.setattr(checkpoints, "save", lambda: saved.append(state.global_step.value))
        run(checkpoints, state, 5)
        assert saved == [3]
        assert len(state.strategy.asked) == 2

    def test_the_chief_looks_at_its_clock_now_and_then(self, opened, steps, monkeypatch):
        state = Shared(InStep())
        monkeypatch.setattr("plait.engine.checkpoints.time.monotonic", lambda: 0.01 * state.global_step.value)
        checkpoints = opened(state, save_secs=2.0)
        checkpoints.save_first()
        run(checkpoints, state, 450)
        checkpoints.wait()
        found = steps()
        assert [len(found), found[0]] == [3, 0]
        assert all(200 <= after - before <= 220 for before, after in zip(found, found[1:], strict=False))
        assert len(state.strategy.asked) < 60

    def test_the_end_of_a_stage_is_saved_if_the_chief_says_so(self, opened, monkeypatch):
        state = Shared(InStep(1, told=[False, True]))
        checkpoints = opened(state)
        saved = []
        monkeypatch.setattr(checkpoints, "save", lambda: saved.append(True))
        checkpoints.after_stage()
        checkpoints.after_stage()
        assert saved == [True]

    def test_all_take_up_the_chiefs_checkpoint_as_members(self, opened, tmp_path):
        chief = Shared(InStep(0))
        checkpoints = opened(chief, save_steps=1)
        run(checkpoints, chief, 2)
        checkpoints.wait()
        assert checkpoints.restore("one") is True
        before, told = chief.strategy.asked[-2:]
        assert before == "rejoin"
        worker = Shared(InStep(1, told=[told]))
        assert opened(worker).restore("one") is True
        assert worker.global_step.value == 2
        assert worker.strategy.asked == ["rejoin", None]

    def test_workers_apart_each_read_their_own(self, opened):
        strategy = InStep(0)
        strategy.in_step = False
        assert opened(Shared(strategy)).restore("one") is False
        assert strategy.asked == ["rejoin"]
