"""The ready hooks."""

from __future__ import annotations

import json
import re
import threading

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import plait
from plait.engine import ready_hooks as module
from plait.engine.hooks import SessionRunHook
from plait.engine.monitored import MonitoredSession
from plait.engine.op import GlobalStep
from plait.engine.ready_hooks import (
    CheckpointSaverHook,
    FeedFnHook,
    FinalOpsHook,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    NanTensorHook,
    ProfilerHook,
    SecondOrStepTimer,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from plait.engine.session import Session
from plait.engine.training_session import Saver
from plait.errors import AbortedError, ConfigError, NanLossError, OutOfRangeError, UnavailableError
from plait.variables.checkpoint import CheckpointDir


@pytest.fixture
def step():
    return GlobalStep()


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def lines(caplog):
    """What was logged so far."""
    caplog.set_level("INFO", logger="plait")
    return lambda: [record.getMessage() for record in caplog.records]


def train_op(step, value=lambda: None):
    """A training step that does nothing but count."""

    def fn():
        step.increment()
        return value()

    return plait.op(fn, name="train")


def session_of(step, *hooks, state=None):
    return MonitoredSession(lambda: Session(global_step=step, state=state), hooks)


def run(step, hooks, steps, fetch=None):
    """Run a number of steps, or until a hook stops; returns how many ran."""
    op, count = fetch or train_op(step), 0
    with session_of(step, *hooks) as session:
        while not session.should_stop() and count < steps:
            session.run(op)
            count += 1
    return count


# The timer


def test_a_timer_of_steps_triggers_at_once_and_then_every_so_many():
    timer = SecondOrStepTimer(every_steps=3)
    due = []
    for number in range(1, 11):
        if timer.should_trigger_for_step(number):
            due.append(number)
            timer.update_last_triggered_step(number)
    assert due == [1, 4, 7, 10]


def test_a_timer_of_seconds_triggers_when_they_are_over(clock):
    timer = SecondOrStepTimer(every_secs=2)
    assert timer.update_last_triggered_step(1) == (None, None)
    assert not timer.should_trigger_for_step(2)
    clock.now += 2.5
    assert timer.should_trigger_for_step(3)
    assert not timer.should_trigger_for_step(1)
    assert timer.update_last_triggered_step(3) == (2.5, 2)


@pytest.mark.parametrize("arguments", [{}, {"every_secs": 1, "every_steps": 1}], ids=["none", "both"])
def test_a_timer_takes_exactly_one_of_the_two(arguments):
    with pytest.raises(ConfigError, match="every_secs=.*every_steps=.*give exactly one"):
        SecondOrStepTimer(**arguments)


# StopAtStepHook


@pytest.mark.parametrize(
    ("first", "arguments", "ran"),
    [(0, {"num_steps": 3}, 3), (10, {"num_steps": 3}, 3), (0, {"last_step": 4}, 4), (10, {"last_step": 12}, 2)],
)
def test_training_stops_at_the_step(step, first, arguments, ran):
    step.value = first
    assert run(step, [StopAtStepHook(**arguments)], 20) == ran
    assert step.value == first + ran


@pytest.mark.parametrize("arguments", [{}, {"num_steps": 1, "last_step": 1}], ids=["none", "both"])
def test_stopping_takes_exactly_one_of_the_two(arguments):
    with pytest.raises(ConfigError, match="num_steps=.*last_step=.*give exactly one"):
        StopAtStepHook(**arguments)


def test_a_recovery_does_not_add_to_the_steps(step):
    errors = [AbortedError("cut")]

    def fail_once():
        if step.value == 2 and errors:
            step.value -= 1
            raise errors.pop()

    assert run(step, [StopAtStepHook(num_steps=3)], 20, train_op(step, fail_once)) == 3
    assert step.value == 3


def test_the_last_step_is_kept_in_a_checkpoint(step):
    hook = StopAtStepHook(num_steps=3)
    hook.after_create_session(Session(global_step=step), None)
    later = StopAtStepHook(num_steps=3)
    later.load_state_dict(hook.state_dict())
    step.value = 2
    assert run(step, [later], 20) == 1


# LoggingTensorHook


def test_values_are_logged_every_so_many_runs(step, lines, clock):
    op = train_op(step, lambda: torch.tensor(step.value / 8))
    hook = LoggingTensorHook({"loss": op, "step": step}, every_n_iter=2)
    assert run(step, [hook], 5, op) == 5
    assert [line.split(" (")[0] for line in lines()] == [
        "loss = 0.125, step = 1",
        "loss = 0.375, step = 3",
        "loss = 0.625, step = 5",
    ]


def test_values_are_logged_every_so_many_seconds(step, lines, clock):
    def pass_time():
        clock.now += 1
        return 0.5

    op = train_op(step, pass_time)
    hook = LoggingTensorHook([op], every_n_secs=3)
    run(step, [hook], 9, op)
    # Whether it is time is asked before a run: three seconds after the first run's end are over before the fifth.
    assert lines() == ["train = 0.5", "train = 0.5 (4.000 sec)", "train = 0.5 (4.000 sec)"]


def test_values_are_logged_at_the_end(step, lines):
    run(step, [LoggingTensorHook({"step": step}, at_end=True)], 3)
    assert lines() == ["step = 3"]


def test_a_formatter_writes_the_line(step, lines):
    hook = LoggingTensorHook({"step": step}, every_n_iter=1, formatter=lambda values: f"now {values['step']}")
    run(step, [hook], 2)
    assert lines() == ["now 1", "now 2"]


def test_large_tensors_are_shown_by_their_shape(step, lines):
    run(step, [LoggingTensorHook({"x": plait.op(lambda: torch.ones(2, 3))}, every_n_iter=1)], 1)
    assert lines() == ["x = tensor of shape [2, 3]"]


def test_values_are_fetched_only_for_the_runs_that_are_logged(step):
    calls = []
    run(step, [LoggingTensorHook([plait.op(lambda: calls.append(1))], every_n_iter=3)], 6)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({}, "needs every_n_iter, every_n_secs or at_end=True"), ({"every_n_iter": 1, "every_n_secs": 1}, "exactly one")],
)
def test_logging_must_know_when(arguments, text):
    with pytest.raises(ConfigError, match=text):
        LoggingTensorHook({}, **arguments)


