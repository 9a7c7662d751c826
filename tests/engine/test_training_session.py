"""`MonitoredTrainingSession` with a Model and with a Saver: the usual hooks, resuming, recovering."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import plait
from plait import efl
from plait.data import Stream, TensorSource
from plait.engine.checkpoints import ModelState
from plait.engine.hooks import SessionRunHook
from plait.engine.op import GlobalStep
from plait.engine.ready_hooks import CheckpointSaverHook, StepCounterHook, StopAtStepHook, SummarySaverHook
from plait.engine.session import Session
from plait.engine.training_session import MonitoredTrainingSession, Saver
from plait.errors import AbortedError, CheckpointError, MismatchError
from plait.variables.checkpoint import CheckpointDir

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1))
STEPS = 10


def make_net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def make_source():
    return TensorSource({"x": X, "y": Y}, 4, shuffle=True)


class WithModel:
    """A program that trains a Model."""

    def __init__(self):
        self.model = efl.Model()
        self.net = self.model.net = make_net()
        self.model.input_fn(lambda model, mode: make_source())
        self.model.loss_fn(lambda model, sample: F.cross_entropy(model.net(sample.x), sample.y))
        adam = functools.partial(torch.optim.Adam, lr=0.01)
        self.model.optimizer_fn(efl.optimizer_fn.optimizer_setter(adam))
        self.model.compile(session_config={"device": "cpu"})
        self.step = self.model.global_step
        self.op = self.model.train_op()
        self.whose = {"model": self.model}


class WithSaver:
    """The same without a Model: bare PyTorch, saved by name."""

    def __init__(self):
        self.net = make_net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.stream = Stream(make_source())
        self.step = GlobalStep()
        self.op = plait.op(self.train)
        objects = {"net": self.net, "optimizer": self.optimizer, "data": self.stream}
        self.whose = {"saver": Saver(objects, self.step)}

    def train(self):
        self.optimizer.zero_grad()
        sample = self.batch()
        F.cross_entropy(self.net(sample.x), sample.y).backward()
        self.optimizer.step()
        self.stream.commit()
        self.step.increment()

    def batch(self):
        try:
            return self.stream.read()
        except plait.errors.OutOfRangeError:
            return self.stream.read()


def fail_once(program, at):
    """Make the run that brings step `at` fail, once, when it has trained and then spoilt the weights."""

    def fail(_):
        if program.step.value in failing:
            failing.clear()
            program.net[0].weight.detach().zero_()
            raise AbortedError("cut")

    failing = [at]
    program.op = plait.op(fail, program.op)
    return program


def train(program, directory=None, last=STEPS, hooks=(), **settings):
    """Train until a global step; several passes, as the document's loop would."""
    torch.manual_seed(3)
    if directory is not None:
        settings = {"save_checkpoint_steps": 3, "save_summaries_steps": None, "checkpoint_dir": directory} | settings
    hooks = [StopAtStepHook(last_step=last), *hooks]
    with MonitoredTrainingSession(hooks=hooks, log_step_count_steps=None, **settings, **program.whose) as session:
        while not session.should_stop():
            try:
                session.run(program.op)
            except plait.errors.OutOfRangeError:
                continue
    return program


def assert_same(program, other):
    assert program.step.value == other.step.value
    found, expected = program.net.state_dict(), other.net.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(params=[WithModel, WithSaver])
def make(request):
    return request.param


def test_both_programs_train_alike():
    assert_same(train(WithModel()), train(WithSaver()))
    assert not torch.equal(train(WithModel()).net[0].weight, make_net()[0].weight)


@pytest.mark.parametrize("stop", [1, 4, 6, 7])
def test_a_resumed_run_ends_with_the_same_bits(make, tmp_path, stop):
    whole = train(make())
    train(make(), tmp_path, last=stop)
    torch.manual_seed(99)
    resumed = train(make(), tmp_path)
    assert_same(resumed, whole)


def test_a_resumed_run_takes_up_the_last_checkpoint(make, tmp_path, caplog):
    train(make(), tmp_path, last=4)
    caplog.set_level("INFO", logger="plait")
    program = make()
    with MonitoredTrainingSession(checkpoint_dir=tmp_path, save_summaries_steps=None, **program.whose) as session:
        assert session.global_step.value == 4
    assert "going on at global step 4, from" in caplog.text


@pytest.mark.parametrize("at", [1, 4, 6, 9])
def test_a_recovery_takes_up_the_last_checkpoint_and_ends_with_the_same_bits(make, tmp_path, at, caplog):
    caplog.set_level("INFO", logger="plait")
    whole = train(make())
    recovered = train(fail_once(make(), at), tmp_path)
    assert "AbortedError: cut; making the session anew" in caplog.text
    assert f"going on at global step {(at - 1) // 3 * 3}, from" in caplog.text
    assert_same(recovered, whole)


