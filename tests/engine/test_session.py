"""`Session.run`: fetches in any nesting, each Op at most once, feeds, plans."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.data import TensorSource
from plait.engine import session as module
from plait.engine.hooks import SessionRunHook
from plait.engine.op import Op
from plait.engine.session import Plan, Session
from plait.engine.task import MODE
from plait.errors import FetchError, OutOfRangeError

SYNCHRONISING = ["item", "tolist", "__float__", "__bool__", "__int__", "numpy"]


class Pair(NamedTuple):
    left: object
    right: object


def counted(calls, name, *inputs):
    """An Op that returns its name with its inputs' values, and counts its runs."""

    def fn(*values):
        calls[name] += 1
        return (name, *values) if values else name

    return plait.op(fn, *inputs, name=name)


def small_model(rows=8, batch=2, **source):
    model = efl.Model()
    torch.manual_seed(0)
    model.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1))
    model.input_fn(lambda model, mode: TensorSource({"x": x}, batch, **source))
    model.loss_fn(lambda model, sample: model.net(sample.x).square().mean())
    model.eval_fn(lambda model, sample: model.add_metric("size", model.net(sample.x).mean()))
    model.optimizer_fn(efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1)))
    return model.compile(session_config={"device": "cpu"})


# Fetches


@pytest.mark.parametrize(
    ("nest", "expected"),
    [
        (lambda a, b: a, "a"),
        (lambda a, b: [a, b], ["a", "b"]),
        (lambda a, b: (a, (b,), []), ("a", ("b",), [])),
        (lambda a, b: {"x": a, "y": {"z": [b, a]}}, {"x": "a", "y": {"z": ["b", "a"]}}),
        (lambda a, b: Pair(a, {"b": b}), Pair("a", {"b": "b"})),
        (lambda a, b: OrderedDict(b=b, a=a), {"b": "b", "a": "a"}),
        (lambda a, b: [None, a, {"none": None}], [None, "a", {"none": None}]),
        (lambda a, b: None, None),
        (lambda a, b: {}, {}),
    ],
    ids=["op", "list", "tuple", "dict", "namedtuple", "ordered dict", "None inside", "None", "empty"],
)
def test_results_have_the_nesting_of_the_fetches(nest, expected):
    calls = Counter()
    result = Session().run(nest(counted(calls, "a"), counted(calls, "b")))
    assert result == expected
    assert type(result) is type(expected)


def test_a_plain_callable_is_a_fetch():
    assert Session().run({"x": lambda: 3}) == {"x": 3}


def test_an_op_runs_at_most_once_a_run_however_often_it_is_needed():
    calls = Counter()
    root = counted(calls, "root")
    left, right = counted(calls, "left", root), counted(calls, "right", root)
    top = counted(calls, "top", left, right, root)
    result = Session().run({"top": top, "again": [top, root]})
    assert result["top"] == ("top", ("left", "root"), ("right", "root"), "root")
    assert result["again"] == [result["top"], "root"]
    assert calls == {"root": 1, "left": 1, "right": 1, "top": 1}


def test_what_comes_first_runs_first_and_its_value_goes_nowhere():
    order = []
    first = plait.op(lambda: order.append("first"))
    given = plait.op(lambda: order.append("input"))
    last = Op(lambda value: value, [given], first=[first])
    assert Session().run(last) is None
    assert order == ["first", "input"]


def test_an_op_runs_again_in_the_next_run():
    calls = Counter()
    session, op = Session(), counted(calls, "a")
    for _ in range(3):
        session.run(op)
    assert calls["a"] == 3


def test_what_nobody_needs_does_not_run():
    calls = Counter()
    used = counted(calls, "used")
    counted(calls, "unused", used)
    Session().run(used)
    assert calls == {"used": 1}


@pytest.mark.parametrize("fetch", [torch.ones(3), 5, "loss", {1, 2}], ids=["tensor", "int", "str", "set"])
@pytest.mark.parametrize("nest", [lambda f: f, lambda f: {"x": [f]}], ids=["bare", "nested"])
def test_a_fetch_that_is_no_op_is_refused(fetch, nest):
    with pytest.raises(FetchError, match=rf"an Op was expected, got {type(fetch).__name__}.*model\.loss\(\)"):
        Session().run(nest(fetch))


def test_a_tensor_as_a_fetch_is_told_why_it_has_no_value():
    with pytest.raises(FetchError, match="A tensor of one step has no value in the next"):
        Session().run(torch.ones(()))


def test_a_closed_session_runs_nothing():
    with Session() as session:
        assert session.run(lambda: 1) == 1
    with pytest.raises(FetchError, match=r"session is closed.*with plait\.Session\(\)"):
        session.run(lambda: 1)