# StepCounterHook


def test_the_rate_of_steps_is_logged(step, lines, clock):
    def pass_time():
        clock.now += 0.5

    run(step, [StepCounterHook(every_n_steps=4)], 9, train_op(step, pass_time))
    assert lines() == ["global_step/sec: 2", "global_step/sec: 2"]


def test_seconds_win_over_the_default_of_steps(step, lines, clock):
    def pass_time():
        clock.now += 1

    run(step, [StepCounterHook(every_n_secs=3)], 7, train_op(step, pass_time))
    assert lines() == ["global_step/sec: 1", "global_step/sec: 1"]


def test_the_rate_is_written_for_tensorboard(step, tmp_path):
    run(step, [StepCounterHook(every_n_steps=2, output_dir=tmp_path)], 5)
    assert [at for at, _ in scalars(tmp_path)["global_step/sec"]] == [3, 5]


# CheckpointSaverHook


def saved_steps(directory):
    return [info.step for info in CheckpointDir(directory).list()]


def test_checkpoints_are_made_at_the_start_every_so_many_steps_and_at_the_end(step, tmp_path):
    saver = Saver({"net": nn.Linear(1, 1)}, step)
    run(step, [CheckpointSaverHook(tmp_path, save_steps=2, saver=saver)], 5)
    assert sorted(saved_steps(tmp_path)) == [0, 2, 4, 5]


