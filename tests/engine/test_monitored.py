"""`MonitoredSession`: the order of hooks, recovery, stopping, what hooks ask for and see."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.data import TensorSource
from plait.engine import monitored
from plait.engine.hooks import SessionRunArgs, SessionRunHook
from plait.engine.monitored import MonitoredSession
from plait.engine.session import Session
from plait.engine.task import MODE
from plait.errors import AbortedError, FetchError, OutOfRangeError, UnavailableError


class Recorder(SessionRunHook):
    """Writes down its name and method whenever it is called."""

    def __init__(self, said, name="hook"):
        self.said, self.name = said, name
        self.say("__init__")

    def say(self, what):
        self.said.append(f"{self.name}.{what}" if self.name else what)

    def begin(self):
        self.say("begin")

    def after_create_session(self, session, coord):
        self.say("after_create_session")

    def before_run(self, run_context):
        self.say("before_run")

    def after_run(self, run_context, run_values):
        self.say("after_run")

    def end(self, session):
        self.say("end")


class Asking(SessionRunHook):
    """Asks for fetches and feeds, and keeps the results."""

    def __init__(self, fetches=None, feed_dict=None):
        self.args = SessionRunArgs(fetches, feed_dict)
        self.results = []

    def before_run(self, run_context):
        return self.args

    def after_run(self, run_context, run_values):
        self.results.append(run_values.results)


class LoudSession(Session):
    """Says when it is made, runs and is closed."""

    def __init__(self, said):
        super().__init__()
        self.said = said
        said.append("create")

    def run(self, fetches, feed_dict=None):
        self.said.append("run")
        return super().run(fetches, feed_dict)

    def close(self):
        self.said.append("close")
        super().close()


def numbers(*, ends_with=OutOfRangeError, count=2):
    """An Op that gives `count` numbers, then raises."""
    values = iter(range(count))

    def fn():
        try:
            return next(values)
        except StopIteration:
            raise ends_with("no more") from None

    return plait.op(fn)


def failing(errors):
    """An Op that raises the errors in turn, then works."""

    def fn():
        if errors:
            raise errors.pop(0)
        return "done"

    return plait.op(fn)


# The order


@pytest.mark.parametrize("ends_with", [OutOfRangeError, StopIteration])
def test_the_hooks_live_in_the_documented_order(ends_with):
    said = []
    hook = Recorder(said, "")
    assert said == ["__init__"]
    op = numbers(ends_with=ends_with)
    with MonitoredSession(lambda: LoudSession(said), [hook]) as session:
        while not session.should_stop():
            session.run(op)
    assert said == [
        "__init__",
        "begin",
        "create",
        "after_create_session",
        *["before_run", "run", "after_run"] * 2,
        "before_run",
        "run",
        "end",
        "close",
    ]


def test_two_hooks_are_called_in_the_order_given():
    said = []
    hooks = [Recorder(said, "a"), Recorder(said, "b")]
    with MonitoredSession(lambda: LoudSession(said), hooks) as session:
        session.run(lambda: 1)
    assert said == [
        *["a.__init__", "b.__init__", "a.begin", "b.begin", "create"],
        *["a.after_create_session", "b.after_create_session"],
        *["a.before_run", "b.before_run", "run", "a.after_run", "b.after_run"],
        *["a.end", "b.end", "close"],
    ]


def test_close_ends_and_only_once():
    said = []
    session = MonitoredSession(hooks=[Recorder(said, "")])
    session.run(lambda: 1)
    session.close()
    session.close()
    assert said.count("end") == 1
    assert session.should_stop()


def test_a_closed_session_runs_nothing():
    with MonitoredSession() as session:
        pass
    with pytest.raises(FetchError, match=r"session is closed.*with MonitoredSession"):
        session.run(lambda: 1)


def test_an_ordinary_exception_ends_nothing_and_is_raised():
    said = []
    with (
        pytest.raises(KeyError, match="mine"),
        MonitoredSession(lambda: LoudSession(said), [Recorder(said, "")]) as session,
    ):
        session.run(failing([KeyError("mine")]))
    assert said[-3:] == ["before_run", "run", "close"]


def test_an_exception_between_runs_ends_nothing_either():
    said = []
    with pytest.raises(KeyError), MonitoredSession(hooks=[Recorder(said, "")]):
        raise KeyError
    assert "end" not in said


def test_hooks_can_run_ops_when_the_session_is_created_and_ends():
    values = []

    class Running(SessionRunHook):
        def after_create_session(self, session, coord):
            values.append(session.run(plait.op(lambda: "created")))

        def end(self, session):
            values.append(session.run(plait.op(lambda: "ended")))

    with MonitoredSession(hooks=[Running()]):
        pass
    assert values == ["created", "ended"]


def test_hooks_that_override_nothing_are_never_called(monkeypatch):
    def refuse(*args):
        raise AssertionError("called")

    class Quiet(SessionRunHook):
        pass

    monkeypatch.setattr(SessionRunHook, "before_run", refuse)
    monkeypatch.setattr(SessionRunHook, "after_run", refuse)
    with MonitoredSession(hooks=[Quiet()]) as session:
        assert session.run(lambda: 1) == 1


# Stopping


def test_a_hook_stops_the_loop_after_its_run():
    class Stop(SessionRunHook):
        def after_run(self, run_context, run_values):
            run_context.request_stop()

    said = []
    with MonitoredSession(hooks=[Stop(), Recorder(said, "")]) as session:
        assert not session.should_stop()
        assert session.run(lambda: "whole") == "whole"
        assert session.should_stop()
    assert said[-2:] == ["after_run", "end"]


def test_a_stop_asked_for_before_the_run_lets_the_run_happen():
    class Stop(SessionRunHook):
        def before_run(self, run_context):
            run_context.request_stop()

    with MonitoredSession(hooks=[Stop()]) as session:
        assert session.run(lambda: 1) == 1
        assert session.should_stop()


def test_the_caller_may_stop_too():
    with MonitoredSession() as session:
        session.request_stop()
        assert session.should_stop()


# Recovery


@pytest.mark.parametrize("error", [AbortedError("cut"), UnavailableError("gone")], ids=lambda e: type(e).__name__)
def test_a_recoverable_error_makes_the_session_anew_and_repeats_the_run(error, caplog):
    said = []
    with MonitoredSession(lambda: LoudSession(said), [Recorder(said, "a"), Recorder(said, "b")]) as session:
        del said[:]
        assert session.run(failing([error])) == "done"
    assert said == [
        *["a.before_run", "b.before_run", "run", "create"],
        *["a.after_create_session", "b.after_create_session"],
        *["a.before_run", "b.before_run", "run", "a.after_run", "b.after_run"],
        *["a.end", "b.end", "close"],
    ]
    assert f"{type(error).__name__}: {error}" in caplog.text


def test_an_error_while_the_session_is_made_anew_counts_as_another_try():
    errors = [UnavailableError("still gone")]

    def create():
        if made and errors:
            raise errors.pop()
        made.append(1)
        return Session()

    made = []
    with MonitoredSession(create) as session:
        assert session.run(failing([AbortedError("cut")])) == "done"
    assert len(made) == 2


def test_recoveries_are_bounded():
    said, tries = [], []

    def fn():
        tries.append(1)
        raise AbortedError("always")

    with pytest.raises(AbortedError, match="always"), MonitoredSession(hooks=[Recorder(said, "")]) as session:
        session.run(plait.op(fn))
    assert len(tries) == 1 + monitored.MAX_RECOVERIES
    assert said.count("after_create_session") == 1 + monitored.MAX_RECOVERIES
    assert said.count("begin") == 1
    assert "end" not in said


def test_recovery_can_be_left_to_somebody_else():
    session = MonitoredSession(recover=False)
    with pytest.raises(AbortedError):
        session.run(failing([AbortedError("cut")]))


def test_a_session_can_be_made_anew_by_hand_and_goes_on():
    said = []
    with MonitoredSession(hooks=[Recorder(said, "")]) as session:
        first = session.session
        session.request_stop()
        session.recreate()
        assert session.session is not first
        assert not session.should_stop()
    assert said == ["__init__", "begin", "after_create_session", "after_create_session", "end"]


def test_a_recovery_loses_no_batch_and_reads_none_twice():
    model, seen = small_model(rows=8), []
    errors = [None, AbortedError("cut"), None, UnavailableError("gone"), AbortedError("cut")]

    def look(sample):
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error
        seen.extend(sample.x[:, 0].tolist())

    model.add_train_op(plait.op(look, model.input()))
    with open_session(model) as session:
        while not session.should_stop():
            session.run(model.train_op())
    assert seen == X[:8, 0].tolist()


# What hooks ask for


def test_a_hook_gets_what_it_asked_for_in_its_own_nesting():
    a, b = plait.op(lambda: "a"), plait.op(lambda: "b")
    dict_hook, list_hook, op_hook, none_hook = Asking({"x": [a, None]}), Asking((b, a)), Asking(b), Asking(None)
    with MonitoredSession(hooks=[dict_hook, list_hook, op_hook, none_hook]) as session:
        assert session.run({"mine": a}) == {"mine": "a"}
    assert dict_hook.results == [{"x": ["a", None]}]
    assert list_hook.results == [("b", "a")]
    assert op_hook.results == ["b"]
    assert none_hook.results == [None]


def test_a_hook_that_asks_for_nothing_gets_nothing():
    class Looking(SessionRunHook):
        def after_run(self, run_context, run_values):
            seen.append(run_values.results)

    seen = []
    with MonitoredSession(hooks=[Looking(), Asking(plait.op(lambda: 1))]) as session:
        session.run(lambda: 2)
    assert seen == [None]


def test_what_caller_and_hooks_share_runs_once():
    calls = []
    shared = plait.op(lambda: calls.append(1))
    with MonitoredSession(hooks=[Asking(shared), Asking([shared])]) as session:
        session.run(shared)
    assert len(calls) == 1


def test_hooks_feed_what_the_caller_does_not():
    x, y = plait.placeholder(name="x"), plait.placeholder(name="y")
    total = plait.op(lambda a, b: a + b, x, y)
    with MonitoredSession(hooks=[Asking(None, {x: 1.0})]) as session:
        assert session.run(total, {y: 2.0}) == 3.0


@pytest.mark.parametrize("by_caller", [True, False])
def test_what_is_fed_twice_is_refused(by_caller):
    x = plait.placeholder(name="x")
    hooks = [Asking(None, {x: 1.0})] if by_caller else [Asking(None, {x: 1.0}), Asking(None, {x: 1.0})]
    with MonitoredSession(hooks=hooks) as session, pytest.raises(FetchError, match="'x'.* is fed twice.*Asking.*once"):
        session.run(x, {x: 2.0} if by_caller else None)


def test_a_hooks_context_shows_the_callers_arguments_and_the_session():
    x, seen = plait.placeholder(name="x"), []

    class Looking(SessionRunHook):
        def before_run(self, run_context):
            seen.append((run_context.original_args, run_context.session))

    with MonitoredSession(hooks=[Looking(), Asking(plait.op(lambda: 1))]) as session:
        session.run([x], {x: 1.0})
        assert seen == [(SessionRunArgs([x], {x: 1.0}), session.session)]


def test_a_step_function_runs_with_and_without_hooks():
    said = []

    def step(context):
        quiet = context.session.run(plait.op(lambda: 1))
        loud = context.run_with_hooks(plait.op(lambda: 2))
        context.request_stop()
        return quiet + loud

    with MonitoredSession(hooks=[Recorder(said, "")]) as session:
        assert session.run_step_fn(step) == 3
        assert session.should_stop()
    assert said.count("before_run") == 1


# Hooks of tasks

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


def small_model(tasks=(None,), rows=12):
    model = efl.Model()
    torch.manual_seed(0)
    model.net = nn.Linear(3, 1)
    for task in tasks:
        model.input_fn(lambda model, mode: TensorSource({"x": X[:rows]}, 2, num_epochs=1), task)
        model.loss_fn(lambda model, sample: model.net(sample.x).square().mean(), task)
        model.eval_fn(lambda model, sample: model.add_metric("out", model.net(sample.x).mean()), task)
        sgd = efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1))
        model.optimizer_fn(sgd, task)
    return model.compile(session_config={"device": "cpu"})


def open_session(model, hooks=()):
    return MonitoredSession(lambda: Session(model, model.global_step), hooks, scoped_hooks=model.hooks)


def test_hooks_of_a_task_see_only_the_runs_of_their_task_and_mode():
    model, said = small_model(["a", "b"]), []
    for task in ("a", "b"):
        for mode in (MODE.TRAIN, MODE.EVAL):
            model.add_hooks([Recorder(said, f"{task} {mode}")], mode, task)
    with open_session(model, [Recorder(said, "all")]) as session:
        seen = []
        for fetch in (model.train_op("a"), model.eval_op("a"), model.train_op("b"), model.eval_op("b"), lambda: None):
            del said[:]
            session.run(fetch)
            seen.append([what for what in said if "before_run" in what])
        del said[:]
        session.run([model.train_op("a"), model.train_op("b")])
        both = list(said)
    runs = ["a TRAIN", "a EVAL", "b TRAIN", "b EVAL"]
    assert seen == [*(["all.before_run", f"{name}.before_run"] for name in runs), ["all.before_run"]]
    assert both == [
        *["all.before_run", "a TRAIN.before_run", "b TRAIN.before_run"],
        *["all.after_run", "a TRAIN.after_run", "b TRAIN.after_run"],
    ]
    assert said[-5:] == ["all.end", *(f"{name}.end" for name in runs)]


def test_every_hook_begins_whatever_its_scope():
    model, said = small_model(), []
    model.add_hooks([Recorder(said, "eval")], MODE.EVAL)
    with open_session(model):
        pass
    assert said == ["eval.__init__", "eval.begin", "eval.after_create_session", "eval.end"]


def test_in_a_fit_hooks_of_the_fit_see_everything_and_those_of_a_task_its_runs():
    model, said = small_model(), []
    model.add_hooks([Recorder(said, "train")], MODE.TRAIN)
    model.add_hooks([Recorder(said, "eval")], MODE.EVAL)
    model.fit(efl.procedure_fn.train_and_eval(train_step=2, eval_step=1, max_iter=1), hooks=[Recorder(said, "all")])
    runs = [what.partition(".")[0] for what in said if what.endswith("after_run")]
    assert runs == ["all", "train", "all", "train", "all", "eval"]