# Feeds


def test_a_placeholder_gets_what_is_fed():
    x = plait.placeholder(torch.float32, [None], name="x")
    doubled = plait.op(lambda value: value * 2, x)
    session = Session()
    assert session.run(doubled, {x: [1, 2]}).tolist() == [2.0, 4.0]
    assert session.run([x, doubled], {x: torch.ones(1)}) == [torch.ones(1), torch.full((1,), 2.0)]


def test_a_fed_op_does_not_run_nor_do_its_inputs():
    calls = Counter()
    root = counted(calls, "root")
    middle = counted(calls, "middle", root)
    top = counted(calls, "top", middle)
    assert Session().run([top, middle], {middle: "fed"}) == [("top", "fed"), "fed"]
    assert calls == {"top": 1}


def test_an_input_of_a_fed_op_runs_if_another_needs_it():
    calls = Counter()
    root = counted(calls, "root")
    middle = counted(calls, "middle", root)
    top = counted(calls, "top", middle, root)
    assert Session().run(top, {middle: "fed"}) == ("top", "fed", "root")
    assert calls == {"top": 1, "root": 1}


def test_a_feed_lasts_for_one_run():
    x = plait.placeholder(name="x")
    session = Session()
    session.run(x, {x: 1.0})
    with pytest.raises(FetchError, match="'x' was not fed"):
        session.run(x)


def test_a_feed_that_nothing_needs_does_no_harm():
    assert Session().run(lambda: 1, {plait.placeholder(): 0.0}) == 1


@pytest.mark.parametrize("key", ["x", 3, torch.ones(1)], ids=["str", "int", "tensor"])
def test_a_key_that_is_no_op_is_refused(key):
    with pytest.raises(FetchError, match=rf"key of type {type(key).__name__}.*made with plait\.placeholder"):
        Session().run(lambda: 1, {key: 1})


def test_a_wrong_shape_is_refused_before_anything_runs():
    calls = Counter()
    x = plait.placeholder(torch.float32, [2], name="x")
    with pytest.raises(FetchError, match=r"'x' has shape \[2\], but was fed \[3\]"):
        Session().run([counted(calls, "a"), x], {x: [1, 2, 3]})
    assert not calls


# Values


def test_values_are_detached():
    weight = nn.Parameter(torch.ones(2))
    loss = plait.op(lambda: weight * 2)
    assert not Session().run(loss).requires_grad
    assert not Session().run({"loss": [loss]})["loss"][0].requires_grad


def test_values_of_a_training_run_are_detached():
    model = small_model()
    joined = plait.op(lambda loss, _: loss, model.loss(), model.train_op())
    session = Session(model)
    assert not session.run([model.loss(), model.train_op()])[0].requires_grad
    assert not session.run(joined).requires_grad


def test_a_models_run_that_does_not_train_records_nothing():
    model = small_model()
    loss = plait.op(lambda value: value.requires_grad, model.loss())
    session = Session(model)
    assert session.run(loss) is False
    assert session.run([loss, model.train_op()])[0] is True


def test_a_step_without_a_model_trains_by_itself():
    weight = nn.Parameter(torch.ones(2))

    def train():
        (weight * 2).sum().backward()

    Session().run(train)
    assert weight.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("with_loss", [False, True])
def test_a_step_synchronises_nothing(monkeypatch, with_loss):
    model = small_model(rows=40)
    session = plait.train.MonitoredSession(lambda: Session(model, model.global_step), scoped_hooks=model.hooks)
    fetches = [model.train_op(), model.loss()] if with_loss else model.train_op()
    session.run(fetches)
    _forbid(monkeypatch)
    for _ in range(5):
        session.run(fetches)
    monkeypatch.undo()
    assert model.global_step.value == 6


class _Guard(SessionRunHook):
    """No value may be read between the first step, which is logged, and the last but one."""

    def __init__(self, monkeypatch, steps):
        self.monkeypatch, self.steps, self.guarded, self.step = monkeypatch, steps, 0, 0

    def after_run(self, run_context, run_values):
        self.step += 1
        if self.step == 1:
            _forbid(self.monkeypatch)
        elif self.step == self.steps:
            self.monkeypatch.undo()
            self.guarded = self.step


def test_a_fit_synchronises_nothing_between_log_lines(monkeypatch):
    model = small_model(rows=40)
    model.add_hooks([guard := _Guard(monkeypatch, 19)])
    # The guard stands before the logger, so the first step's line is written under it: log nothing there.
    monkeypatch.setattr("plait.engine.report.LoggerHook._look", lambda self, step: None)
    model.fit(efl.procedure_fn.train(), log_step=1000)
    assert guard.guarded == 19