def test_at_the_end_nothing_is_saved_twice(step, tmp_path):
    saver = Saver({"net": nn.Linear(1, 1)}, step)
    run(step, [CheckpointSaverHook(tmp_path, save_steps=2, saver=saver)], 4)
    assert sorted(saved_steps(tmp_path)) == [0, 2, 4]


def test_old_checkpoints_are_pruned(step, tmp_path):
    saver = Saver({"net": nn.Linear(1, 1)}, step)
    run(step, [CheckpointSaverHook(tmp_path, save_steps=1, saver=saver, keep=2)], 5)
    assert sorted(saved_steps(tmp_path)) == [4, 5]


def test_the_state_of_the_session_is_saved_where_no_other_is_given(step, tmp_path):
    net = nn.Linear(1, 1)
    with session_of(step, CheckpointSaverHook(tmp_path, save_secs=1000), state=Saver({"net": net}, step)) as session:
        session.run(train_op(step))
    _, tree = CheckpointDir(tmp_path).read_latest()
    assert tree["global_step"] == 1
    assert torch.equal(tree["variables"]["net/weight"], net.weight)


def test_a_saver_with_nothing_to_save_is_refused(step, tmp_path):
    with pytest.raises(ConfigError, match="nothing to save: pass saver=, or use a session of a Model"):
        session_of(step, CheckpointSaverHook(tmp_path, save_steps=1))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "give exactly one"),
        ({"save_secs": 1, "save_steps": 1}, "give exactly one"),
        ({"save_steps": 1, "scaffold": 1}, "scaffold=1.*saver="),
        ({"save_steps": 1, "listeners": [1]}, "listeners=.*write a SessionRunHook"),
    ],
)
def test_a_saver_says_which_arguments_it_cannot_take(tmp_path, arguments, text):
    with pytest.raises(ConfigError, match=text):
        CheckpointSaverHook(tmp_path, **arguments)


# SummarySaverHook


def scalars(directory):
    """What a directory of event files holds: {tag: [(step, value)]}."""
    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_summaries_are_written_every_so_many_steps(step, tmp_path):
    op = train_op(step, lambda: torch.tensor(step.value / 4))
    run(step, [SummarySaverHook(save_steps=2, output_dir=tmp_path, summary_op={"loss": op})], 5, op)
    assert scalars(tmp_path) == {"loss": [(1, 0.25), (3, 0.75), (5, 1.25)]}


def test_summaries_are_written_every_so_many_seconds(step, tmp_path, clock):
    def pass_time():
        clock.now += 1
        return 1.0

    op = train_op(step, pass_time)
    run(step, [SummarySaverHook(save_secs=3, output_dir=tmp_path, summary_op={"one": op})], 7, op)
    assert scalars(tmp_path) == {"one": [(1, 1.0), (5, 1.0)]}


def test_summaries_may_go_to_a_writer_of_ones_own(step):
    class Writer:
        def __init__(self):
            self.written = []

        def add_scalar(self, *args):
            self.written.append(args)

    writer, value = Writer(), plait.op(lambda: 2)
    run(step, [SummarySaverHook(save_steps=1, summary_writer=writer, summary_op={"two": value})], 2)
    assert writer.written == [("two", 2.0, 1), ("two", 2.0, 2)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"save_steps": 1}, "output_dir= or summary_writer="),
        ({"output_dir": "x"}, "give exactly one"),
        ({"save_steps": 1, "output_dir": "x", "scaffold": 1}, "scaffold=1.*summary_op="),
    ],
)
def test_summaries_must_know_where_and_when(arguments, text):
    with pytest.raises(ConfigError, match=text):
        SummarySaverHook(**arguments)


# NanTensorHook


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_fails(step, bad):
    op = train_op(step, lambda: torch.tensor(1.0 if step.value < 3 else bad))
    with pytest.raises(NanLossError, match=rf"train is {bad}: lower the learning rate"):
        run(step, [NanTensorHook(op)], 10, op)
    assert step.value == 3