def test_without_a_directory_nothing_is_saved(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(make(), last=2)
    assert list(tmp_path.iterdir()) == []


# The usual hooks


def hooks_of(**settings):
    program = WithModel()
    session = MonitoredTrainingSession(**program.whose, **settings)
    session.close()
    return [type(hook) for hook in session._hooks]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [StepCounterHook]),
        ({"log_step_count_steps": None}, []),
        ({"checkpoint_dir": "."}, [StepCounterHook, SummarySaverHook, CheckpointSaverHook]),
        ({"checkpoint_dir": ".", "is_chief": False}, [StepCounterHook]),
        ({"checkpoint_dir": ".", "save_summaries_steps": None}, [StepCounterHook, CheckpointSaverHook]),
        ({"checkpoint_dir": ".", "save_checkpoint_secs": None}, [StepCounterHook, SummarySaverHook]),
        ({"summary_dir": "."}, [StepCounterHook, SummarySaverHook]),
        (
            {"summary_dir": ".", "save_summaries_steps": None, "save_summaries_secs": 9},
            [StepCounterHook, SummarySaverHook],
        ),
    ],
    ids=str,
)
def test_the_usual_hooks_are_there(settings, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hooks_of(**settings) == expected


@pytest.mark.parametrize(("is_chief", "expected"), [(True, ["mine", "chief"]), (False, ["mine"])])
def test_hooks_of_the_chief_are_the_chiefs(is_chief, expected):
    said = []

    class Say(SessionRunHook):
        def __init__(self, word):
            self.word = word

        def begin(self):
            said.append(self.word)

    program = WithModel()
    MonitoredTrainingSession(
        is_chief=is_chief, hooks=[Say("mine")], chief_only_hooks=[Say("chief")], **program.whose
    ).close()
    assert said == expected


def test_summaries_hold_the_metrics_of_the_model(tmp_path):
    train(WithModel(), tmp_path, last=5, save_summaries_steps=2)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 3, 5]


def test_the_model_compiled_last_is_meant_where_none_is_given():
    program = WithModel()
    with MonitoredTrainingSession() as session:
        session.run(program.op)
        assert session.session.model is program.model
        assert session.global_step is program.step


def test_the_models_hooks_see_their_runs():
    class Count(SessionRunHook):
        runs = 0

        def after_run(self, run_context, run_values):
            self.runs += 1

    program, hook = WithModel(), Count()
    program.model.add_hooks([hook])
    train(program, last=3)
    assert hook.runs == 3


# What is wrong


def test_a_directory_with_nothing_to_restore_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nothing to restore: pass model= or saver="):
        MonitoredTrainingSession(checkpoint_dir=tmp_path, save_checkpoint_secs=None, save_summaries_steps=None)


@pytest.mark.parametrize(
    "objects",
    [{"other": nn.Linear(4, 8)}, {"net": nn.Linear(2, 2)}, {"more": torch.optim.SGD([torch.ones(1)])}],
    ids=["another name", "another shape", "an object more"],
)
def test_a_checkpoint_of_another_program_is_refused(tmp_path, objects):
    train(WithSaver(), tmp_path, last=1)
    with pytest.raises(MismatchError, match=r"belongs to another program.*choose another checkpoint_dir"):
        MonitoredTrainingSession(checkpoint_dir=tmp_path, save_summaries_steps=None, saver=Saver(objects))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train(WithModel(), tmp_path, last=1)
    other = WithModel()
    other.model.more = nn.Linear(1, 1)
    with pytest.raises(MismatchError, match=r"belongs to another model(.|\n)*more/weight: in the model only"):
        MonitoredTrainingSession(checkpoint_dir=tmp_path, save_summaries_steps=None, **other.whose)


# Saver


def test_a_saver_brings_everything_back():
    first, second = WithSaver(), WithSaver()
    train(first, last=4)
    torch.manual_seed(5)
    tree = first.whose["saver"].capture()
    drawn = torch.rand(3)
    second.whose["saver"].restore(tree)
    assert torch.equal(torch.rand(3), drawn)
    assert_same(first, second)
    assert second.stream.position == 4
    state, expected = second.optimizer.state_dict()["state"], first.optimizer.state_dict()["state"]
    assert list(state) == list(expected) == [0, 1, 2, 3]
    assert all(torch.equal(state[0][key], expected[0][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_a_checkpoint_of_a_saver_has_variables_by_name(tmp_path):
    program = train(WithSaver(), tmp_path, last=1)
    _, tree = CheckpointDir(tmp_path).read_latest()
    assert torch.equal(tree["variables"]["net/0/weight"], program.net[0].weight)


def test_a_session_of_a_model_knows_its_state():
    program = WithModel()
    with MonitoredTrainingSession(**program.whose) as session:
        assert isinstance(session.session, Session)
        assert isinstance(session.session.state, ModelState)
