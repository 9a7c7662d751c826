"""Modes and the current task scope."""

from __future__ import annotations

import inspect
import threading

import pytest

from plait import efl
from plait.engine.task import DEFAULT_MODE, MODE, TaskScope, current_task_scope, task_scope


def test_a_mode_is_its_name():
    assert [str(mode) for mode in MODE] == ["TRAIN", "EVAL"]
    assert MODE("EVAL") is MODE.EVAL


def test_outside_of_any_scope_nothing_is_said():
    assert current_task_scope() == TaskScope(None, None)


def test_a_block_has_its_scope_and_then_the_outer_one_again():
    with task_scope(MODE.EVAL, "click") as scope:
        assert scope == current_task_scope() == (MODE.EVAL, "click")
        with task_scope(MODE.TRAIN):
            assert current_task_scope() == (MODE.TRAIN, None)
        assert current_task_scope() == (MODE.EVAL, "click")
    assert current_task_scope() == (None, None)


def test_an_exception_ends_the_scope_too():
    with pytest.raises(KeyError), task_scope(MODE.EVAL):
        raise KeyError
    assert current_task_scope().mode is None


def test_as_a_statement_the_scope_stays():
    with task_scope():
        task_scope(MODE.EVAL, "a")
        assert current_task_scope() == (MODE.EVAL, "a")


def test_a_mode_may_be_given_as_a_string():
    with task_scope("EVAL"):
        assert current_task_scope().mode is MODE.EVAL


def test_another_thread_has_a_scope_of_its_own():
    seen = []
    with task_scope(MODE.EVAL, "a"):
        thread = threading.Thread(target=lambda: seen.append(current_task_scope()))
        thread.start()
        thread.join()
    assert seen == [TaskScope(None, None)]


@pytest.mark.parametrize(
    ("scope", "text"),
    [
        (TaskScope(), "TRAIN"),
        (TaskScope(MODE.EVAL), "EVAL"),
        (TaskScope(MODE.TRAIN, "a"), "TRAIN of task 'a'"),
    ],
)
def test_a_scope_reads_as_words(scope, text):
    assert str(scope) == text


def test_scopes_are_keys():
    assert {TaskScope(MODE.TRAIN, "a"): 1}[TaskScope(MODE.TRAIN, "a")] == 1


def test_the_default_mode_is_the_documented_one_yet_known_from_it():
    assert DEFAULT_MODE == MODE.TRAIN
    assert hash(DEFAULT_MODE) == hash(MODE.TRAIN)
    assert DEFAULT_MODE is not MODE.TRAIN
    assert repr(DEFAULT_MODE) == repr(MODE.TRAIN)
    assert inspect.signature(efl.Model.add_hooks).parameters["mode"].default == MODE.TRAIN


def test_a_call_without_a_mode_takes_the_scopes():
    model = efl.Model()
    with task_scope(MODE.EVAL):
        model.add_metric("found", 1.0)
        model.add_metric("said", 1.0, MODE.TRAIN)
    model.add_metric("outside", 1.0)
    assert {scope.mode: list(states) for scope, states in model.metric_states.items()} == {
        MODE.EVAL: ["found"],
        MODE.TRAIN: ["said", "outside"],
    }