def _forbid(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a value was synchronised")

    for name in SYNCHRONISING:
        monkeypatch.setattr(torch.Tensor, name, refuse)


# Plans


@pytest.fixture
def plans(monkeypatch):
    """The fetches for which a plan was made."""
    made = []

    class Counting(Plan):
        def __init__(self, fetches, fed, cursors):
            made.append(fetches)
            super().__init__(fetches, fed, cursors)

    monkeypatch.setattr(module, "Plan", Counting)
    return made


@pytest.mark.parametrize(
    "fetches",
    [
        lambda a, b: a,
        lambda a, b: [a, b],
        lambda a, b: {"a": a, "b": (b, None)},
        Pair,
        lambda a, b: named_function,
        lambda a, b: {"fn": named_function},
    ],
    ids=["op", "list", "dict", "namedtuple", "callable", "callable inside"],
)
def test_a_plan_is_made_once_for_equal_fetches(plans, fetches):
    calls = Counter()
    a, b = counted(calls, "a"), counted(calls, "b")
    session = Session()
    results = [session.run(fetches(a, b)) for _ in range(4)]
    assert len(plans) == 1
    assert results[0] == results[3]


def named_function():
    return 5


def test_another_nesting_of_the_same_ops_has_a_plan_of_its_own(plans):
    calls = Counter()
    a, b = counted(calls, "a"), counted(calls, "b")
    session = Session()
    assert session.run([a, b]) == ["a", "b"]
    assert session.run((a, b)) == ("a", "b")
    assert session.run({"a": a, "b": b}) == {"a": "a", "b": "b"}
    assert session.run({"b": a, "a": b}) == {"b": "a", "a": "b"}
    assert session.run(Pair(a, b)) == Pair("a", "b")
    assert len(plans) == 5


def test_another_set_of_fed_ops_has_a_plan_of_its_own(plans):
    calls = Counter()
    a = counted(calls, "a")
    b = counted(calls, "b", a)
    session = Session()
    for value in (1, 2):
        assert session.run(b, {a: value}) == ("b", value)
    assert session.run(b) == ("b", "a")
    assert session.run(b, {b: 3}) == 3
    assert len(plans) == 3


# Inputs and modes


def test_a_run_reads_one_batch_and_a_failed_one_gives_it_back():
    model = small_model(rows=6)
    batches = []
    fails = [True]

    def look(sample):
        batches.append(sample.x.clone())
        if fails.pop():
            raise RuntimeError("once")

    look_op = plait.op(look, model.input())
    session = Session(model)
    with pytest.raises(RuntimeError, match="once"):
        session.run(look_op)
    fails[:] = [False] * 3
    for _ in range(3):
        session.run(look_op)
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[1], batches[2])
    with pytest.raises(OutOfRangeError, match="pass 0 is over after 3 batches"):
        session.run(look_op)


def test_a_fed_input_is_not_read():
    model = small_model()
    fed, seen = {"x": torch.ones(1, 3)}, plait.op(lambda sample: sample, model.input())
    session = Session(model)
    assert session.run(seen, {model.input().op: fed}) is fed
    assert model.streams[MODE.TRAIN, None].position == 0
    assert session.run(seen).x.shape == (2, 3)
    assert model.streams[MODE.TRAIN, None].position == 1


def test_an_input_is_a_fetch():
    model = small_model()
    fetched = Session(model).run(model.input())
    assert fetched.x.shape == (2, 3)


def test_a_training_run_trains_and_another_evaluates():
    model = small_model()
    seen = []
    model.add_train_op(lambda: seen.append((model.training_flag, model.net.training)))
    model.add_eval_op(lambda: seen.append((model.training_flag, model.net.training)))
    session = Session(model)
    for fetch in (model.train_op(), model.eval_op(), model.train_op()):
        session.run(fetch)
    assert seen == [(True, True), (False, False), (True, True)]


def test_modules_come_back_from_evaluation_as_they_were():
    model = small_model()
    session = Session(model)
    session.run(model.train_op())
    model.net[1].eval()  # frozen by the user
    session.run(model.eval_op())
    session.run(model.train_op())
    assert [part.training for part in model.net] == [True, False, True]


def test_a_closed_session_leaves_the_modules_as_they_were():
    model = small_model()
    model.net[1].eval()
    with Session(model) as session:
        session.run(model.eval_op())
        assert not model.net[0].training
    assert [part.training for part in model.net] == [True, False, True]
    assert model.training_flag is False
