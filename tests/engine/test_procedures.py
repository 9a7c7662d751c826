"""How many steps and evaluations each procedure makes, and when it ends."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import Counter

import pytest
import torch
from torch import nn

import plait
from plait import efl
from plait.efl import MODE
from plait.efl.procedure_fn import cotrain, train, train_and_eval, train_and_evaluate
from plait.errors import ConfigError, StageError, TaskError
from plait.train import StopAtStepHook

SETTER = efl.optimizer_fn.optimizer_setter(functools.partial(torch.optim.SGD, lr=0.1))
BATCHES = 4


class Recorder:
    """A model whose `calls` say, for each step, T or E and the number of its batch."""

    def __init__(self, *, batches=BATCHES, num_epochs=None, tasks=(None,), evaluates=True, eval_epochs=None):
        self.calls, self.building = [], True
        self.model = efl.Model()
        for task in tasks:
            self._add(task, batches if isinstance(batches, int) else batches[task], num_epochs, eval_epochs, evaluates)
        self.model.compile()
        self.building = False

    def _add(self, task, batches, num_epochs, eval_epochs, evaluates):
        x = torch.arange(float(batches)).reshape(-1, 1)

        def source(model, mode):
            return plait.data.TensorSource({"x": x}, 1, num_epochs=num_epochs if mode is MODE.TRAIN else eval_epochs)

        def loss_fn(model, sample):
            self._note("T", task, sample)
            with plait.variable_scope("all", reuse=plait.AUTO_REUSE):
                return plait.layer("fc", nn.Linear, 1, 1)(sample.x).mean()

        def eval_fn(model, sample):
            self._note("E", task, sample)
            model.add_metric("seen", efl.metrics.mean(sample.x))

        self.model.input_fn(source, task=task).loss_fn(loss_fn, task=task).optimizer_fn(SETTER, task=task)
        if evaluates:
            self.model.eval_fn(eval_fn, task=task)

    def _note(self, what, task, sample):
        if not self.building:
            self.calls.append(f"{what}{'' if task is None else task + ':'}{int(sample.x[0, 0])}")

    def fit(self, procedure, **kwargs):
        self.model.fit(procedure, **kwargs)
        return " ".join(self.calls)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("procedure", "num_epochs", "expected"),
    [
        (train(), None, "T0 T1 T2 T3"),
        (train(3), None, "T0 T1 T2"),
        (train(max_step=9), None, "T0 T1 T2 T3"),
        (train(), 2, "T0 T1 T2 T3 T0 T1 T2 T3"),
        (train(max_step=6), 2, "T0 T1 T2 T3 T0 T1"),
        (train(max_step=60), 2, "T0 T1 T2 T3 T0 T1 T2 T3"),
    ],
)
def test_train_ends_at_its_steps_or_with_the_data(procedure, num_epochs, expected):
    recorder = Recorder(num_epochs=num_epochs)
    assert recorder.fit(procedure) == expected
    assert int(recorder.model.global_step) == len(expected.split())


@pytest.mark.parametrize(("max_step", "warned"), [(9, True), (BATCHES, False), (2, False), (None, False)])
def test_train_that_ends_with_the_data_before_its_last_step_warns(caplog, max_step, warned):
    Recorder().fit(train(max_step))
    words = f"training ended at step 4 of max_step={max_step}, with the data: give its source num_epochs= "
    assert [message.startswith(words) for message in warnings_in(caplog)] == [True] * warned


def test_train_that_a_hook_stops_does_not_blame_the_data(caplog, tmp_path):
    for _ in range(2):  # the second time, the stage is skipped
        Recorder().fit(train(3), hooks=[StopAtStepHook(num_steps=2)], checkpoint_dir=str(tmp_path))
    assert not [message for message in warnings_in(caplog) if "with the data" in message]


def test_an_evaluation_ends_with_a_line_of_its_task_and_metrics(caplog):
    caplog.set_level(logging.INFO, "plait")
    Recorder(batches=3, tasks=["click"]).fit(train_and_eval(train_step=2, eval_step=2, max_iter=2))
    assert [message for message in caplog.messages if "batches:" in message] == [
        "[click eval] global step 2, 2 batches: seen 0.5000",
        "[click eval] global step 3, 1 batches: seen 2.0000",
    ]


@pytest.mark.parametrize(("max_step", "expected"), [(None, "E0 E1 E2 E3"), (2, "E0 E1"), (9, "E0 E1 E2 E3")])
def test_eval_ends_at_its_steps_or_with_the_data(max_step, expected):
    recorder = Recorder()
    assert recorder.fit(efl.procedure_fn.eval(max_step)) == expected
    assert int(recorder.model.global_step) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_iter": 1}, "T0 T1 T2 E0 E1 E2"),
        ({"max_iter": 2}, "T0 T1 T2 E0 E1 E2 T0 T1 T2 E0 E1 E2"),
        ({"train_step": 2, "eval_step": 1, "max_iter": 4}, "T0 T1 E0 T2 E1 T0 T1 E2 T2 E0"),
        ({"train_step": 1, "eval_step": 9, "max_iter": 2}, "T0 E0 E1 E2 T1 E0 E1 E2"),
        ({"train_step": 3, "eval_step": 3, "max_iter": 3}, "T0 T1 T2 E0 E1 E2 " * 3),
        ({"train_step": 1, "eval_step": 1, "max_iter": 4}, "T0 E0 T1 E1 T2 E2 T0 E0"),
    ],
    ids=["one", "two", "suspended in a pass", "long evaluation", "steps that are just a pass", "single steps"],
)
def test_train_and_eval_iterates_and_goes_on_where_it_was_suspended(arguments, expected):
    assert Recorder(batches=3).fit(train_and_eval(**arguments)) == expected.strip()


def test_spent_passes_end_it_after_an_evaluation():
    recorder = Recorder(batches=2, num_epochs=2)
    assert recorder.fit(train_and_eval(max_iter=9)) == "T0 T1 E0 E1 T0 T1 E0 E1"


def test_spent_passes_end_it_without_max_iter():
    recorder = Recorder(batches=2, num_epochs=2)
    assert recorder.fit(train_and_eval(train_step=3, eval_step=1)) == "T0 T1 E0 T0 T1 E1"


@pytest.mark.parametrize("procedure", [train_and_eval(), train_and_eval(train_step=3), cotrain(), cotrain(3)])
def test_what_would_never_end_is_refused(procedure):
    with pytest.raises(ConfigError, match=r"would never end.*Pass max_iter=, or give the source num_epochs="):
        Recorder().fit(procedure)


@pytest.mark.parametrize(("name", "value"), [("train_step", 0), ("eval_step", -1), ("train_interval", 0.0)])
def test_limits_are_above_zero(name, value):
    with pytest.raises(StageError, match=f"={value}.: write a number above 0, or None for no limit"):
        Recorder().fit(train_and_eval(max_iter=1, **{name: value}))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"train_interval": 1.5}, "T0 T1 E0 E1 E2 E3"),
        ({"eval_interval": 2.5}, "T0 T1 T2 T3 E0 E1 E2"),
        ({"train_interval": 2.5, "train_step": 2}, "T0 T1 E0 E1 E2 E3"),
    ],
)
def test_intervals_cut_by_the_clock(monkeypatch, arguments, expected):
    recorder = Recorder()
    clock = lambda: float(len(recorder.calls))  # a step takes a second
    monkeypatch.setattr("plait.engine.stage.time.monotonic", clock)
    assert recorder.fit(train_and_eval(max_iter=1, **arguments)) == expected


def test_each_iteration_has_its_own_interval(monkeypatch):
    recorder = Recorder(evaluates=True)
    monkeypatch.setattr("plait.engine.stage.time.monotonic", lambda: float(len(recorder.calls)))
    assert recorder.fit(train_and_eval(train_interval=2, eval_step=1, max_iter=2)) == "T0 T1 E0 T2 T3 E1"


def test_the_alias_is_the_same():
    assert train_and_evaluate is train_and_eval


def test_a_request_to_stop_ends_everything():
    recorder = Recorder()
    assert recorder.fit(train_and_eval(max_iter=5), hooks=[StopAtStepHook(last_step=2)]) == "T0 T1"


def test_a_task_can_be_named():
    recorder = Recorder(tasks=("a", "b"), batches=2)
    assert recorder.fit(train_and_eval(max_iter=1, task="b")) == "Tb:0 Tb:1 Eb:0 Eb:1"


def test_an_unknown_task_is_named():
    with pytest.raises(TaskError, match="there is no task 'c': the model has 'a', 'b'"):
        Recorder(tasks=("a", "b")).fit(train(task="c"))


def test_history_says_what_each_evaluation_found_from_fresh_metrics():
    recorder = Recorder(batches=4)
    recorder.fit(train_and_eval(train_step=3, eval_step=2, max_iter=3))
    found = [(entry["task"], entry["global_step"], entry["metrics"]["seen"]) for entry in recorder.model.history]
    assert found == [(None, 3, 0.5), (None, 4, 2.5), (None, 7, 0.5)]


def test_training_metrics_are_not_reset_between_iterations():
    model = efl.Model()

    def loss_fn(model, sample):
        model.add_metric("all", efl.metrics.mean(sample.x))
        return plait.layer("fc", nn.Linear, 1, 1)(sample.x).mean()

    model.input_fn(lambda model, mode: [{"x": torch.tensor([[float(i)]])} for i in range(2)])
    model.loss_fn(loss_fn).eval_fn(lambda model, sample: None).optimizer_fn(SETTER).compile()
    model.fit(train_and_eval(train_step=1, max_iter=2))
    assert model.metric_values()["all"] == 0.5


class TestCotrain:
    def tasks(self, calls, what="T"):
        return [call[1] for call in calls if call[0] == what]

    @pytest.mark.parametrize(("ratio", "share"), [({"a": 3, "b": 1}, 0.75), ({"a": 0.5, "b": 0.5}, 0.5), (None, 0.5)])
    def test_ratios_are_respected_on_the_whole(self, ratio, share):
        recorder = Recorder(tasks=("a", "b"), batches=600, evaluates=False)
        recorder.fit(cotrain(train_step=600, max_iter=1, task_select_ratio=ratio))
        counts = Counter(self.tasks(recorder.calls))
        assert sum(counts.values()) == 600
        assert abs(counts["a"] / 600 - share) < 4 * math.sqrt(share * (1 - share) / 600)

    def test_a_draw_is_made_for_each_step(self):
        recorder = Recorder(tasks=("a", "b"), batches=100, evaluates=False)
        recorder.fit(cotrain(train_step=60, max_iter=1))
        drawn = self.tasks(recorder.calls)
        changes = sum(one != other for one, other in zip(drawn, drawn[1:]))
        assert 15 < changes < 45

    def test_draws_can_be_replayed_and_depend_on_the_seed_only(self):
        def drawn(seed):
            recorder = Recorder(tasks=("a", "b"), batches=40, evaluates=False)
            torch.rand(seed + 1)
            recorder.fit(cotrain(train_step=40, max_iter=1, seed=seed))
            return recorder.calls

        assert drawn(1) == drawn(1)
        assert drawn(1) != drawn(2)

    def test_another_iteration_draws_on(self):
        once, twice = (Recorder(tasks=("a", "b"), batches=100, evaluates=False) for _ in range(2))
        once.fit(cotrain(train_step=40, max_iter=1))
        twice.fit(cotrain(train_step=20, max_iter=2))
        assert once.calls == twice.calls

    def test_a_task_whose_pass_has_ended_is_not_drawn_again_in_the_iteration(self):
        recorder = Recorder(tasks=("a", "b"), batches={"a": 2, "b": 9}, evaluates=False)
        recorder.fit(cotrain(max_iter=2, task_select_ratio={"a": 5, "b": 1}))
        assert Counter(self.tasks(recorder.calls)) == {"a": 4, "b": 18}
        assert Counter(self.tasks(recorder.calls[:11])) == {"a": 2, "b": 9}

    def test_a_pass_that_ended_where_an_iteration_did_is_not_the_end_of_the_next(self):
        recorder = Recorder(tasks=("a",), batches=2, evaluates=False)
        recorder.fit(cotrain(train_step=2, max_iter=3))
        assert " ".join(recorder.calls) == "Ta:0 Ta:1 Ta:0 Ta:1 Ta:0 Ta:1"

    def test_spent_tasks_end_it(self):
        recorder = Recorder(tasks=("a", "b"), batches={"a": 2, "b": 3}, num_epochs=2)
        recorder.fit(cotrain(max_iter=9))
        assert Counter(self.tasks(recorder.calls)) == {"a": 4, "b": 6}
        assert len(recorder.model.history) == 4

    def test_each_task_is_evaluated_after_the_training(self):
        recorder = Recorder(tasks=("a", "b"), batches=3)
        recorder.fit(cotrain(train_step=2, eval_step=1, max_iter=1))
        assert recorder.calls[2:] == ["Ea:0", "Eb:0"]
        assert [entry["task"] for entry in recorder.model.history] == ["a", "b"]

    def test_tasks_that_are_not_named_are_neither_trained_nor_evaluated(self):
        recorder = Recorder(tasks=("a", "b"), batches=3)
        recorder.fit(cotrain(max_iter=1, task_select_ratio={"b": 1}))
        assert self.tasks(recorder.calls) == self.tasks(recorder.calls, "E") == ["b"] * 3

    def test_an_unknown_task_is_named(self):
        with pytest.raises(TaskError, match=r"task_select_ratio names 'c': the tasks that train are \['a', 'b'\]"):
            Recorder(tasks=("a", "b")).fit(cotrain(max_iter=1, task_select_ratio={"a": 1, "c": 1}))

    @pytest.mark.parametrize("share", [0, -1, "much", None, math.nan, math.inf])
    def test_a_bad_ratio_says_what_to_write(self, share):
        with pytest.raises(ConfigError, match=r"task_select_ratio\['b'\] is .*: write a number above 0"):
            Recorder(tasks=("a", "b")).fit(cotrain(max_iter=1, task_select_ratio={"a": 1, "b": share}))

    def test_no_task_at_all_is_refused(self):
        with pytest.raises(ConfigError, match="task_select_ratio is empty: name at least one task"):
            Recorder(tasks=("a", "b")).fit(cotrain(max_iter=1, task_select_ratio={}))

    def test_a_request_to_stop_ends_it(self):
        recorder = Recorder(tasks=("a", "b"))
        recorder.fit(cotrain(max_iter=9), hooks=[StopAtStepHook(last_step=3)])
        assert len(recorder.calls) == 3


def test_the_clock_is_real_by_default():
    recorder = Recorder(batches=10_000, evaluates=True)
    begun = time.monotonic()
    recorder.fit(train_and_eval(train_interval=0.05, eval_step=1, max_iter=1))
    assert time.monotonic() - begun < 5
    assert 1 <= int(recorder.model.global_step) < 10_000
