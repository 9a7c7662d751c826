"""What hooks are made of: arguments, values, context, rebinding."""

from __future__ import annotations

import inspect

import pytest
import torch

import plait
from plait.engine import hooks as module
from plait.engine.hooks import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues, overrides

METHODS = {
    "begin": ["self"],
    "after_create_session": ["self", "session", "coord"],
    "before_run": ["self", "run_context"],
    "after_run": ["self", "run_context", "run_values"],
    "end": ["self", "session"],
}


class Monitor(SessionRunHook):
    def __init__(self, **attributes):
        vars(self).update(attributes)


@pytest.mark.parametrize("name", METHODS)
def test_a_hook_has_tensorflows_methods(name):
    assert list(inspect.signature(getattr(SessionRunHook, name)).parameters) == METHODS[name]


def test_the_base_does_nothing():
    hook, session = SessionRunHook(), plait.Session()
    context = SessionRunContext(None, None, session)
    assert hook.begin() is None
    assert hook.after_create_session(session, None) is None
    assert hook.before_run(context) is None
    assert hook.after_run(context, SessionRunValues()) is None
    assert hook.end(session) is None
    assert hook.state_dict() == {}
    assert hook.load_state_dict({}) is None


def test_arguments_and_values_have_tensorflows_fields():
    assert SessionRunArgs._fields == ("fetches", "feed_dict", "options")
    assert SessionRunValues._fields == ("results", "options", "run_metadata")
    assert SessionRunArgs("x") == ("x", None, None)


def test_a_context_shows_what_the_caller_asked_for():
    session = plait.Session()
    context = SessionRunContext("fetches", {"a": 1}, session)
    assert context.original_args == SessionRunArgs("fetches", {"a": 1})
    assert context.session is session
    assert context.stop_requested is False
    context.request_stop()
    assert context.stop_requested is True


def test_what_a_hook_overrides_is_known_from_its_class():
    class Before(SessionRunHook):
        def before_run(self, run_context):
            return None

    class Derived(Before):
        pass

    assert overrides(Derived(), "before_run")
    assert not overrides(Derived(), "after_run")
    assert not overrides(SessionRunHook(), "before_run")


@pytest.mark.parametrize(
    "value",
    [torch.ones(1), [torch.ones(1)], (1, torch.ones(1)), {"loss": torch.ones(1)}, {"a": [{"b": torch.ones(1)}]}],
    ids=["tensor", "list", "tuple", "dict", "nested"],
)
def test_rebinding_takes_tensors_wherever_they_are(value):
    living = Monitor(value=None)
    living.rebind(Monitor(value=value))
    assert living.value is value


@pytest.mark.parametrize("value", [0, "fresh", [], {}, None], ids=repr)
def test_rebinding_leaves_what_the_living_hook_has_learnt(value):
    living = Monitor(count=17)
    living.rebind(Monitor(count=value))
    assert living.count == 17


def test_the_order_of_hooks_is_written_down():
    text = module.__doc__
    words = ["hook.begin()", "after_create_session(session", "before_run(context)", "session.run(", "after_run(context"]
    places = [text.index(word) for word in [*words, "hook.end(session)"]]
    assert places == sorted(places)
