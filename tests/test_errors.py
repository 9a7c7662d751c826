"""One tree of errors: listed, drawn, and complete."""

from __future__ import annotations

import inspect
import re

import pytest

from plait import errors

CLASSES = {name: thing for name, thing in vars(errors).items() if inspect.isclass(thing)}


def drawn():
    """The tree of the docstring: {name: its parent's name}."""
    parents, path = {}, []
    for line in errors.__doc__.splitlines():
        found = re.match(r"([│├└─ ]*)([A-Z]\w+Error)\b", line)
        if found:
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            parents[found[2]] = path[depth - 1] if depth else None
    return parents


def test_every_class_is_listed():
    assert errors.__all__ == sorted(CLASSES)


def test_the_tree_is_drawn_as_it_is():
    wanted = {name: next((base.__name__ for base in kind.__bases__ if base.__name__ in CLASSES), None)
              for name, kind in CLASSES.items()}  # fmt: skip
    assert drawn() == wanted


@pytest.mark.parametrize("name", CLASSES)
def test_everything_is_a_plait_error_and_says_when_it_is_raised(name):
    assert issubclass(CLASSES[name], errors.PlaitError)
    assert CLASSES[name].__doc__


@pytest.mark.parametrize("name", ["ConfigError", "DataError", "FetchError", "FunctionError", "TaskError"])
def test_a_mistake_of_the_users_is_a_value_error_too(name):
    assert issubclass(CLASSES[name], ValueError)


def test_the_end_of_data_and_a_broken_checkpoint_are_no_mistakes_of_the_users():
    assert not issubclass(errors.OutOfRangeError, errors.UsageError)
    assert not issubclass(errors.CheckpointError, errors.UsageError)


def test_the_text_is_kept():
    assert str(errors.TaskError("there is no task 'a'")) == "there is no task 'a'"
