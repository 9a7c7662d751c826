"""User functions: placeholders and hooks that they make, at the build and at each step."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.data import TensorSource
from plait.engine.calls import current_call, feeds_of_this_run
from plait.engine.hooks import SessionRunArgs, SessionRunHook
from plait.engine.monitored import MonitoredSession
from plait.engine.session import Session
from plait.engine.task import MODE, current_task_scope
from plait.errors import AbortedError, FetchError, FunctionError, TaskError

X = torch.arange(12.0).reshape(12, 1)


def model_of(loss_fn, **source):
    model = efl.Model()
    model.net = nn.Linear(1, 1)
    model.input_fn(lambda model, mode: TensorSource({"x": X}, 2, **source))
    model.loss_fn(loss_fn)
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.0)))
    return model.compile(session_config={"device": "cpu"})


def session_of(model, hooks=()):
    return MonitoredSession(lambda: Session(model, model.global_step), hooks, scoped_hooks=model.hooks)


def train(model, steps, hooks=()):
    with session_of(model, hooks) as session:
        for _ in range(steps):
            session.run(model.train_op())


class Feeding(SessionRunHook):
    """Feeds a placeholder the numbers of the steps, from `first` on."""

    def __init__(self, placeholder, first=0.0):
        self.placeholder, self.value = placeholder, first

    def before_run(self, run_context):
        self.value += 1
        return SessionRunArgs(None, {self.placeholder: self.value})


class Monitoring(SessionRunHook):
    """Keeps a step's tensor; counts its runs."""

    def __init__(self, loss):
        self.info = {"loss": loss}
        self.runs = 0
        self.seen = []

    def after_run(self, run_context, run_values):
        self.runs += 1
        self.seen.append(float(self.info["loss"]))


# Where a function runs


def test_a_function_runs_in_its_scope_and_knows_its_call():
    seen = []

    def loss_fn(model, sample):
        seen.append((current_task_scope(), current_call().building, model.training_flag))
        return model.net(sample.x).mean()

    model = model_of(loss_fn)
    train(model, 1)
    assert seen == [((MODE.TRAIN, None), True, True), ((MODE.TRAIN, None), False, True)]
    assert current_call() is None


def test_after_an_exception_no_call_is_left():
    def loss_fn(model, sample):
        if not current_call().building:
            raise KeyError("mine")
        return model.net(sample.x).mean()

    model = model_of(loss_fn)
    with pytest.raises(KeyError, match="mine"):
        train(model, 1)
    assert current_call() is None
    assert current_task_scope() == (None, None)


# Placeholders


def test_a_placeholder_of_a_function_is_fed_by_a_hook_that_the_function_makes():
    seen = []

    def loss_fn(model, sample):
        rate = plait.placeholder(torch.float32, [], name="rate")
        model.add_hooks([Feeding(rate)])
        seen.append(float(rate))
        return model.net(sample.x).mean() * rate

    train(model_of(loss_fn), 4)
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_nth_placeholder_of_a_call_is_the_nth_of_the_build():
    seen = []

    def loss_fn(model, sample):
        made = [plait.placeholder(torch.float32, [], name="p") for _ in range(3)]
        model.add_hooks([Feeding(one, first) for one, first in zip(made, (100.0, 200.0, 300.0), strict=True)])
        seen.append([float(one) for one in made])
        return model.net(sample.x).mean()

    train(model_of(loss_fn), 2)
    assert seen == [[0, 0, 0], [101, 201, 301], [102, 202, 302]]


def test_one_tensor_may_be_fed_to_two_placeholders():
    shared, seen = torch.tensor(5.0), []

    class Both(SessionRunHook):
        def __init__(self, *placeholders):
            self.placeholders = placeholders

        def before_run(self, run_context):
            return SessionRunArgs(None, dict.fromkeys(self.placeholders, shared))

    def loss_fn(model, sample):
        a, b = plait.placeholder(shape=[]), plait.placeholder(shape=[])
        model.add_hooks([Both(a, b)])
        seen.append((float(a), float(b)))
        return model.net(sample.x).mean()

    train(model_of(loss_fn), 3)
    assert seen == [(0, 0), (5, 5), (5, 5), (5, 5)]


def test_at_the_build_a_placeholder_is_zeros_of_its_shape():
    seen = []

    def loss_fn(model, sample):
        ids = plait.placeholder(torch.int64, [None, 3])
        model.add_hooks([plait.train.FeedFnHook(lambda: {ids: torch.ones(2, 3)})])
        seen.append(ids)
        return model.net(sample.x).mean()

    train(model_of(loss_fn), 1)
    assert torch.equal(seen[0], torch.zeros(1, 3, dtype=torch.int64))
    assert torch.equal(seen[1], torch.ones(2, 3, dtype=torch.int64))


def test_a_wrong_shape_names_the_placeholder():
    def loss_fn(model, sample):
        ids = plait.placeholder(torch.int64, [3], name="ids")
        model.add_hooks([plait.train.FeedFnHook(lambda: {ids: torch.ones(2)})])
        return model.net(sample.x).mean()

    with pytest.raises(FetchError, match=r"'ids' has shape \[3\], but was fed \[2\]"):
        train(model_of(loss_fn), 1)