def test_a_loss_that_is_no_number_stops_if_asked_to(step, lines):
    op = train_op(step, lambda: torch.tensor(1.0 if step.value < 3 else torch.nan))
    assert run(step, [NanTensorHook(op, fail_on_nan_loss=False)], 10, op) == 3
    assert lines() == ["train is nan: stopping"]


# FeedFnHook and FinalOpsHook


def test_a_function_feeds_every_run(step):
    x, values = plait.placeholder(name="x"), iter([1.0, 2.0])
    with session_of(step, FeedFnHook(lambda: {x: next(values)})) as session:
        assert [float(session.run(x)) for _ in range(2)] == [1.0, 2.0]


def test_final_ops_run_at_the_end(step):
    x = plait.placeholder(name="x")
    hook = FinalOpsHook({"x": x, "step": step}, {x: 7.0})
    assert hook.final_ops_values is None
    run(step, [hook], 3)
    assert hook.final_ops_values == {"x": 7.0, "step": 3}


def test_final_ops_do_not_run_after_a_failure(step):
    hook = FinalOpsHook(step)
    with pytest.raises(KeyError), session_of(step, hook):
        raise KeyError
    assert hook.final_ops_values is None


# GlobalStepWaiterHook


def test_a_worker_waits_until_another_has_brought_the_step(step):
    started = threading.Event()

    class Started(SessionRunHook):
        def before_run(self, run_context):
            started.set()

    def train_elsewhere():
        started.wait()
        for _ in range(5):
            step.increment()

    other = threading.Thread(target=train_elsewhere)
    other.start()
    with session_of(step, Started(), GlobalStepWaiterHook(5, timeout=5, interval=0.001)) as session:
        assert session.run(step) == 5
    other.join()


def test_a_worker_waits_only_once(step):
    step.value = 3
    with session_of(step, GlobalStepWaiterHook(3, timeout=0, interval=0)) as session:
        session.run(step)
        step.value = 0
        assert session.run(step) == 0


def test_a_worker_that_waits_in_vain_says_for_what(step, clock, lines):
    step.value = 2
    with (
        pytest.raises(UnavailableError, match=r"for global step 9 since 60 s, it is 2.*Lower wait_until_step"),
        session_of(step, GlobalStepWaiterHook(9, timeout=60)) as session,
    ):
        session.run(step)
    assert "waiting for global step 9 since 10 s, it is 2" in lines()
    assert clock.now < 1000 + 62  # the recoveries have not waited again


# ProfilerHook


def traces(directory):
    return sorted(int(re.sub(r"\D", "", path.name)) for path in directory.iterdir())


def test_a_profile_is_a_chrome_trace_of_every_so_many_steps(step, tmp_path):
    op = train_op(step, lambda: torch.ones(8, 8) @ torch.ones(8, 8))
    run(step, [ProfilerHook(save_steps=2, output_dir=tmp_path / "new")], 5, op)
    assert traces(tmp_path / "new") == [1, 3, 5]
    events = json.loads((tmp_path / "new" / "timeline-3.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert "aten::matmul" in names
    assert all("ph" in event for event in events)


def test_a_run_that_fails_leaves_no_profile_behind(step, tmp_path, monkeypatch):
    running = []

    class Profile(torch.profiler.profile):
        def start(self):
            assert not running
            running.append(self)
            super().start()

        def stop(self):
            running.remove(self)
            super().stop()

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    errors = [AbortedError("cut"), None, OutOfRangeError("over")]

    def fail():
        error = errors.pop(0)
        if error is not None:
            raise error

    with session_of(step, ProfilerHook(save_steps=1, output_dir=tmp_path)) as session:
        while not session.should_stop():
            session.run(train_op(step, fail))
    assert traces(tmp_path) == [2]
    assert not running


def test_every_name_of_the_module_is_there():
    assert module.__all__ == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