def test_a_placeholder_that_nothing_could_feed_is_refused_at_the_build():
    def loss_fn(model, sample):
        return model.net(sample.x).mean() * plait.placeholder()

    with pytest.raises(TaskError, match=r"makes 1 placeholder\(s\) that nothing feeds: add a hook.*SessionRunArgs"):
        model_of(loss_fn)


def test_a_placeholder_that_a_run_does_not_feed_is_refused():
    def loss_fn(model, sample):
        rate = plait.placeholder(name="rate")
        model.add_hooks([SessionRunHook()])
        return model.net(sample.x).mean() * rate

    with pytest.raises(FetchError, match=r"'rate' was not fed: pass feed_dict"):
        train(model_of(loss_fn), 1)


def test_a_placeholder_more_than_at_the_build_is_refused():
    def loss_fn(model, sample):
        rate = plait.placeholder(name="rate")
        model.add_hooks([Feeding(rate)])
        if not current_call().building:
            plait.placeholder()
        return model.net(sample.x).mean()

    with pytest.raises(FunctionError, match=r"made 2 placeholders in this step but 1 at the build: make the same"):
        train(model_of(loss_fn), 1)


def test_the_same_placeholder_fed_twice_is_refused_however_it_is_named():
    def loss_fn(model, sample):
        rate = plait.placeholder(name="rate")
        model.add_hooks([Feeding(rate)])
        return model.net(sample.x).mean() * rate

    model = model_of(loss_fn)
    (behind,) = next(iter(model.calls.values())).placeholders
    with session_of(model) as session, pytest.raises(FetchError, match="'rate'.* is fed twice"):
        session.run(model.train_op(), {behind: 3.0})


def test_feeds_are_put_back_after_a_run():
    x = plait.placeholder()
    before = feeds_of_this_run({})
    Session().run(x, {x: 1.0})
    assert feeds_of_this_run(before) == {}


# Hooks


def test_the_hook_of_the_build_lives_on_and_gets_each_steps_tensors():
    made = []

    def loss_fn(model, sample):
        loss = model.net(sample.x).mean() * 0 + sample.x.sum()
        made.append(Monitoring(loss.detach()))
        model.add_hooks([made[-1]])
        return loss

    model = model_of(loss_fn)
    train(model, 3)
    assert [hook for hooks in model.hooks.values() for hook in hooks] == [made[0]]
    assert len(made) == 4
    assert made[0].runs == 3
    assert made[0].seen == [1.0, 5.0, 9.0]
    assert [hook.runs for hook in made[1:]] == [0, 0, 0]


def test_hooks_of_one_class_are_paired_in_order():
    def loss_fn(model, sample):
        loss = model.net(sample.x).mean()
        hooks = [Monitoring(sample.x[0]), Monitoring(sample.x[1])]
        model.add_hooks(hooks[:1])
        model.add_hooks(hooks[1:])
        return loss

    model = model_of(loss_fn)
    train(model, 2)
    (hooks,) = model.hooks.values()
    assert [hook.seen for hook in hooks] == [[0.0, 2.0], [1.0, 3.0]]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_hooks_than_at_the_build_is_refused(count):
    def loss_fn(model, sample):
        loss = model.net(sample.x).mean()
        model.add_hooks([Monitoring(loss.detach()) for _ in range(2 if current_call().building else count)])
        return loss

    with pytest.raises(FunctionError, match=r"made the hooks \[.*\] in this step but .* at the build: make the same"):
        train(model_of(loss_fn), 1)


def test_a_hook_that_was_not_there_at_the_build_is_refused():
    def loss_fn(model, sample):
        if not current_call().building:
            model.add_hooks([SessionRunHook()])
        return model.net(sample.x).mean()

    with pytest.raises(FunctionError, match=r"made the hooks \['SessionRunHook'\] in this step but \[\] at the build"):
        train(model_of(loss_fn), 1)


def test_a_function_that_makes_no_hooks_any_more_is_refused():
    def loss_fn(model, sample):
        loss = model.net(sample.x).mean()
        if current_call().building:
            model.add_hooks([Monitoring(loss.detach())])
        return loss

    with pytest.raises(FunctionError, match=r"made the hooks \[\] in this step but \['Monitoring'\] at the build"):
        train(model_of(loss_fn), 1)


def test_a_step_that_failed_half_way_is_repeated_with_the_same_hooks():
    errors = [AbortedError("cut")]

    def loss_fn(model, sample):
        loss = model.net(sample.x).mean()
        model.add_hooks([Monitoring(loss.detach())])
        if errors and not current_call().building:
            raise errors.pop()
        return loss

    model = model_of(loss_fn)
    train(model, 3)
    assert model.global_step.value == 3


def test_what_is_no_hook_is_refused():
    with pytest.raises(FunctionError, match=r"got a str: derive it from plait\.train\.SessionRunHook"):
        efl.Model().add_hooks(["hook"])


def test_a_logging_hook_made_in_a_function_shows_the_steps_values(caplog):
    def loss_fn(model, sample):
        loss = model.net(sample.x).mean() * 0 + sample.x.sum()
        model.add_hooks([plait.train.LoggingTensorHook({"total": loss.detach()}, every_n_iter=1)])
        return loss

    with caplog.at_level("INFO", logger="plait"):
        train(model_of(loss_fn), 3)
    shown = [record.getMessage().split(" (")[0] for record in caplog.records]
    assert shown == ["total = 1", "total = 5", "total = 9"]
